//! Waiting for a batch of moves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use super::{MoveError, MoveOutcome};
use crate::ChunkKey;

/// Stands for moves under way. Dropping it changes nothing for them.
pub struct Ticket {
    pub(super) outcomes: Receiver<(usize, MoveOutcome)>,
    /// What was asked for, in order.
    pub(super) moves: Vec<TicketEntry>,
}

pub(super) struct TicketEntry {
    pub(super) key: ChunkKey,
    pub(super) from: Arc<str>,
    pub(super) to: Arc<str>,
    pub(super) bytes: u64,
}

impl Ticket {
    /// One outcome a move, in the order of submission. A move that has not ended by the deadline is reported as
    /// [`MoveError::TimedOut`]; it may still end later, and its pin and place come back then.
    pub fn wait(self, deadline: Instant) -> Vec<MoveOutcome> {
        let mut found: Vec<Option<MoveOutcome>> = Vec::new();
        found.resize_with(self.moves.len(), || None);
        let mut num_missing = self.moves.len();
        while num_missing > 0 {
            let Ok((index, outcome)) = self.outcomes.recv_deadline(deadline) else {
                break;
            };
            found[index] = Some(outcome);
            num_missing -= 1;
        }
        let timed_out = |entry: TicketEntry| MoveOutcome {
            key: entry.key,
            from: entry.from,
            to: entry.to,
            bytes: entry.bytes,
            elapsed: Duration::ZERO,
            result: Err(MoveError::TimedOut),
        };
        let ends = found.into_iter().zip(self.moves);
        ends.map(|(outcome, entry)| outcome.unwrap_or_else(|| timed_out(entry))).collect()
    }
}
