//! Forward passes: a prompt's chunk and a decode row, at power-of-two context lengths.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use keepsake_kernels::{BlockId, Entry, KvPool};
use keepsake_model::{Batch, Runner};
use keepsake_tiers::eviction::CostCurve;
use serde::{Deserialize, Serialize};

use super::samples::median;
use super::Subject;

/// Blocks of the scratch pool: enough for contexts that no cache of a processor holds, little beside any device tier.
const MAX_BLOCKS: usize = 128;
/// Decode rows of the larger batch: against a batch of one, they tell a row's cost from the step's.
const ROWS: usize = 8;
/// The shortest context.
const FIRST_CONTEXT: usize = 32;
/// No longer context is begun after this; a curve goes on as the straight line it ends with.
const TIME_FIRST: Duration = Duration::from_millis(800);
/// No further round over all lengths is begun after this.
const TIME_ALL: Duration = Duration::from_millis(2_500);
const ROUNDS: std::ops::RangeInclusive<usize> = 3..=9;
/// The least share of a step that its rows are taken to cost, when noise says less.
const LEAST_SHARE: f64 = 0.02;

/// A prompt's chunk, beyond what every step costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChunkCost {
    /// Tokens that the chunk's last row attends to.
    pub context: u32,
    pub attention_seconds: f64,
    /// The same at every length.
    pub rest_seconds: f64,
}

impl ChunkCost {
    pub fn total_seconds(&self) -> f64 {
        self.attention_seconds + self.rest_seconds
    }
}

/// One decode row, beyond what every step costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeCost {
    pub context: u32,
    pub seconds: f64,
}

pub(super) struct ComputeCosts {
    pub(super) step: f64,
    pub(super) chunks: Vec<ChunkCost>,
    pub(super) decode: Vec<DecodeCost>,
}

impl ComputeCosts {
    pub(super) fn chunk_curve(&self) -> anyhow::Result<CostCurve> {
        let points = self.chunks.iter().map(|chunk| (chunk.context, chunk.total_seconds())).collect();
        CostCurve::new(points).context("the measured chunk costs make no curve")
    }

    pub(super) fn decode_curve(&self) -> anyhow::Result<CostCurve> {
        let points = self.decode.iter().map(|row| (row.context, row.seconds)).collect();
        CostCurve::new(points).context("the measured decode costs make no curve")
    }
}

/// Seconds of whole steps at one context length.
#[derive(Clone, Copy, Debug)]
struct Steps {
    context: usize,
    chunk: f64,
    one_row: f64,
    many_rows: f64,
}

pub(super) fn measure(subject: &Subject) -> anyhow::Result<ComputeCosts> {
    let chunk_tokens = subject.layout.chunk_tokens;
    let device_blocks = subject.tiers[0].capacity.as_u64() as usize / subject.layout.chunk_bytes().max(1);
    let num_blocks = device_blocks.clamp(ROWS, MAX_BLOCKS);
    let mut bench = Bench::new(subject, num_blocks)?;
    let longest = subject.max_context.min(subject.model.hparams.max_context).min(num_blocks * chunk_tokens);
    let started = Instant::now();
    let mut lengths: Vec<Length> = Vec::new();
    let mut context = FIRST_CONTEXT.max(chunk_tokens).min(longest);
    while context <= longest && (lengths.is_empty() || started.elapsed() < TIME_FIRST) {
        let mut length = bench.length(context);
        // Unmeasured: it touches memory.
        bench.sample(&mut length)?;
        length.samples.clear();
        lengths.push(length);
        context *= 2;
    }
    // Round after round over all lengths: whatever else the machine does for a moment hits each a little, and no median.
    let (least, most) = (*ROUNDS.start(), *ROUNDS.end());
    for round in 0..most {
        if round >= least && started.elapsed() >= TIME_ALL {
            break;
        }
        for length in &mut lengths {
            bench.sample(length)?;
        }
    }
    let steps: Vec<Steps> = lengths.iter().map(Length::steps).collect();
    Ok(split(&steps, chunk_tokens))
}

/// Tells from whole steps what the step, its rows, and their attention cost.
fn split(steps: &[Steps], chunk_tokens: usize) -> ComputeCosts {
    let first = steps[0];
    let at_least = |seconds: f64, of: f64| seconds.max(of * LEAST_SHARE);
    let row = |s: &Steps| at_least((s.many_rows - s.one_row) / (ROWS - 1) as f64, s.one_row);
    let step = at_least(first.one_row - row(&first), first.one_row);
    let decode = steps.iter().map(|s| DecodeCost { context: s.context as u32, seconds: row(s) }).collect();

    let total = |s: &Steps| at_least(s.chunk - step, s.chunk);
    // A chunk's rows attend to fewer keys than its last one: on average half a chunk less.
    let keys = |s: &Steps| s.context as f64 - (chunk_tokens.min(s.context) - 1) as f64 / 2.0;
    let last = steps[steps.len() - 1];
    let slope = match keys(&last) > keys(&first) {
        true => ((total(&last) - total(&first)) / (keys(&last) - keys(&first))).max(0.0),
        false => 0.0,
    };
    let rest = at_least(total(&first) - slope * keys(&first), total(&first));
    let chunks = steps.iter().map(|s| ChunkCost {
        context: s.context as u32,
        attention_seconds: (total(s) - rest).max(0.0),
        rest_seconds: rest,
    });
    ComputeCosts { step, chunks: chunks.collect(), decode }
}

