//! S3-FIFO (Yang et al., SOSP'23): a small queue for newcomers, a main queue for what was used again, and a memory of what left.
//!
//! The core takes a chunk out while somebody uses it, so a use shows as a removal and a return: a chunk that comes back from the
//! memory was used, or is wanted again after it went; both make it a member of the main queue, as the paper's second chance does.

use std::collections::VecDeque;

use super::lists::ChunkLists;
use super::{ChunkUse, EvictionPolicy, Victim, View};
use crate::{ChunkKey, ChunkMap};

const SMALL: u32 = 0;
const MAIN: u32 = 1;
/// The small queue's share.
const SMALL_SHARE: usize = 10;
/// Uses that count at most.
const MAX_USES: u8 = 3;

#[derive(Default)]
pub struct S3FifoPolicy {
    queues: ChunkLists,
    /// Uses since a chunk came into its queue.
    uses: ChunkMap<u8>,
    /// Chunks that left, with the uses they had; as many as the main queue holds.
    ghosts: ChunkMap<u8>,
    ghost_order: VecDeque<ChunkKey>,
}

impl EvictionPolicy for S3FifoPolicy {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn on_touch(&mut self, key: ChunkKey, chunk: ChunkUse) {
        if self.queues.get(&key).is_some() {
            let uses = self.uses.entry(key).or_default();
            *uses = (*uses + 1).min(MAX_USES);
            return;
        }
        let queue = match self.ghosts.remove(&key) {
            Some(uses) => {
                self.uses.insert(key, (uses + 1).min(MAX_USES));
                MAIN
            }
            None => SMALL,
        };
        self.queues.append(queue, key, chunk);
    }

    fn on_remove(&mut self, key: &ChunkKey) {
        if self.queues.remove(key).is_none() {
            return;
        }
        let uses = self.uses.remove(key).unwrap_or(0);
        if self.ghosts.insert(*key, uses).is_none() {
            self.ghost_order.push_back(*key);
        }
        let room = self.queues.len().max(1);
        while self.ghosts.len() > room {
            match self.ghost_order.pop_front() {
                Some(oldest) => self.ghosts.remove(&oldest),
                None => break,
            };
        }
        // Entries whose chunk came back stay in the order until they reach its front; they must not fill it.
        if self.ghost_order.len() > 2 * room + 64 {
            self.ghost_order.retain(|key| self.ghosts.contains_key(key));
        }
    }

    /// Moves chunks that were used on to (or back in) the main queue, as an eviction does on its way; the others are the victims.
    fn victims(&mut self, n: usize, _: &View) -> Vec<Victim> {
        let mut victims = Vec::new();
        let wanted = n.min(self.queues.len());
        let mut small = self.queues.list_len(SMALL);
        let mut taken = [0; 2];
        while victims.len() < wanted {
            let main = self.queues.list_len(MAIN) - taken[1];
            let queue = if small > 0 && (small * SMALL_SHARE >= small + main || main == 0) { SMALL } else { MAIN };
            let skipped = taken[queue as usize];
            let Some(node) = self.queues.iter(queue).nth(skipped).copied() else { break };
            let uses = self.uses.get(&node.key).copied().unwrap_or(0);
            if queue == SMALL {
                small -= 1;
            }
            if uses > 0 {
                let left = if queue == SMALL { 0 } else { uses - 1 };
                self.uses.insert(node.key, left);
                self.queues.append(MAIN, node.key, node.chunk);
                continue;
            }
            taken[queue as usize] += 1;
            victims.push(Victim { key: node.key, value: 0.0 });
        }
        victims
    }

    /// Every newcomer may try: the small queue is what weighs them.
    fn value(&self, _: &ChunkKey, _: &ChunkUse, _: &View) -> f64 {
        1.0
    }

    fn len(&self) -> usize {
        self.queues.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::conformance::key;
    use crate::eviction::{Class, CostCurve, ReturnTimes};

    const CHUNK: ChunkUse = ChunkUse { context_tokens: 32, last_activity: Duration::ZERO, class: Class(0) };

    fn victims(policy: &mut S3FifoPolicy, n: usize) -> Vec<ChunkKey> {
        let (costs, returns) = (CostCurve::flat(1.0).unwrap(), ReturnTimes::default());
        let view = View { now: Duration::ZERO, costs: &costs, returns: &returns };
        policy.victims(n, &view).into_iter().map(|victim| victim.key).collect()
    }

    #[test]
    fn what_is_used_once_goes_before_what_is_used_again() {
        let mut policy = S3FifoPolicy::default();
        for index in 0..20 {
            policy.on_touch(key(index), CHUNK);
        }
        // Chunks 0 to 4 are used: out while in use, back afterwards.
        for index in 0..5 {
            policy.on_remove(&key(index));
            policy.on_touch(key(index), CHUNK);
        }
        let order = victims(&mut policy, 20);
        assert_eq!(order[..15], (5..20).map(key).collect::<Vec<_>>()[..]);
        // A scan of newcomers goes before them too.
        for index in 100..110 {
            policy.on_touch(key(index), CHUNK);
        }
        assert!(victims(&mut policy, 20).iter().all(|k| (0..5).all(|used| *k != key(used))));
    }

    proptest! {
        #[test]
        fn victims_are_members_and_distinct(ops in prop::collection::vec((0u8..4, 0u64..30), 0..300), n in 0usize..40) {
            let mut policy = S3FifoPolicy::default();
            let mut members = std::collections::BTreeSet::new();
            for (op, index) in ops {
                if op == 0 {
                    policy.on_remove(&key(index));
                    members.remove(&key(index));
                } else {
                    policy.on_touch(key(index), CHUNK);
                    members.insert(key(index));
                }
                let victims = victims(&mut policy, n);
                let distinct: std::collections::BTreeSet<_> = victims.iter().copied().collect();
                prop_assert_eq!(distinct.len(), victims.len());
                prop_assert_eq!(victims.len(), n.min(members.len()));
                prop_assert!(distinct.is_subset(&members));
                prop_assert_eq!(policy.len(), members.len());
                prop_assert!(policy.ghosts.len() <= policy.queues.len().max(1));
            }
        }
    }
}
