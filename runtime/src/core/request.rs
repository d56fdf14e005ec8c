//! What sessions hand to the core, and what it tells them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use keepsake_model::sampler::SamplingParams;
use keepsake_tiers::ChunkKey;

/// What the scheduler runs: one request's token log and its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A sequence to run until its end or until [`super::Scheduler::stop`].
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    pub id: SequenceId,
    /// The tenant's chain root: chunk keys, and so K/V, are shared below one root only.
    pub root: ChunkKey,
    /// Its tenant's share of the device beside other tenants'; positive.
    pub weight: f64,
    /// The whole token log the reply is conditioned on; at least one token.
    pub tokens: Vec<u32>,
    /// How many leading tokens earlier turns computed: computing them again counts as recompute.
    pub num_past: usize,
    /// May its chunks reach a durable tier?
    pub durable: bool,
    /// At least one; the sequence ends with `Length` after so many.
    pub max_new_tokens: usize,
    /// Tokens that end the sequence (the model's end-of-generation set and the request's stop tokens); empty with `ignore_eos`.
    pub end_tokens: Arc<HashSet<u32>>,
    /// Tokens to sample before `end_tokens` count.
    pub min_new_tokens: usize,
    pub sampling: SamplingParams,
}

/// Why a sequence was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// The waiting queue is at its cap.
    QueueFull,
    /// It could never run: more tokens than the model's context or the device pool holds.
    TooLong { limit: usize },
}

/// Something a session wants to know, in order of happening.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceEvent {
    Sampled { id: SequenceId, token: u32 },
    Finished { id: SequenceId, cause: FinishCause, usage: SequenceUsage },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishCause {
    /// One of the `end_tokens` was sampled; it is the last token.
    EndToken,
    /// `max_new_tokens` were sampled.
    Length,
    /// The session stopped it.
    Stopped,
}

/// Where the input's K/V came from, fixed when the first token is sampled. The parts sum to the number of input tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceUsage {
    pub device: usize,
    /// By tier below the device, in order.
    pub loaded: Vec<usize>,
    /// Tokens of earlier turns that were computed again.
    pub recomputed: usize,
    /// Tokens computed for the first time.
    pub new: usize,
    /// Time in the queue before the first admission.
    pub queued: Duration,
}
