//! Messages to the scheduler.

use std::time::Duration;

use actix::{Message, Recipient};
use keepsake_tiers::ChunkKey;

use crate::core::{MoveDone, Proposal, Rejected, SequenceEvent, SequenceId, SequenceRequest, StepOutput, TierIndex};

/// Run a sequence and tell `events` of its progress. Credit: a turn permit, held by the turn's stream.
#[derive(Debug, Message)]
#[rtype(result = "Result<(), Rejected>")]
pub struct SubmitSequence {
    pub request: SequenceRequest,
    pub events: Recipient<SequenceProgressed>,
}

/// End a sequence early; `keep` tokens of its log stay. A sequence that has ended already is left alone.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct StopSequence {
    pub id: SequenceId,
    pub keep: usize,
}

/// A log's last turns are gone for good: its chunks beyond the first `keep_tokens` may go. Bounded by the turns that are deleted.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct ForgetChunks {
    /// The tenant's chain root.
    pub root: ChunkKey,
    pub tokens: Vec<u32>,
    pub keep_tokens: usize,
}

/// News of a session's sequences, in order. Bounded by the tokens that its sequences may sample.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct SequenceProgressed(pub Vec<SequenceEvent>);

/// A step has run.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct StepDone {
    pub output: StepOutput,
    pub elapsed: Duration,
}

/// A command has ended, well or not.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct MoveEnded(pub MoveDone);

/// The eviction actor's answer to `PressureRose`; may be empty.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct ProposeEvictions(pub Vec<Proposal>);

/// How a tier sees itself, told once a second and after each refusal.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct TierReported {
    pub tier: TierIndex,
    pub accepts: bool,
    /// Chunks that fit.
    pub capacity: usize,
}

/// Take nothing new; answers when nothing runs any more.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Drain;
