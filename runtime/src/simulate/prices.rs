//! Costs as tables by chunk index, since every row of every step asks for one.

use std::ops::Range;

use crate::core::Costs;

pub(super) struct Prices {
    chunk_tokens: usize,
    step: f64,
    /// A token of a prompt in chunk `i`.
    prompt_token: Vec<f64>,
    /// A decode row in chunk `i`.
    decode_row: Vec<f64>,
    /// All tokens before chunk `i`.
    prefix: Vec<f64>,
}

impl Prices {
    /// For contexts of up to `max_context` tokens.
    pub(super) fn new(costs: &Costs, chunk_tokens: usize, max_context: usize) -> Self {
        let ends = (0..=max_context.div_ceil(chunk_tokens)).map(|index| ((index + 1) * chunk_tokens) as u32);
        let prompt_token: Vec<f64> = ends.clone().map(|end| costs.chunk.at(end) / chunk_tokens as f64).collect();
        let prefix = prompt_token.iter().scan(0.0, |sum, token| {
            let before = *sum;
            *sum += token * chunk_tokens as f64;
            Some(before)
        });
        Self {
            chunk_tokens,
            step: costs.step,
            prefix: prefix.collect(),
            decode_row: ends.map(|end| costs.decode_row.at(end)).collect(),
            prompt_token,
        }
    }

    /// Seconds of a step, whatever its rows.
    pub(super) fn step(&self) -> f64 {
        self.step
    }

    /// Seconds of one row that continues a reply.
    pub(super) fn decode_row(&self, position: usize) -> f64 {
        self.decode_row[position / self.chunk_tokens]
    }

    /// Seconds to compute the K/V of a range of a log.
    pub(super) fn prompt(&self, range: Range<usize>) -> f64 {
        if range.is_empty() {
            return 0.0;
        }
        self.before(range.end) - self.before(range.start)
    }

    /// Seconds to compute one whole chunk again, by the context length that its last token attends to.
    pub(super) fn chunk_ending_at(&self, position_tokens: u32) -> f64 {
        let index = (position_tokens as usize).saturating_sub(1) / self.chunk_tokens;
        self.prompt_token[index.min(self.prompt_token.len() - 1)] * self.chunk_tokens as f64
    }

    fn before(&self, position: usize) -> f64 {
        let index = position / self.chunk_tokens;
        self.prefix[index] + self.prompt_token[index] * (position % self.chunk_tokens) as f64
    }
}
