//! A whole forward pass at the demo model's shapes (SmolLM2-135M, Q4_1 with a Q8_0 table), with random weights.
//!
//! Argument `ops`: time by operation, from the fastest call of each (with `THREADS=1`: a figure that a busy machine
//! hardly disturbs).

mod support;

use keepsake_kernels::ops::{self, Accumulate, Product};
use keepsake_kernels::{
    Activations, BlockId, Buffer, DType, Device, Entry, InputForms, KvLayout, KvPool, Matrix, RopeScaling, RopeSpec,
    RopeStyle, RopeTable, Worker,
};
use std::cell::RefCell;
use std::time::Instant;
use support::{best_of, threads, weights};

const HIDDEN: usize = 576;
const FFN: usize = 1536;
const HEADS: usize = 9;
const KV: usize = 192;
const VOCAB: usize = 49152;
const LAYERS: usize = 30;

struct Layer {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

struct Model {
    layers: Vec<Layer>,
    table: Matrix,
    norm: Buffer,
    rope: RopeTable,
    pool: KvPool,
    acts: Activations,
    x: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    attended: Buffer,
    gate: Buffer,
    up: Buffer,
    picked: Buffer,
    logits: Buffer,
}

/// `streams` sequences of `rows` new tokens each, after `past`.
struct Batch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    entries: Vec<Entry>,
    table: Vec<BlockId>,
    sampled: Vec<u32>,
}

