//! A token's K/V and logits are the same bits however the work was cut into steps.

use std::ops::Range;
use std::sync::Arc;

use keepsake_kernels::{BlockId, Device, DeviceKind};
use keepsake_model::Model;
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::support::blocks::ALL_DTYPES;
use crate::support::driver::{blocks_from, Driver, Sequence, CHUNK_TOKENS};
use crate::support::tiny::{self, TinyModel};

const NUM_BLOCKS: usize = 64;
const MAX_ROWS: usize = 256;

/// Bits of a sequence computed alone, in one step, by one thread, in blocks in order.
struct Expected {
    logits: Vec<Vec<f32>>,
    kv: Vec<Vec<u8>>,
}

fn alone(model: &Arc<Model>, device: &Device, tokens: &[u32]) -> Expected {
    let sequence = Sequence { tokens: tokens.to_vec(), blocks: blocks_from(0, tokens.len()) };
    let mut driver = Driver::new(model, device, NUM_BLOCKS, MAX_ROWS);
    Expected { logits: driver.prefill(&sequence), kv: driver.kv(&sequence) }
}

/// A sequence on its way: everything before `done` is computed, except what a test damaged.
struct Progress {
    sequence: Sequence,
    done: usize,
}

impl Progress {
    /// The next rows, and sometimes earlier ones whose K/V is lost first, in ascending position.
    fn next_parts(&self, rng: &mut StdRng, driver: &Driver) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        if self.done > 1 && rng.random_bool(0.3) {
            let end = rng.random_range(1..=self.done);
            let start = end.saturating_sub(rng.random_range(1..=40));
            let middle = rng.random_range(start..=end);
            // One hole or two that leave a gap.
            for hole in [start..middle.saturating_sub(3).max(start), middle..end] {
                if !hole.is_empty() {
                    lose(driver, &self.sequence, hole.clone());
                    parts.push(hole);
                }
            }
        }
        let left = self.sequence.tokens.len() - self.done;
        let most = if rng.random_bool(0.5) { 1 } else { 70 };
        parts.push(self.done..self.done + rng.random_range(1..=left.min(most)));
        parts
    }
}

/// Overwrites the K/V of some positions with bytes that would poison what attends them (f16 NaN).
fn lose(driver: &Driver, sequence: &Sequence, positions: Range<usize>) {
    let layout = driver.pool.layout();
    let token_bytes = 2 * layout.num_kv_heads * layout.head_dim;
    let mut chunk = vec![0; layout.chunk_bytes()];
    for position in positions {
        let block = sequence.blocks[position / CHUNK_TOKENS];
        driver.pool.read_chunk(block, &mut chunk).unwrap();
        for half in chunk.chunks_exact_mut(CHUNK_TOKENS * token_bytes) {
            half[position % CHUNK_TOKENS * token_bytes..][..token_bytes].fill(0x7e);
        }
        driver.pool.write_chunk(block, &chunk).unwrap();
    }
}

fn check_random_schedule(seed: u64) -> Result<(), TestCaseError> {
    let mut rng = StdRng::seed_from_u64(seed);
    let dtype = ALL_DTYPES[rng.random_range(0..ALL_DTYPES.len())];
    let model_seed = rng.random_range(0..4);
    let tiny = TinyModel::new(model_seed, dtype, rng.random());
    let one_thread = Device::open(DeviceKind::Cpu, 1).unwrap();
    let device = Device::open(DeviceKind::Cpu, rng.random_range(1..=3)).unwrap();
    let plain_model = tiny.load_gguf(&one_thread);
    let model = tiny.load_gguf(&device);

    let mut free: Vec<BlockId> = (0..NUM_BLOCKS as u32).map(BlockId).collect();
    free.shuffle(&mut rng);
    let mut all: Vec<(Progress, Expected)> = (0..rng.random_range(1..=6))
        .map(|_| {
            let len = rng.random_range(1..=160);
            let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(0..tiny::SHAPE.vocab_size as u32)).collect();
            let expected = alone(&plain_model, &one_thread, &tokens);
            let blocks = free.split_off(free.len() - tokens.len().div_ceil(CHUNK_TOKENS));
            let sequence = Sequence { tokens, blocks };
            (Progress { sequence, done: 0 }, expected)
        })
        .collect();

    let mut driver = Driver::new(&model, &device, NUM_BLOCKS, MAX_ROWS);
    while all.iter().any(|(progress, _)| progress.done < progress.sequence.tokens.len()) {
        let mut parts = Vec::new();
        let mut chosen = Vec::new();
        let mut rows = 0;
        for (index, (progress, _)) in all.iter().enumerate() {
            if progress.done == progress.sequence.tokens.len() || rng.random_bool(0.3) {
                continue;
            }
            for range in progress.next_parts(&mut rng, &driver) {
                rows += range.len();
                chosen.push((index, range));
            }
            if rows > MAX_ROWS - 110 {
                break;
            }
        }
        if chosen.is_empty() {
            continue;
        }
        parts.extend(chosen.iter().map(|(index, range)| (&all[*index].0.sequence, range.clone())));
        let mut logits = driver.step(&parts).into_iter();
        for (index, range) in chosen {
            let (progress, expected) = &mut all[index];
            for position in range.clone() {
                let row = logits.next().unwrap();
                prop_assert!(
                    same_bits(&row, &expected.logits[position]),
                    "{dtype:?}: logits of position {position} of sequence {index} differ"
                );
            }
            progress.done = progress.done.max(range.end);
        }
    }
    for (index, (progress, expected)) in all.iter().enumerate() {
        let kv = driver.kv(&progress.sequence);
        prop_assert_eq!(kv.len(), expected.kv.len());
        for (position, (got, wanted)) in kv.iter().zip(&expected.kv).enumerate() {
            prop_assert!(got == wanted, "{dtype:?}: K/V of position {position} of sequence {index} differ");
        }
    }
    Ok(())
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_schedule_gives_the_same_bits(seed in any::<u64>()) {
        check_random_schedule(seed)?;
    }
}

/// The last layer skips rows that nobody samples; what it gives for the others stays.
#[test]
fn unsampled_rows_change_nothing() {
    let tiny = TinyModel::new(1, keepsake_kernels::DType::Q4_1, true);
    let device = Device::open(DeviceKind::Cpu, 2).unwrap();
    let model = tiny.load_gguf(&device);
    let tokens: Vec<u32> = (0..100).map(|i| i * 7 % 300).collect();
    let expected = alone(&model, &device, &tokens);
    let sequence = Sequence { blocks: blocks_from(3, tokens.len()), tokens };
    for sample_rows in [vec![], vec![99], vec![0], vec![3, 50, 98]] {
        let mut driver = Driver::new(&model, &device, NUM_BLOCKS, MAX_ROWS);
        let mut batch = crate::support::driver::batch(&[(&sequence, 0..100)]);
        batch.sample_rows = sample_rows.clone();
        for (row, logits) in sample_rows.iter().zip(driver.run(&batch)) {
            assert!(same_bits(&logits, &expected.logits[*row as usize]), "row {row}");
        }
        assert!(driver.kv(&sequence) == expected.kv);
    }
}
