//! One set of tests for every tier.
//!
//! `tier_conformance!(name, constructor)` makes a module of tests; the constructor gives a fresh [`Fixture`]. A backend passes
//! when it behaves as [`crate::MemoryTier`] does, as far as anyone can see through the [`Tier`] trait.
//! Compiled into the crate so that backends outside of it run the same tests.

mod checks;
mod oracle;

use std::any::Any;
use std::sync::Arc;

use keepsake_kernels::KvLayout;

pub use checks::*;
pub use oracle::{against_oracle, random_ops, TierOp};

use crate::{ChunkKey, ChunkMeta, Tier};

/// A tier to test.
pub struct Fixture {
    pub tier: Arc<dyn Tier>,
    /// Size of the chunks that it takes. The tests use [`LAYOUT_ID`].
    pub chunk_bytes: usize,
    /// Opens the same storage again after the tier was closed and dropped; for durable tiers.
    pub reopen: Option<Box<dyn Fn() -> Arc<dyn Tier>>>,
    /// Whatever must live as long, such as a temporary folder.
    pub keep: Box<dyn Any>,
}

/// The layout id of every chunk in these tests.
pub const LAYOUT_ID: [u8; 16] = [0x1d; 16];

/// A small layout: 512 bytes a chunk.
pub fn layout() -> KvLayout {
    KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 8, chunk_tokens: 4 }
}

pub fn key(index: u64) -> ChunkKey {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    key[8..].copy_from_slice(&index.to_le_bytes());
    ChunkKey(key)
}

pub fn meta(chunk_bytes: usize) -> ChunkMeta {
    ChunkMeta {
        position: 3,
        num_tokens: 4,
        layout_id: LAYOUT_ID,
        bytes: chunk_bytes as u64,
        last_activity_unix: 1_750_000_000,
    }
}

/// Bytes that differ between seeds everywhere, and do not compress.
pub fn payload(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(byte).take(len).collect()
}

/// Tests of the whole contract for one backend: `tier_conformance!(dram, dram_fixture);`
#[macro_export]
macro_rules! tier_conformance {
    ($name:ident, $constructor:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            $crate::tier_conformance!(@tests $constructor,
                commit_makes_visible, abort_on_drop, pin_blocks_remove, first_commit_stays, usage_is_exact,
                full_is_none, wrong_size_is_refused, ranges_can_be_read, survives_reopening, damage_is_corrupt_then_a_miss,
                torn_values_are_corrupt_then_a_miss, concurrent_use, close_is_idempotent, equals_the_oracle);
        }
    };
    (@tests $constructor:expr, $($test:ident),+) => {
        $(
            #[test]
            fn $test() {
                $crate::conformance::$test(&$constructor);
            }
        )+
    };
}
