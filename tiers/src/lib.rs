//! Where chunks of K/V live: the [`Tier`] trait, its backends, the movers between them and the policies that say what to give up.
//!
//! May depend on `keepsake-config` and `keepsake-kernels`; knows no sessions, actors or HTTP.
//!
//! Invariants:
//! - a chunk is visible in a tier whole or not at all, and only after its [`Place`] was committed;
//! - every [`Place`] and every [`Pinned`] comes back, also on error: both give up what they hold when dropped;
//! - a pinned chunk is neither removed nor overwritten; of two commits of one key the first stays;
//! - what a scheduler acts on is a value (`None`: full or a miss); an `Err` is a fault;
//! - bytes read from a durable tier are trusted only after magic, version, identity, lengths and checksum agree ([`codec`]).
//!
//! Deliberately absent: eviction by a tier itself (the runtime's core decides, tiers obey), and any async code:
//! calls block where they block, so they belong on the named threads of a [`MoverPool`].

pub mod capability;
pub mod codec;
pub mod conformance;
pub mod device;
pub mod dram;
mod error;
pub mod eviction;
pub mod key;
mod ledger;
pub mod memory;
mod meta;
pub mod mover;
pub mod registry;
pub mod rocks;
mod route;
mod tier;
mod usage;
pub mod wrap;

pub use capability::Capability;
pub use device::{BlockPool, DeviceTier};
pub use dram::DramTier;
pub use error::{Result, TierError};
pub use eviction::EvictionPolicy;
pub use key::{ChunkKey, ChunkMap, KeyChain, KeyScope};
pub use memory::MemoryTier;
pub use meta::ChunkMeta;
pub use mover::{Move, MoveError, MoveOutcome, MoveRequest, Mover, MoverConfig, MoverPool, Ticket};
pub use registry::{Registry, TierContext};
pub use rocks::{KeysOf, Removed, RemovedLog, RocksTier, TurnRecord, TurnStore, TurnStoreConfig};
pub use route::{route, Route};
pub use tier::{PinReader, Pinned, Place, PlaceWriter, Tier};
pub use usage::{Health, Usage};
