//! Queued sequences' chunks come up from a disk tier before their turn, into the host tier's free room.

use keepsake_tiers::ChunkKey;

use super::command::{CommandKind, TierIndex};
use super::directory::{InTier, OnDevice};
use super::queue::Wish;
use super::scheduler::Scheduler;

impl Scheduler {
    /// Starts copies from durable tiers to the first host tier for what the queue will use, in its order. Only into free room: what
    /// is there belongs to somebody too, and eviction keeps a little room free.
    pub(super) fn prefetch(&mut self) {
        let host = self.tiers.iter().position(|t| !t.spec.durable && t.accepts && t.spec.capacity > 0).map(TierIndex);
        let Some(to) = host.filter(|host| self.tiers.len() > host.0 + 1) else { return };
        while self.has_room(to) {
            let Some(Wish { key, position }) = self.queue.next_wish() else { return };
            if let Some(from) = self.prefetch_source(&key, position, to) {
                let entry = self.entry_mut(&key);
                entry.begin_copy(from, to);
                self.tiers[to.0].used += 1;
                self.counters.chunks_prefetched += 1;
                self.issue(key, position, CommandKind::Prefetch { from, to });
                self.reindex(&key);
            }
        }
    }

    fn has_room(&self, to: TierIndex) -> bool {
        let tier = &self.tiers[to.0];
        tier.used < tier.spec.capacity && tier.moves_in_flight < self.config.moves_in_flight
    }

    /// The tier to copy from; `None`: it is near enough already, is nowhere, or is quicker computed than read.
    fn prefetch_source(&self, key: &ChunkKey, position: u32, to: TierIndex) -> Option<TierIndex> {
        let entry = self.directory.get(key)?;
        let from = entry.load_source().filter(|from| from.0 > to.0)?;
        let is_absent = entry.device() == OnDevice::Absent && entry.in_tier(to) == InTier::Absent;
        let context = (position + 1) * self.config.chunk_tokens as u32;
        let is_worth_it = self.config.costs.tiers[from.0].load.chunk < self.config.costs.chunk.at(context);
        let has_credit = self.tiers[from.0].moves_in_flight < self.config.moves_in_flight;
        (is_absent && is_worth_it && has_credit).then_some(from)
    }
}
