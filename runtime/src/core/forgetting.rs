//! Forgetting: what a log's last turns had in the tiers goes when they are deleted or expire.
//!
//! A walk goes from the log's end towards its root, and ends at the first chunk that another chunk follows, since a living log goes
//! through that one. It waits at a chunk in use (by a sequence or a copy) and looks again when that has changed, and it takes a
//! credit for each removal. Only K/V is lost by it: whoever needs a forgotten chunk after all computes it again.
//!
//! A chunk that a durable tier kept over a restart does not say which chunk it follows; the directory learns that when a log with
//! both is seen.

use std::collections::HashMap;
use std::time::Duration;

use keepsake_tiers::{ChunkKey, KeyChain};

use super::command::TierIndex;
use super::directory::InTier;
use super::scheduler::Scheduler;

/// Keys of chunks that are still to go, the last one first to go.
type Walk = Vec<ChunkKey>;

#[derive(Debug, Default)]
pub(super) struct Forgetting {
    /// Can go on, given credits.
    ready: Vec<Walk>,
    /// By the chunk in use that they wait for: their own last one.
    waiting: HashMap<ChunkKey, Walk>,
}

/// Why a walk does not go on now.
enum Halt {
    Ended,
    InUse(ChunkKey),
    NoCredit,
}

impl Forgetting {
    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.waiting.is_empty()
    }

    /// The chunk has changed: whoever waits for it looks again.
    pub(super) fn wake(&mut self, key: &ChunkKey) {
        self.ready.extend(self.waiting.remove(key));
    }

    /// Chunks that walks wait for.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &ChunkKey> {
        self.waiting.keys()
    }

    /// Of two walks that wait for one chunk, and so agree on all before it, the one that goes further stays.
    fn wait(&mut self, key: ChunkKey, walk: Walk) {
        let waiting = self.waiting.entry(key).or_default();
        if walk.len() > waiting.len() {
            *waiting = walk;
        }
    }
}

impl Scheduler {
    /// Lets the chunks of a log go from every tier, except those within its first `keep_tokens`, which a living turn still owns.
    pub fn forget(&mut self, root: ChunkKey, tokens: &[u32], keep_tokens: usize, now: Duration) {
        self.now = now;
        let chunk_tokens = self.config.chunk_tokens;
        let keys = KeyChain::chunk_keys(root, tokens, chunk_tokens);
        let num_kept = (keep_tokens / chunk_tokens).min(keys.len());
        let mut parent = if num_kept == 0 { root } else { keys[num_kept - 1] };
        for depth in num_kept..=keys.len() {
            let start = depth * chunk_tokens;
            for tail in self.directory.tails_within(&parent, &tokens[start..], keep_tokens.saturating_sub(start)) {
                let block = self.take_evictable(&tail);
                self.pool.free(block);
            }
            if let Some(key) = keys.get(depth) {
                self.directory.learn_parent(key, parent);
                parent = *key;
            }
        }
        self.forgetting.ready.push(keys[num_kept..].to_vec());
    }

    /// Goes on with every walk that can.
    pub(super) fn go_on_forgetting(&mut self) {
        while let Some(mut walk) = self.forgetting.ready.pop() {
            match self.walk(&mut walk) {
                Halt::Ended => {}
                Halt::InUse(key) => self.forgetting.wait(key, walk),
                Halt::NoCredit => {
                    self.forgetting.ready.push(walk);
                    return;
                }
            }
        }
    }

    fn walk(&mut self, walk: &mut Walk) -> Halt {
        while let Some(key) = walk.last().copied() {
            if self.directory.num_followers(&key) > 0 {
                return Halt::Ended;
            }
            if let Some(entry) = self.directory.get(&key) {
                if entry.is_in_use() {
                    return Halt::InUse(key);
                }
                let holders = || (0..self.tiers.len()).filter(|t| entry.in_tier(TierIndex(*t)) == InTier::Present);
                let has_credit = |tier: usize| self.tiers[tier].moves_in_flight < self.config.moves_in_flight;
                if !holders().all(has_credit) {
                    return Halt::NoCredit;
                }
                self.erase(&key, holders().map(TierIndex).collect());
            }
            walk.pop();
        }
        Halt::Ended
    }

    /// Takes an unused chunk from the device and from the tiers that hold it.
    fn erase(&mut self, key: &ChunkKey, holders: Vec<TierIndex>) {
        for tier in holders {
            self.begin_remove(key, tier);
        }
        let is_resident = self.directory.get(key).is_some_and(|entry| entry.resident_block().is_some());
        if is_resident {
            let block = self.take_evictable(key);
            self.pool.free(block);
        }
        self.counters.chunks_forgotten += 1;
        self.reindex(key);
    }
}
