//! Least recently used: a doubly linked list threaded through a vector. Touch and remove are O(1), and nothing is scanned.
//!
//! Chunks touched at one moment go in the order of their touches, so a conversation that touches its chunks front to back
//! loses the leading ones first: they are the cheapest to recompute.

use std::collections::HashMap;
use std::time::Duration;

use super::{EvictionPolicy, Touch};
use crate::ChunkKey;

#[derive(Default)]
pub struct LruPolicy {
    nodes: Vec<Node>,
    unused: Vec<usize>,
    by_key: HashMap<ChunkKey, usize>,
    oldest: Option<usize>,
    newest: Option<usize>,
}

struct Node {
    key: ChunkKey,
    older: Option<usize>,
    newer: Option<usize>,
}

impl EvictionPolicy for LruPolicy {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn on_touch(&mut self, key: ChunkKey, _touch: Touch) {
        if let Some(&index) = self.by_key.get(&key) {
            self.unlink(index);
            self.link_newest(index);
            return;
        }
        let node = Node { key, older: None, newer: None };
        let index = match self.unused.pop() {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.by_key.insert(key, index);
        self.link_newest(index);
    }

    fn on_remove(&mut self, key: &ChunkKey) {
        if let Some(index) = self.by_key.remove(key) {
            self.unlink(index);
            self.unused.push(index);
        }
    }

    fn victims(&self, n: usize, _now: Duration, may_evict: &mut dyn FnMut(&ChunkKey) -> bool) -> Vec<ChunkKey> {
        let mut victims = Vec::new();
        let mut next = self.oldest;
        while let Some(index) = next.filter(|_| victims.len() < n) {
            let node = &self.nodes[index];
            if may_evict(&node.key) {
                victims.push(node.key);
            }
            next = node.newer;
        }
        victims
    }

    fn len(&self) -> usize {
        self.by_key.len()
    }
}

impl LruPolicy {
    fn unlink(&mut self, index: usize) {
        let Node { older, newer, .. } = self.nodes[index];
        match older {
            Some(older) => self.nodes[older].newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.nodes[newer].older = older,
            None => self.newest = older,
        }
    }

    fn link_newest(&mut self, index: usize) {
        self.nodes[index].older = self.newest;
        self.nodes[index].newer = None;
        match self.newest {
            Some(newest) => self.nodes[newest].newer = Some(index),
            None => self.oldest = Some(index),
        }
        self.newest = Some(index);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::conformance::key;

    const TOUCH: Touch = Touch { position_tokens: 32, now: Duration::ZERO };

    fn victims(policy: &LruPolicy, n: usize) -> Vec<ChunkKey> {
        policy.victims(n, Duration::ZERO, &mut |_| true)
    }

    #[test]
    fn oldest_goes_first_and_a_touch_rescues() {
        let mut policy = LruPolicy::default();
        for index in 0..4 {
            policy.on_touch(key(index), TOUCH);
        }
        policy.on_touch(key(0), TOUCH);
        assert_eq!(victims(&policy, 2), [key(1), key(2)]);
        policy.on_remove(&key(1));
        assert_eq!(victims(&policy, 9), [key(2), key(3), key(0)]);
        let unpinned = policy.victims(9, Duration::ZERO, &mut |k| *k != key(2));
        assert_eq!(unpinned, [key(3), key(0)]);
    }

    proptest! {
        #[test]
        fn equals_a_plain_list(ops in prop::collection::vec((0u8..3, 0u64..20), 0..400)) {
            let mut policy = LruPolicy::default();
            let mut model: Vec<ChunkKey> = Vec::new();
            for (op, index) in ops {
                model.retain(|k| *k != key(index));
                if op == 0 {
                    policy.on_remove(&key(index));
                } else {
                    policy.on_touch(key(index), TOUCH);
                    model.push(key(index));
                }
                prop_assert_eq!(policy.len(), model.len());
                prop_assert_eq!(victims(&policy, 100), model.clone());
            }
        }
    }
}
