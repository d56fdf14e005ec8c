//! Copies chunks between tiers, on named threads of its own.
//!
//! Invariants:
//! - a move's pin and place have come back before its completion is reported, also on error;
//! - a move is reported exactly once;
//! - the destination is committed only after the whole chunk was read without a fault;
//! - queues and staging memory are bounded; staging is independent of every tier, so a full DRAM tier never stops a disk hit.
//!
//! Deliberately absent: any choice of what to move. Retries, too: a failed load is a hole, and its tokens are recomputed.

mod copy;
mod pool;
mod staging;
#[cfg(test)]
mod tests;
mod ticket;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{ChunkKey, Pinned, Place, TierError};

pub use pool::{MoverConfig, MoverPool};
pub use ticket::Ticket;

/// Takes moves and reports each one's end.
pub trait Mover: Send + Sync {
    /// Queues one move. `Err` hands it back untouched: the queue is full, or the mover is closed. `on_done` runs on the
    /// mover's thread; it should only pass a message on.
    #[allow(clippy::result_large_err, reason = "the request itself is handed back")]
    fn submit(&self, request: MoveRequest) -> Result<(), MoveRequest>;

    /// Queues several moves, waiting for room in the queue where needed, and gives a ticket to wait on.
    fn submit_all(&self, moves: Vec<Move>) -> Ticket;
}

/// One copy: the pinned chunk goes into the place.
pub struct Move {
    pub from: Pinned,
    pub to: Place,
}

/// Called with each layer's index as soon as that layer lies on the device, in ascending order.
pub type OnLayer = Box<dyn FnMut(usize) + Send>;
/// Called once, when a move has ended and its pin and place are back.
pub type OnDone = Box<dyn FnOnce(MoveOutcome) + Send>;

/// One copy and what is to happen at its end.
pub struct MoveRequest {
    pub from: Pinned,
    pub to: Place,
    /// A move that has not begun by then ends as [`MoveError::TimedOut`]; so does one that is still copying, at its
    /// next layer, and it is never committed.
    pub deadline: Option<Instant>,
    pub on_layer: Option<OnLayer>,
    pub on_done: OnDone,
}

impl MoveRequest {
    pub fn new(from: Pinned, to: Place, on_done: impl FnOnce(MoveOutcome) + Send + 'static) -> Self {
        Self { from, to, deadline: None, on_layer: None, on_done: Box::new(on_done) }
    }
}

impl fmt::Debug for MoveRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MoveRequest({} {} -> {})", self.from.key(), self.from.tier(), self.to.tier())
    }
}

/// How one move ended.
#[derive(Debug)]
pub struct MoveOutcome {
    /// The destination's key.
    pub key: ChunkKey,
    /// Names of the tiers.
    pub from: Arc<str>,
    pub to: Arc<str>,
    pub bytes: u64,
    /// Time on the mover's thread, without the time in the queue.
    pub elapsed: Duration,
    pub result: Result<(), MoveError>,
}

/// Why a chunk did not arrive. On the way in each of these is a hole: recompute, count it, go on.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// The stored bytes are foreign or damaged; the source has let go of them.
    #[error("damaged: {0}")]
    Corrupt(TierError),
    /// The source no longer has the bytes.
    #[error("missing: {0}")]
    Missing(TierError),
    /// The destination cannot take the chunk now.
    #[error("destination refuses: {0}")]
    Full(TierError),
    /// The deadline passed.
    #[error("deadline passed")]
    TimedOut,
    /// The mover was closed before the move began.
    #[error("mover closed")]
    Closed,
    /// Anything else.
    #[error("{0}")]
    Fault(TierError),
}

impl From<TierError> for MoveError {
    fn from(error: TierError) -> Self {
        match error {
            TierError::Corrupt { .. } => Self::Corrupt(error),
            TierError::Gone { .. } => Self::Missing(error),
            TierError::Full { .. } | TierError::ReadOnly { .. } => Self::Full(error),
            error => Self::Fault(error),
        }
    }
}
