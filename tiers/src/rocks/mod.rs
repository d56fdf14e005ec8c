//! The durable tier: RocksDB, as two databases that share nothing.
//!
//! - [`RocksTier`] (`kv/`): chunks, which can be recomputed. No WAL, atomic flushes, a cap on every byte in its folder.
//! - [`TurnStore`] (`turns/`): token logs and items, which cannot. WAL with grouped fsync, an own cap and a TTL.
//!
//! They are apart because RocksDB turns a whole database read-only when a WAL-less flush fails, and because WAL-less
//! deletes come back after a kill. Both reopen themselves when a full disk has room again; meanwhile they read.
//!
//! Invariants: an acknowledged turn survives a kill at any point; an index entry without its blob is a miss.
//! Deliberately absent: eviction (the runtime's core removes what it chooses), compression (f16 noise does not compress).

mod database;
mod kv;
mod maintenance;
mod turns;

pub use kv::{KvStoreConfig, RocksTier};
pub use turns::{KeysOf, Removed, RemovedLog, TurnRecord, TurnStore, TurnStoreConfig};
