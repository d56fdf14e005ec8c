//! Chunks between the device and pinned memory: the same bytes, how fast, and beside a step. Graphs replayed.

use half::bf16;
use keepsake_kernels::cuda::ops::{self, Addends};
use keepsake_kernels::cuda::{
    Copies, CudaKvPool, DeviceBuffer, Event, Graph, HostPage, Method, Output, PinnedBuffer, Stream, Weight,
};
use keepsake_kernels::ops::Accumulate;
use keepsake_kernels::{BlockId, KernelError, KvLayout};
use rand::seq::SliceRandom;
use rand::Rng;

use crate::harness::Harness;

/// llama3-8b: pages of 131,072 bytes, chunks of 4 MiB.
const LAYOUT: KvLayout = KvLayout { num_layers: 32, num_kv_heads: 8, head_dim: 128, chunk_tokens: 32 };
const CHUNKS: usize = 128;

pub fn run(h: &mut Harness) -> Result<(), KernelError> {
    let pool = CudaKvPool::new(&h.context, LAYOUT, CHUNKS)?;
    let start = std::time::Instant::now();
    let mut slab = PinnedBuffer::<u8>::new(&h.context, "a test's slab", CHUNKS * LAYOUT.chunk_bytes())?;
    let seconds = start.elapsed().as_secs_f64();
    println!("pinned {:.2} GiB in {seconds:.2} s", slab.len() as f64 / (1u64 << 30) as f64);
    h.rng.fill(slab.as_mut_slice());
    for method in [Method::Batch, Method::Kernel] {
        round_trip(h, &pool, &mut slab, method)?;
    }
    layer_events(h, &pool, &slab)?;
    rates(h, &pool, &slab)?;
    beside_a_step(h, &pool, &slab)?;
    graph(h)
}

fn copies(h: &Harness, method: Method) -> Result<Copies, KernelError> {
    Ok(Copies::new(Stream::new(&h.context)?, method))
}

/// Random chunks to random blocks and back to other places.
fn round_trip(
    h: &mut Harness,
    pool: &CudaKvPool,
    slab: &mut PinnedBuffer<u8>,
    method: Method,
) -> Result<(), KernelError> {
    let bytes = LAYOUT.chunk_bytes();
    let copies = copies(h, method)?;
    let count = CHUNKS / 2 - 3;
    let mut blocks: Vec<u32> = (0..CHUNKS as u32).collect();
    blocks.shuffle(&mut h.rng);
    let mut places: Vec<usize> = (0..CHUNKS / 2).collect();
    places.shuffle(&mut h.rng);
    let page = |i: usize, first: usize| HostPage { block: BlockId(blocks[i]), offset: (first + places[i]) * bytes };
    let there: Vec<HostPage> = (0..count).map(|i| page(i, 0)).collect();
    let back: Vec<HostPage> = (0..count).map(|i| page(i, CHUNKS / 2)).collect();
    slab.as_mut_slice()[CHUNKS / 2 * bytes..].fill(0xee);
    let all: Vec<BlockId> = (0..CHUNKS as u32).map(BlockId).collect();
    pool.poison(copies.stream(), &all)?;
    copies.swap_in(pool, slab, &there, &[])?;
    copies.swap_out(pool, slab, &back, &[])?;
    copies.stream().synchronize()?;
    let host = slab.as_slice();
    for (from, to) in there.iter().zip(&back) {
        if host[from.offset..from.offset + bytes] != host[to.offset..to.offset + bytes] {
            h.fail(format!("{method:?}: block {} came back different", from.block.0));
        }
        let mut layer = vec![0; LAYOUT.layer_chunk_bytes()];
        pool.read_layers(from.block, 7..8, &mut layer)?;
        let range = LAYOUT.layer_range_in_chunk(7);
        if layer != host[from.offset + range.start..from.offset + range.end] {
            h.fail(format!("{method:?}: layer 7 of block {} lies elsewhere", from.block.0));
        }
    }
    let untouched = (CHUNKS / 2..CHUNKS).filter(|place| !back.iter().any(|page| page.offset == place * bytes));
    for place in untouched {
        if slab.as_slice()[place * bytes..(place + 1) * bytes].iter().any(|&byte| byte != 0xee) {
            h.fail(format!("{method:?}: place {place} was written"));
        }
    }
    println!("{method:?}: {count} chunks there and back, bytes compared");
    Ok(())
}

