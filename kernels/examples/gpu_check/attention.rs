//! Attention against the CPU's reference form, on steps that mix decode, prefill and holes.

use half::{bf16, f16};
use keepsake_kernels::cuda::ops::{Attention, AttentionInputs, AttentionPlan};
use keepsake_kernels::cuda::{CudaKvPool, DeviceBuffer};
use keepsake_kernels::ops as cpu;
use keepsake_kernels::{BlockId, Buffer, Entry, KernelError, KvLayout, KvPool};
use rand::seq::SliceRandom;
use rand::Rng;

use crate::harness::Harness;

/// Heads and chunks that kernels are compiled for.
pub struct Case {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub chunk_tokens: usize,
}

const fn case(num_heads: usize, num_kv_heads: usize, head_dim: usize, chunk_tokens: usize) -> Case {
    Case { num_heads, num_kv_heads, head_dim, chunk_tokens }
}

pub const CASES: [Case; 10] = [
    case(9, 3, 64, 32),
    case(8, 2, 128, 32),
    case(4, 4, 128, 32),
    case(4, 4, 80, 32),
    case(6, 2, 96, 16),
    case(4, 2, 256, 32),
    case(16, 1, 128, 64),
    case(4, 4, 64, 32),
    case(4, 2, 64, 32),
    case(5, 1, 128, 16),
];

/// llama2-13b and llama3-8b.
pub const TIMED: [Case; 2] = [case(40, 40, 128, 32), case(32, 8, 128, 32)];

impl Case {
    pub fn defines(&self) -> [(&'static str, usize); 3] {
        let group = self.num_heads / self.num_kv_heads;
        [("HEAD_DIM", self.head_dim), ("GROUP", group), ("CHUNK_TOKENS", self.chunk_tokens)]
    }

    pub fn layout(&self, num_layers: usize) -> KvLayout {
        KvLayout {
            num_layers,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            chunk_tokens: self.chunk_tokens,
        }
    }
}

/// A plan's parts on the device.
pub struct Uploaded {
    table: DeviceBuffer<u32>,
    decode: DeviceBuffer<u32>,
    tiles: DeviceBuffer<u32>,
}

impl Uploaded {
    pub fn new(h: &Harness, table: &[BlockId], plan: &AttentionPlan) -> Result<Uploaded, KernelError> {
        let table: Vec<u32> = table.iter().map(|block| block.0).collect();
        Ok(Uploaded { table: h.upload(&table)?, decode: h.upload(&plan.decode)?, tiles: h.upload(&plan.tiles)? })
    }

    pub fn inputs(&self) -> AttentionInputs<'_> {
        AttentionInputs { block_table: self.table.view(), decode: self.decode.view(), tiles: self.tiles.view() }
    }
}

pub fn check(h: &mut Harness) -> Result<(), KernelError> {
    let (cases, max_keys, rounds) = match h.is_small {
        true => (&CASES[..2], 90, 1),
        false => (&CASES[..], 1500, 3),
    };
    for case in cases {
        for _ in 0..rounds {
            check_step(h, case, max_keys)?;
        }
    }
    Ok(())
}

/// (rows, first position) of a step's entries: what a scheduler would mix.
fn random_entries(h: &mut Harness, max_keys: u32) -> Vec<(u32, u32)> {
    let count = if h.is_small { 4 } else { 12 };
    (0..count)
        .map(|_| match h.rng.random_range(0..4) {
            0 | 1 => (1, h.rng.random_range(0..max_keys)),
            2 => (h.rng.random_range(1..max_keys / 3), 0),
            _ => (h.rng.random_range(1..80), h.rng.random_range(0..max_keys)),
        })
        .collect()
}

fn check_step(h: &mut Harness, case: &Case, max_keys: u32) -> Result<(), KernelError> {
    let Case { num_heads, head_dim, chunk_tokens, .. } = *case;
    let layout = case.layout(2);
    let shapes = random_entries(h, max_keys);
    let blocks_of = |&(rows, first): &(u32, u32)| ((rows + first) as usize).div_ceil(chunk_tokens);
    let needed: usize = shapes.iter().map(blocks_of).sum();
    let num_blocks = needed + 3;
    let mut free: Vec<u32> = (0..num_blocks as u32).collect();
    free.shuffle(&mut h.rng);
    let mut entries = Vec::new();
    let mut table = Vec::new();
    let mut next_row = 0;
    for shape in &shapes {
        let blocks = blocks_of(shape);
        entries.push(Entry {
            first_row: next_row,
            num_rows: shape.0,
            first_position: shape.1,
            first_block: table.len() as u32,
            num_blocks: blocks as u32,
        });
        table.extend(free.drain(..blocks).map(BlockId));
        next_row += shape.0;
    }
    let rows = next_row as usize;

    let reference = KvPool::new(&h.reference, layout, num_blocks)?;
    let pool = CudaKvPool::new(&h.context, layout, num_blocks)?;
    for layer in 0..2 {
        h.stream.fill_bytes(pool.layer(layer)?, 0xff)?;
    }
    h.stream.synchronize()?;
    for entry in &entries {
        let keys = (entry.first_position + entry.num_rows) as usize;
        for (index, &block) in table[entry.first_block as usize..][..entry.num_blocks as usize].iter().enumerate() {
            // What lies past the last key stays NaN on the device and must not be seen.
            let live = (keys - index * chunk_tokens).min(chunk_tokens) * layout.token_len();
            let half = chunk_tokens * layout.token_len();
            let mut values = h.random(2 * half, 1.0);
            let in_f16: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(v.to_f32()).to_le_bytes()).collect();
            reference.write_layer(block, 1, &in_f16)?;
            for part in [live..half, half + live..2 * half] {
                values[part].fill(bf16::NAN);
            }
            let in_bf16: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            pool.write_layers(block, 1..2, &in_bf16)?;
        }
    }
    let width = num_heads * head_dim;
    let q = h.random(rows * width, 2.0);
    let q_floats: Vec<f32> = q.iter().map(|value| value.to_f32()).collect();
    let q_at = Buffer::from_slice(&h.reference, &q_floats)?;
    let want = Buffer::zeros(&h.reference, rows * width)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    h.reference.run(|w| cpu::attention(w, &q_at, &reference, 1, &entries, &table, num_heads, scale, &want))?;

    let attention = Attention::new(&pool, num_heads, entries.len())?;
    let uploaded = Uploaded::new(h, &table, &attention.plan(&entries))?;
    let q_on = h.upload(&q)?;
    // Twice: the decode kernel's counters have to come back to zero.
    for round in 0..2 {
        let out = h.poisoned::<bf16>(rows * width)?;
        attention.run(&h.stream, &pool, 1, q_on.view(), &uploaded.inputs(), rows, scale, out.view())?;
        let got = h.read_bf16(out.view())?;
        let what =
            format!("{num_heads}/{} heads of {head_dim}, chunks of {chunk_tokens}, round {round}", case.num_kv_heads);
        h.compare("attention", &what, &got, &want.read(0..rows * width)?);
    }
    Ok(())
}
