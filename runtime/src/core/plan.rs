//! One step for the device worker, and its result.

use std::sync::Arc;

use keepsake_kernels::{BlockId, Entry};
use keepsake_model::sampler::SamplingParams;

use super::request::SequenceId;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u64);

/// A row's token: known, or sampled by the step before, which may still be running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowInput {
    Token(u32),
    Sampled(SequenceId),
}

/// A row whose logits are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub row: u32,
    pub sequence: SequenceId,
    /// Tokens before the sampled one: the position it will have.
    pub position: u32,
}

/// A sequence the worker has not seen: what its sampler starts from.
#[derive(Clone, Debug)]
pub struct SamplerStart {
    pub sequence: SequenceId,
    pub params: SamplingParams,
    pub prompt: Arc<[u32]>,
}

/// One forward pass: prefill chunks, holes and decode rows together.
///
/// `inputs`, `positions` and `slots` have one element a row; a slot is `block * chunk_tokens + offset`. Rows are ordered so that
/// every entry's rows are consecutive. A layer writes all K/V of the step before it attends, so holes may stand in any order.
#[derive(Clone, Debug)]
pub struct StepPlan {
    pub id: StepId,
    pub inputs: Vec<RowInput>,
    pub positions: Vec<u32>,
    pub slots: Vec<u32>,
    pub entries: Vec<Entry>,
    pub block_table: Vec<BlockId>,
    pub samples: Vec<Sample>,
    pub starts: Vec<SamplerStart>,
    /// Sequences that ended: their sampler state goes before this step runs.
    pub ends: Vec<SequenceId>,
}

impl StepPlan {
    pub fn num_rows(&self) -> usize {
        self.inputs.len()
    }
}

/// What a step sampled, in the order of [`StepPlan::samples`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepOutput {
    pub id: StepId,
    pub tokens: Vec<(SequenceId, u32)>,
}