/// The first layer's event is long done when the last one's is.
fn layer_events(h: &mut Harness, pool: &CudaKvPool, slab: &PinnedBuffer<u8>) -> Result<(), KernelError> {
    let copies = copies(h, Method::Batch)?;
    let pages = pages(64);
    let timed = |_| Event::timed(&h.context);
    let start = Event::timed(&h.context)?;
    let events: Vec<Event> = (0..LAYOUT.num_layers).map(timed).collect::<Result<_, _>>()?;
    for _ in 0..2 {
        copies.stream().record(&start)?;
        copies.swap_in(pool, slab, &pages, &events)?;
    }
    copies.stream().synchronize()?;
    let (first, last) = (start.seconds_to(&events[0])?, start.seconds_to(&events[LAYOUT.num_layers - 1])?);
    println!("64 chunks in: layer 0 after {:.2} ms, layer 31 after {:.2} ms", first * 1e3, last * 1e3);
    if first > last / 8.0 {
        h.fail("layer events do not come layer by layer".to_owned());
    }
    Ok(())
}

fn pages(count: usize) -> Vec<HostPage> {
    (0..count).map(|i| HostPage { block: BlockId(i as u32), offset: i * LAYOUT.chunk_bytes() }).collect()
}

fn rates(h: &mut Harness, pool: &CudaKvPool, slab: &PinnedBuffer<u8>) -> Result<(), KernelError> {
    println!("{:<10} {:>8} {:>10} {:>10} {:>10}", "copies", "chunks", "in GB/s", "out GB/s", "both GB/s");
    for method in [Method::Batch, Method::Kernel] {
        let (there, back) = (copies(h, method)?, copies(h, method)?);
        for count in [1, 4, 16, 64] {
            let bytes = (count * LAYOUT.chunk_bytes()) as f64;
            let pages_in = pages(count);
            let pages_out: Vec<HostPage> = pages(2 * count).split_off(count);
            let seconds_in = host_median(&there, |copies| copies.swap_in(pool, slab, &pages_in, &[]))?;
            let seconds_out = host_median(&back, |copies| copies.swap_out(pool, slab, &pages_out, &[]))?;
            let both = host_median(&there, |copies| {
                copies.swap_in(pool, slab, &pages_in, &[])?;
                back.swap_out(pool, slab, &pages_out, &[])?;
                back.stream().synchronize()
            })?;
            let (rate_in, rate_out) = (bytes / seconds_in / 1e9, bytes / seconds_out / 1e9);
            println!(
                "{:<10} {count:>8} {rate_in:>10.1} {rate_out:>10.1} {:>10.1}",
                format!("{method:?}"),
                2.0 * bytes / both / 1e9
            );
            if count == 64 && method == Method::Batch && rate_in.min(rate_out) < 45.0 {
                h.fail(format!("64 chunks at {rate_in:.1} and {rate_out:.1} GB/s, not 45"));
            }
        }
    }
    Ok(())
}