/// Steps at one context length: a chunk, one decode row, and many.
struct Length {
    context: usize,
    batches: [Batch; 3],
    /// Seconds of each batch, by round.
    samples: Vec<[f64; 3]>,
}

impl Length {
    fn steps(&self) -> Steps {
        let of = |batch: usize| median(self.samples.iter().map(|seconds| seconds[batch]).collect());
        Steps { context: self.context, chunk: of(0), one_row: of(1), many_rows: of(2) }
    }
}

struct Bench {
    runner: Runner,
    num_blocks: usize,
    chunk_tokens: usize,
    vocab_size: usize,
}

impl Bench {
    fn new(subject: &Subject, num_blocks: usize) -> anyhow::Result<Self> {
        let layout = subject.layout;
        let pool = Arc::new(KvPool::new(&subject.device, layout, num_blocks)?);
        // Memory that was never written may be one page of zeros, and quicker to read than any real K/V.
        let values: Vec<u8> = (0..layout.chunk_bytes() / 2).flat_map(|i| f16_near_zero(i).to_le_bytes()).collect();
        for block in 0..num_blocks {
            pool.write_chunk(BlockId(block as u32), &values)?;
        }
        let max_rows = layout.chunk_tokens.max(ROWS);
        let runner = Runner::new(Arc::clone(&subject.model), subject.device.clone(), pool, max_rows)?;
        let vocab_size = subject.model.hparams.vocab_size;
        Ok(Self { runner, num_blocks, chunk_tokens: layout.chunk_tokens, vocab_size })
    }

    fn length(&self, context: usize) -> Length {
        let rows = self.chunk_tokens.min(context);
        let batches =
            [self.batch(1, context - rows, rows), self.batch(1, context - 1, 1), self.batch(ROWS, context - 1, 1)];
        Length { context, batches, samples: Vec::new() }
    }

    fn sample(&mut self, length: &mut Length) -> anyhow::Result<()> {
        let mut seconds = [0.0; 3];
        for (seconds, batch) in seconds.iter_mut().zip(&length.batches) {
            let begin = Instant::now();
            self.runner.forward(batch)?;
            *seconds = begin.elapsed().as_secs_f64();
        }
        length.samples.push(seconds);
        Ok(())
    }

    /// `rows` rows from `position` on of each stream, the last one sampled. Streams begin at different blocks and overlap where the
    /// pool is smaller than all of them; each writes to a block that no other one writes to.
    fn batch(&self, streams: usize, position: usize, rows: usize) -> Batch {
        let mut batch = Batch::default();
        let num_blocks = (position + rows).div_ceil(self.chunk_tokens);
        for stream in 0..streams {
            let first = stream * (self.num_blocks / ROWS);
            let block_of = |index: usize| ((first + index) % self.num_blocks) as u32;
            batch.entries.push(Entry {
                first_row: batch.tokens.len() as u32,
                num_rows: rows as u32,
                first_position: position as u32,
                first_block: batch.block_table.len() as u32,
                num_blocks: num_blocks as u32,
            });
            batch.block_table.extend((0..num_blocks).map(|index| BlockId(block_of(index))));
            for position in position..position + rows {
                let (block, offset) = (position / self.chunk_tokens, position % self.chunk_tokens);
                batch.tokens.push(((position * 7919 + stream * 104_729) % self.vocab_size) as u32);
                batch.positions.push(position as u32);
                batch.slots.push(block_of(block) * self.chunk_tokens as u32 + offset as u32);
            }
            batch.sample_rows.push(batch.tokens.len() as u32 - 1);
        }
        batch
    }
}

/// Bits of an f16 between 2^-7 and 2^-6, different for neighbours.
fn f16_near_zero(index: usize) -> u16 {
    0x2000 | (index as u16).wrapping_mul(40_503) & 0x3ff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a step costs 5 ms, a chunk's products 10 ms, a row's 1 ms, and attention 4 us a key and row.
    fn made_up(context: usize) -> Steps {
        let attention = |keys: f64| 4e-6 * keys;
        let chunk = 5e-3 + 10e-3 + 32.0 * attention(context as f64 - 15.5);
        let row = 1e-3 + attention(context as f64);
        Steps { context, chunk, one_row: 5e-3 + row, many_rows: 5e-3 + 8.0 * row }
    }

    #[test]
    fn step_rows_and_attention_are_told_apart() {
        let steps: Vec<Steps> = [32, 64, 128, 256].map(made_up).into();
        let costs = split(&steps, 32);
        let is_near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(is_near(costs.step, 5e-3), "{}", costs.step);
        for (chunk, context) in costs.chunks.iter().zip([32.0, 64.0, 128.0, 256.0]) {
            assert!(is_near(chunk.rest_seconds, 10e-3), "{chunk:?}");
            assert!(is_near(chunk.attention_seconds, 32.0 * 4e-6 * (context - 15.5)), "{chunk:?}");
        }
        assert!(is_near(costs.decode[3].seconds, 1e-3 + 4e-6 * 256.0));
        assert!(is_near(costs.chunk_curve().unwrap().at(256), costs.chunks[3].total_seconds()));
    }

    #[test]
    fn noise_makes_no_cost_free_or_negative() {
        let steps = [
            Steps { context: 32, chunk: 1.0, one_row: 2.0, many_rows: 1.5 },
            Steps { context: 64, chunk: 0.5, one_row: 1.0, many_rows: 0.5 },
        ];
        let costs = split(&steps, 32);
        assert!(costs.step > 0.0);
        costs.chunk_curve().unwrap();
        costs.decode_curve().unwrap();
    }
}
