//! Which chunks of one kind there are, in the order a policy would give them up.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use keepsake_tiers::eviction::{policy, EvictionPolicy, Touch};
use keepsake_tiers::ChunkKey;

use super::directory::ChunkEntry;

/// Makes policies by name: those of `keepsake_tiers` by default; the simulator adds one that knows the future.
#[derive(Clone)]
pub struct PolicyFactory(pub Arc<MakePolicy>);

type MakePolicy = dyn Fn(&str) -> Option<Box<dyn EvictionPolicy>> + Send + Sync;

impl PolicyFactory {
    /// `name` was checked when the configuration was read.
    pub(super) fn make(&self, name: &str) -> Box<dyn EvictionPolicy> {
        (self.0)(name).expect("the configuration names a known policy")
    }
}

impl Default for PolicyFactory {
    fn default() -> Self {
        Self(Arc::new(policy))
    }
}

impl fmt::Debug for PolicyFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PolicyFactory")
    }
}

/// Chunks that may be evicted, ranked by the tier's policy.
pub(super) struct Index {
    policy: Box<dyn EvictionPolicy>,
    chunk_tokens: u32,
    /// Each member's last activity, as the policy knows it.
    members: HashMap<ChunkKey, Duration>,
}

impl Index {
    pub(super) fn new(policy: Box<dyn EvictionPolicy>, chunk_tokens: usize) -> Self {
        Self { policy, chunk_tokens: chunk_tokens as u32, members: HashMap::new() }
    }

    /// Makes the chunk a member or not; a member is ranked anew when it was used since.
    pub(super) fn set(&mut self, key: &ChunkKey, entry: &ChunkEntry, is_member: bool) {
        if !is_member {
            if self.members.remove(key).is_some() {
                self.policy.on_remove(key);
            }
            return;
        }
        if self.members.insert(*key, entry.last_activity) != Some(entry.last_activity) {
            let position_tokens = (entry.position + 1) * self.chunk_tokens;
            self.policy.on_touch(*key, Touch { position_tokens, now: entry.last_activity });
        }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Up to `n` members, least valuable first.
    pub(super) fn victims(&self, n: usize, now: Duration) -> Vec<ChunkKey> {
        self.policy.victims(n, now, &mut |_| true)
    }
}

/// Chunks by their last activity.
#[derive(Default)]
pub(super) struct Recency {
    order: BTreeSet<(Duration, ChunkKey)>,
    members: HashMap<ChunkKey, Duration>,
}

impl Recency {
    pub(super) fn set(&mut self, key: &ChunkKey, entry: &ChunkEntry, is_member: bool) {
        if let Some(earlier) = self.members.remove(key) {
            self.order.remove(&(earlier, *key));
        }
        if is_member {
            self.members.insert(*key, entry.last_activity);
            self.order.insert((entry.last_activity, *key));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Up to `n` members, most recently active first.
    pub(super) fn latest(&self, n: usize) -> Vec<ChunkKey> {
        self.order.iter().rev().take(n).map(|(_, key)| *key).collect()
    }
}
