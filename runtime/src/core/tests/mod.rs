//! The core against a device and tiers that keep hashes instead of K/V.
//!
//! A slot holds its token and a hash of its whole prefix, computed from the slot before it as attention would read it. So a wrong
//! block, a stale copy, a missing hole or a block reused too early shows as a wrong hash, and a sampled token (a function of the
//! hash) as a wrong reply. The reference is the same function without any scheduler.

mod forgetting;
mod harness;
mod properties;
mod scenarios;
mod scheduling;
