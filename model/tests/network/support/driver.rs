//! Drives a runner over sequences whose blocks the test chooses.

use std::ops::Range;
use std::sync::Arc;

use keepsake_kernels::{BlockId, Device, Entry, KvPool};
use keepsake_model::{Batch, Model, Runner};

pub const CHUNK_TOKENS: usize = 32;

/// A token log and where its chunks live.
#[derive(Clone)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub blocks: Vec<BlockId>,
}

/// Rows of one sequence in a step.
pub type Part<'a> = (&'a Sequence, Range<usize>);

pub struct Driver {
    pub pool: Arc<KvPool>,
    runner: Runner,
}

impl Driver {
    pub fn new(model: &Arc<Model>, device: &Device, num_blocks: usize, max_rows: usize) -> Self {
        let layout = model.kv_layout(CHUNK_TOKENS);
        let pool = Arc::new(KvPool::new(device, layout, num_blocks).unwrap());
        let runner = Runner::new(model.clone(), device.clone(), pool.clone(), max_rows).unwrap();
        Self { pool, runner }
    }

    /// One forward pass; logits of every row.
    pub fn step(&mut self, parts: &[Part]) -> Vec<Vec<f32>> {
        let mut batch = batch(parts);
        batch.sample_rows = (0..batch.num_rows() as u32).collect();
        self.run(&batch)
    }

    /// Logits of the batch's sample rows.
    pub fn run(&mut self, batch: &Batch) -> Vec<Vec<f32>> {
        let logits = self.runner.forward(batch).unwrap();
        assert_eq!(logits.num_rows(), batch.sample_rows.len());
        (0..logits.num_rows()).map(|row| logits.row(row).to_vec()).collect()
    }

    /// A whole sequence in one step.
    pub fn prefill(&mut self, sequence: &Sequence) -> Vec<Vec<f32>> {
        self.step(&[(sequence, 0..sequence.tokens.len())])
    }

    /// K and V bytes of each position, all layers.
    pub fn kv(&self, sequence: &Sequence) -> Vec<Vec<u8>> {
        let layout = self.pool.layout();
        let token_bytes = 2 * layout.num_kv_heads * layout.head_dim;
        let mut chunk = vec![0; layout.chunk_bytes()];
        let mut positions = Vec::new();
        for (index, &block) in sequence.blocks.iter().enumerate() {
            self.pool.read_chunk(block, &mut chunk).unwrap();
            let first = index * CHUNK_TOKENS;
            for offset in 0..CHUNK_TOKENS.min(sequence.tokens.len().saturating_sub(first)) {
                let halves = chunk.chunks_exact(CHUNK_TOKENS * token_bytes);
                let rows = halves.map(|half| &half[offset * token_bytes..][..token_bytes]);
                positions.push(rows.flatten().copied().collect());
            }
        }
        positions
    }
}

pub fn batch(parts: &[Part]) -> Batch {
    let mut batch = Batch::default();
    for (sequence, range) in parts {
        batch.entries.push(Entry {
            first_row: batch.tokens.len() as u32,
            num_rows: range.len() as u32,
            first_position: range.start as u32,
            first_block: batch.block_table.len() as u32,
            num_blocks: sequence.blocks.len() as u32,
        });
        batch.block_table.extend(&sequence.blocks);
        for position in range.clone() {
            let block = sequence.blocks[position / CHUNK_TOKENS].0 as usize;
            batch.tokens.push(sequence.tokens[position]);
            batch.positions.push(position as u32);
            batch.slots.push((block * CHUNK_TOKENS + position % CHUNK_TOKENS) as u32);
        }
    }
    batch
}

/// Blocks `first..` for a sequence of this length.
pub fn blocks_from(first: usize, num_tokens: usize) -> Vec<BlockId> {
    let num_blocks = num_tokens.div_ceil(CHUNK_TOKENS);
    (first..first + num_blocks).map(|block| BlockId(block as u32)).collect()
}