thread_local! {
    /// Name, fastest call, number of calls.
    static TIMES: RefCell<Vec<(&'static str, f64, usize)>> = const { RefCell::new(Vec::new()) };
}

fn timed(w: &Worker, name: &'static str, run: impl FnOnce() -> keepsake_kernels::Result<()>) {
    let start = Instant::now();
    run().expect("shapes fit");
    if w.index() == 0 {
        let seconds = start.elapsed().as_secs_f64();
        TIMES.with_borrow_mut(|times| match times.iter_mut().find(|(n, ..)| *n == name) {
            Some((_, best, calls)) => {
                *best = best.min(seconds);
                *calls += 1;
            }
            None => times.push((name, seconds, 1)),
        });
    }
}

fn main() {
    let device = Device::open_cpu(threads(), keepsake_kernels::Isa::detect()).expect("a cpu");
    println!("{}", device.describe());
    let max_rows = 512;
    let q4 = |n, k| weights(&device, DType::Q4_1, n, k);
    let layers: Vec<Layer> = (0..LAYERS)
        .map(|_| Layer {
            q: q4(HIDDEN, HIDDEN),
            k: q4(KV, HIDDEN),
            v: q4(KV, HIDDEN),
            o: q4(HIDDEN, HIDDEN),
            gate: q4(FFN, HIDDEN),
            up: q4(FFN, HIDDEN),
            down: q4(HIDDEN, FFN),
        })
        .collect();
    let table = weights(&device, DType::Q8_0, VOCAB, HIDDEN);
    let zeros = |len| Buffer::zeros(&device, len).expect("memory");
    let layout = KvLayout { num_layers: LAYERS, num_kv_heads: 3, head_dim: 64, chunk_tokens: 32 };
    let spec = RopeSpec {
        style: RopeStyle::Interleaved,
        rotary_dim: 64,
        theta: 1e5,
        scaling: RopeScaling::None,
        freq_factors: None,
        max_positions: 8192,
    };
    let model = Model {
        acts: Activations::new(&device, max_rows, FFN, InputForms::for_matrices([&table])).expect("memory"),
        layers,
        table,
        norm: Buffer::from_slice(&device, &[1.0; HIDDEN]).expect("memory"),
        rope: RopeTable::new(&spec).expect("a valid spec"),
        pool: KvPool::new(&device, layout, 512).expect("memory"),
        x: zeros(max_rows * HIDDEN),
        q: zeros(max_rows * HIDDEN),
        k: zeros(max_rows * KV),
        v: zeros(max_rows * KV),
        attended: zeros(max_rows * HIDDEN),
        gate: zeros(max_rows * FFN),
        up: zeros(max_rows * FFN),
        picked: zeros(16 * HIDDEN),
        logits: zeros(16 * VOCAB),
    };
    let by_op = std::env::args().any(|arg| arg == "ops");
    println!("{:>8} {:>6} {:>6} {:>10} {:>10} {:>12}", "streams", "rows", "past", "wall ms", "cpu ms", "tok/s (cpu)");
    for (streams, rows, past) in [
        (1, 1, 128),
        (1, 1, 1500),
        (8, 1, 128),
        (8, 1, 1000),
        (16, 1, 1000),
        (1, 32, 1000),
        (1, 512, 0),
        (1, 512, 1000),
    ] {
        let batch = batch(streams, rows, past);
        TIMES.with_borrow_mut(Vec::clear);
        let reps = if rows > 100 { 5 } else { 15 };
        let (wall, cpu) = best_of(reps, || device.run(|w| forward(w, &model, &batch)));
        let tokens = (streams * rows) as f64;
        println!("{streams:>8} {rows:>6} {past:>6} {:>10.2} {:>10.2} {:>12.1}", wall * 1e3, cpu * 1e3, tokens / cpu);
        if by_op {
            TIMES.with_borrow(|times| {
                let mut sum = 0.0;
                for (name, best, calls) in times {
                    let ms = best * (calls / reps) as f64 * 1e3;
                    sum += ms;
                    println!("    {name:>12} {ms:>8.3} ms");
                }
                println!("    {:>12} {sum:>8.3} ms: {:.1} tok/s", "sum", tokens / sum * 1e3);
            });
        }
    }
}

fn batch(streams: usize, rows: usize, past: usize) -> Batch {
    let blocks = (past + rows).div_ceil(32);
    let mut batch =
        Batch { tokens: vec![], positions: vec![], slots: vec![], entries: vec![], table: vec![], sampled: vec![] };
    for stream in 0..streams {
        let entry = Entry {
            first_row: batch.tokens.len() as u32,
            num_rows: rows as u32,
            first_position: past as u32,
            first_block: batch.table.len() as u32,
            num_blocks: blocks as u32,
        };
        batch.entries.push(entry);
        batch.table.extend((0..blocks).map(|b| BlockId((stream * blocks + b) as u32 % 512)));
        for position in past..past + rows {
            batch.tokens.push((position * 37 % VOCAB) as u32);
            batch.positions.push(position as u32);
            batch.slots.push(((stream * blocks * 32 + position) % (512 * 32)) as u32);
        }
        batch.sampled.push(batch.tokens.len() as u32 - 1);
    }
    batch
}

fn forward(w: &Worker, m: &Model, b: &Batch) {
    let rows = b.tokens.len();
    let (add, set) = (Accumulate::Add, Accumulate::Set);
    timed(w, "embedding", || ops::embedding(w, &m.table, &b.tokens, &m.x));
    for (index, layer) in m.layers.iter().enumerate() {
        timed(w, "norm", || ops::rms_norm_prepare(w, &m.x, &m.norm, 1e-5, rows, HIDDEN, &m.acts));
        timed(w, "qkv", || {
            let products = [
                Product { matrix: &layer.q, out: &m.q },
                Product { matrix: &layer.k, out: &m.k },
                Product { matrix: &layer.v, out: &m.v },
            ];
            ops::matmul_many(w, &m.acts, &products, set)
        });
        timed(w, "rope", || {
            ops::rope_and_write(w, &m.q, &m.k, &m.v, &b.positions, &b.slots, &m.rope, &m.pool, index, HEADS)
        });
        timed(w, "attention", || {
            ops::attention(w, &m.q, &m.pool, index, &b.entries, &b.table, HEADS, 0.125, &m.attended)
        });
        timed(w, "prepare", || ops::prepare(w, &m.attended, rows, HIDDEN, &m.acts));
        timed(w, "o", || ops::matmul(w, &m.acts, &layer.o, &m.x, add));
        timed(w, "norm", || ops::rms_norm_prepare(w, &m.x, &m.norm, 1e-5, rows, HIDDEN, &m.acts));
        timed(w, "gate up", || {
            let products = [Product { matrix: &layer.gate, out: &m.gate }, Product { matrix: &layer.up, out: &m.up }];
            ops::matmul_many(w, &m.acts, &products, set)
        });
        timed(w, "silu", || ops::silu_mul_prepare(w, &m.gate, &m.up, rows, FFN, &m.acts));
        timed(w, "down", || ops::matmul(w, &m.acts, &layer.down, &m.x, add));
    }
    timed(w, "gather", || ops::gather_rows(w, &m.x, &b.sampled, HIDDEN, &m.picked));
    timed(w, "norm", || ops::rms_norm_prepare(w, &m.picked, &m.norm, 1e-5, b.sampled.len(), HIDDEN, &m.acts));
    timed(w, "logits", || ops::matmul(w, &m.acts, &m.table, &m.logits, set));
}
