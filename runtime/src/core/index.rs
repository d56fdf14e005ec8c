//! Which chunks of one kind there are, in the order a policy would give them up.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use keepsake_tiers::eviction::{policy, EvictionPolicy, Touch};
use keepsake_tiers::ChunkKey;

use super::directory::ChunkEntry;

/// Chunks that may be evicted, ranked by the tier's policy.
pub(super) struct Index {
    policy: Box<dyn EvictionPolicy>,
    chunk_tokens: u32,
    /// Each member's last activity, as the policy knows it.
    members: HashMap<ChunkKey, Duration>,
}

impl Index {
    /// `name` was checked when the configuration was read.
    pub(super) fn new(name: &str, chunk_tokens: usize) -> Self {
        let policy = policy(name).expect("the configuration names a known policy");
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
