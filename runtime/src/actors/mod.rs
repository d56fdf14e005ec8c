//! The actors: thin shells that move messages between the pure core and named worker threads.
//!
//! | actor | owns | blocking work on |
//! |---|---|---|
//! | [`scheduler::SchedulerActor`] | the core: queue, directory, free list | nothing |
//! | [`gpu_worker::GpuWorkerActor`] | the plans under way | thread `device-0`: forward passes and sampling |
//! | [`eviction::EvictionActor`] | the rules of what moves down | nothing |
//! | [`tier::TierActor`] | one tier below the device | the mover's threads, thread `tier-NAME` for removals |
//! | [`store::StoreActor`] | the turn store | threads `store-N` |
//! | [`session::SessionActor`] | one conversation and its running turns | tokio's blocking pool for tokenising |
//!
//! Mailboxes bound nothing, so every sender holds a credit: turn permits at the front door, steps in flight, moves in flight.
//! A handler over 20 lines is core logic in the wrong room.

pub mod eviction;
pub mod gpu_worker;
pub mod scheduler;
pub mod session;
pub mod store;
pub mod tier;