/// The median of 25 by the host's clock: enqueueing is part of it.
fn host_median(copies: &Copies, run: impl Fn(&Copies) -> Result<(), KernelError>) -> Result<f64, KernelError> {
    let mut seconds = Vec::new();
    for round in 0..28 {
        let start = std::time::Instant::now();
        run(copies)?;
        copies.stream().synchronize()?;
        if round >= 3 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

/// A decode step's products (the layers of llama2-13b, 64 rows), alone and while copies run.
fn beside_a_step(h: &mut Harness, pool: &CudaKvPool, slab: &PinnedBuffer<u8>) -> Result<(), KernelError> {
    let (rows, hidden, ffn) = (64, 5120, 13824);
    let shapes = [(3 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)];
    let mut weights = Vec::new();
    for _ in 0..8 {
        for (n, k) in shapes {
            let data = DeviceBuffer::<bf16>::new(&h.context, "weights", n * k)?;
            ops::fill_uniform(&h.stream, h.rng.random(), 0.02, data.view())?;
            weights.push(Weight::new(data, n, k)?);
        }
    }
    let x = DeviceBuffer::<bf16>::new(&h.context, "x", rows * ffn)?;
    ops::fill_uniform(&h.stream, 1, 1.0, x.view())?;
    let out = DeviceBuffer::<bf16>::new(&h.context, "out", rows * 2 * ffn)?;
    let step = || {
        weights.iter().try_for_each(|weight| h.blas.matmul(&h.stream, x.view(), rows, weight, Output::Bf16(out.view())))
    };
    step()?;
    h.stream.synchronize()?;
    let graph = Graph::capture(&h.stream, step)?;
    let alone = h.median(|| graph.launch(&h.stream))?;
    println!("8 layers of llama2-13b's products, 64 rows: {:.3} ms alone", alone * 1e3);
    for method in [Method::Batch, Method::Kernel] {
        let (there, back) = (copies(h, method)?, copies(h, method)?);
        for (name, runs_in, runs_out) in [("in", true, false), ("out", false, true), ("both", true, true)] {
            // Enough copies to outlast the steps that are timed.
            for _ in 0..40 {
                if runs_in {
                    there.swap_in(pool, slab, &pages(32), &[])?;
                }
                if runs_out {
                    back.swap_out(pool, slab, &pages(64)[32..], &[])?;
                }
            }
            let beside = h.median(|| graph.launch(&h.stream))?;
            let done = [&there, &back].iter().all(|copies| {
                let event = Event::new(&h.context);
                event.is_ok_and(|event| copies.stream().record(&event).is_ok() && event.is_done().unwrap_or(true))
            });
            there.stream().synchronize()?;
            back.stream().synchronize()?;
            let slower = (beside / alone - 1.0) * 100.0;
            let note = if done { ", copies had ended before the steps" } else { "" };
            println!("  beside {method:?} {name}: {:.3} ms, {slower:+.1}%{note}", beside * 1e3);
        }
    }
    Ok(())
}

/// A small forward pass, eagerly and as a graph whose inputs change between replays.
fn graph(h: &mut Harness) -> Result<(), KernelError> {
    let (rows, vocab, dim, ffn) = (6, 1000, 512, 1024);
    let uniform = |seed: u64, n: usize, k: usize| -> Result<Weight, KernelError> {
        let data = DeviceBuffer::<bf16>::new(&h.context, "weights", n * k)?;
        ops::fill_uniform(&h.stream, seed, (3.0 / k as f32).sqrt(), data.view())?;
        Weight::new(data, n, k)
    };
    let table = uniform(1, vocab, dim)?;
    let (gate_up, down) = (uniform(2, 2 * ffn, dim)?, uniform(3, dim, ffn)?);
    let norm = h.upload(&vec![1.0f32; dim])?;
    let tokens = DeviceBuffer::<u32>::zeros(&h.context, "tokens", rows)?;
    let x = h.poisoned::<f32>(rows * dim)?;
    let input = h.poisoned::<bf16>(rows * dim)?;
    let (wide, narrow) = (h.poisoned::<bf16>(rows * 2 * ffn)?, h.poisoned::<bf16>(rows * ffn)?);
    let logits = h.poisoned::<f32>(rows * vocab)?;
    let (stream, blas) = (&h.stream, &h.blas);
    let pass = || {
        ops::embedding(stream, &table, tokens.view(), None, rows, x.view())?;
        for _ in 0..40 {
            let norm = norm.view();
            ops::rms_norm(stream, x.view(), Addends::none(), norm, 1e-5, rows, dim, input.view())?;
            blas.matmul(stream, input.view(), rows, &gate_up, Output::Bf16(wide.view()))?;
            ops::silu_mul(stream, wide.view(), rows, ffn, narrow.view())?;
            blas.matmul(stream, narrow.view(), rows, &down, Output::F32(x.view(), Accumulate::Add))?;
        }
        ops::rms_norm(stream, x.view(), Addends::none(), norm.view(), 1e-5, rows, dim, input.view())?;
        blas.matmul(stream, input.view(), rows, &table, Output::F32(logits.view(), Accumulate::Set))
    };
    pass()?;
    stream.synchronize()?;
    let graph = Graph::capture(stream, pass)?;
    let mut failures = 0;
    for _ in 0..3 {
        let ids: Vec<u32> = (0..rows).map(|_| h.rng.random_range(0..vocab as u32)).collect();
        stream.write(tokens.view(), &ids)?;
        pass()?;
        let want = stream.read(logits.view())?;
        stream.fill_bytes(logits.view(), 0xff)?;
        graph.launch(stream)?;
        let got = stream.read::<f32>(logits.view())?;
        failures += usize::from(got != want || want.iter().any(|value| value.is_nan()));
    }
    let replay = h.median(|| graph.launch(stream))?;
    let eager = h.median(pass)?;
    println!("graph of {} operations: {:.0} us a replay, {:.0} us eagerly", 4 * 40 + 3, replay * 1e6, eager * 1e6);
    if failures > 0 {
        h.fail(format!("{failures} of 3 replays differ from the eager pass"));
    }
    Ok(())
}
