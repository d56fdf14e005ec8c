//! The pure core: every decision of the server, without threads, clocks, sockets or memory that is not its own.
//!
//! It is the sole owner of the chunk directory, the device's free list and the policy indexes. Actors bring it messages and carry
//! out its [`Command`]s; the clock is an argument. So a test drives whole days of traffic in milliseconds, and the simulator runs
//! the very code that serves.
//!
//! May depend on: `keepsake_tiers` for keys, the block pool and eviction policies; never on actix, tokio or the model.
//!
//! Invariants (checked by [`Scheduler::check`]):
//! - `free + private + resident + loading + orphaned == total` device blocks, and no block has two owners;
//! - a block is not reused while a copy or a step that reads or writes it is in flight;
//! - only full chunks leave the device; a partial tail is dropped, never copied;
//! - every load, swap-out, spill and removal ends in exactly one [`MoveDone`].
//!
//! Deliberately absent: text, HTTP, sampling (the device worker samples), and the bytes of K/V.

mod admission;
mod applying;
mod command;
mod costs;
mod directory;
mod eviction;
mod forgetting;
mod holes;
mod index;
mod moving;
mod pauses;
mod plan;
mod planning;
mod prefetch;
mod queue;
mod request;
mod scheduler;
mod sequence;
mod snapshot;

#[cfg(test)]
mod tests;

pub use command::{Command, CommandKind, MoveDone, MoveFault, MoveId, TierIndex};
pub use costs::{Costs, RouteCost, TierCosts};
pub use eviction::{decide, Candidate, Pressure, Proposal, TierPressure};
pub use plan::{RowInput, Sample, SamplerStart, StepId, StepOutput, StepPlan};
pub use queue::QueueOrder;
pub use request::{FinishCause, Rejected, SequenceEvent, SequenceId, SequenceRequest, SequenceUsage};
pub use scheduler::{CoreConfig, PolicyChoice, Scheduler, TierSpec};
pub use snapshot::{CoreCounters, CoreGauges, CoreSnapshot, TierSnapshot};
