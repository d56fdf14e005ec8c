//! The next token of each row, without its logits leaving the device.

use super::{check_len, check_rows};
use crate::cuda::memory::{sealed, View};
use crate::cuda::stream::{Launch, Stream};
use crate::error::{ensure, Result};

/// What a row gives when nothing can be drawn: every logit is NaN or minus infinity.
pub const NO_TOKEN: u32 = u32::MAX;

/// Matches sampling.cu.
const THREADS: u32 = 1024;

/// How a row is sampled. Penalties, biases and grammars need the host and are not here.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SamplingRow {
    /// 0: greedy.
    pub temperature: f32,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub min_p: f32,
    /// 0: off.
    pub top_k: u32,
    pub seed: u64,
    /// Of the token that is drawn: the draw is a function of seed and position.
    pub position: u64,
}

impl sealed::Sealed for SamplingRow {}

impl SamplingRow {
    /// Words of a row, for parameters that travel with other numbers.
    pub const WORDS: usize = size_of::<SamplingRow>() / size_of::<u32>();

    /// As the device reads it.
    pub fn words(&self) -> [u32; SamplingRow::WORDS] {
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        let ([seed, seed_high], [position, position_high]) = (halves(self.seed), halves(self.position));
        let [temperature, top_p, min_p] = [self.temperature, self.top_p, self.min_p].map(f32::to_bits);
        [temperature, top_p, min_p, self.top_k, seed, seed_high, position, position_high]
    }

    /// Words on the device as rows.
    pub fn view_of(words: View<'_, u32>) -> Result<View<'_, SamplingRow>> {
        words.cast()
    }
}

/// Draws `rows[i]`'s token from row i of `logits` (`rows.len() x vocab`), in the order temperature, min-p, top-k, top-p; the
/// same draw as the host's sampler up to the rounding of weights.
pub fn sample(
    stream: &Stream,
    logits: View<f32>,
    vocab: usize,
    rows: View<SamplingRow>,
    tokens: View<u32>,
) -> Result<()> {
    let op = "cuda::sample";
    ensure!(op, vocab > 0 && vocab <= 1 << 22, "a vocabulary of {vocab}");
    check_rows(op, "logits", logits, rows.len(), vocab)?;
    check_len(op, "tokens", tokens, rows.len())?;
    let function = stream.context().function("sample")?;
    let stride = vocab as u64;
    let vocab = vocab as u32;
    let launch = Launch::new(rows.len(), THREADS);
    // SAFETY: the kernel's parameters; lengths were checked.
    unsafe { stream.launch(function, launch, &[&logits, &vocab, &stride, &rows, &tokens]) }
}
