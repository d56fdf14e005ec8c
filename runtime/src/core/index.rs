//! Which chunks of one kind there are, in the order to give them up.

use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use keepsake_tiers::eviction::{ChunkUse, EvictionPolicy, Victim, View};
use keepsake_tiers::{ChunkKey, ChunkMap};

use super::directory::ChunkEntry;
use super::queue::NextUse;

/// Victims fetched at a time for blocks that are handed out one by one.
const READY: usize = 32;
/// Above every policy's values: a queued conversation is certain to return.
const QUEUED_VALUE: f64 = 1e12;

/// Chunks that may be evicted: first those of thinking users, as the tier's policy ranks them, then those that queued sequences
/// want, the last in the queue first.
pub(super) struct Index {
    policy: Box<dyn EvictionPolicy>,
    members: ChunkMap<Member>,
    queued: BTreeSet<(Reverse<NextUse>, u32, ChunkKey)>,
    /// The next victims as they stood at `ready_at`.
    ready: VecDeque<(ChunkKey, Member)>,
    ready_at: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Member {
    /// With its last activity, as the policy knows it.
    Ranked(Duration),
    Queued(NextUse, u32),
}

impl Index {
    pub(super) fn new(policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            policy,
            members: ChunkMap::default(),
            queued: BTreeSet::new(),
            ready: VecDeque::new(),
            ready_at: Duration::ZERO,
        }
    }

    /// Makes the chunk a member or not; a member is ranked anew when it was used since.
    pub(super) fn set(
        &mut self,
        key: &ChunkKey,
        entry: &ChunkEntry,
        chunk: ChunkUse,
        is_member: bool,
        next_use: Option<NextUse>,
    ) {
        let member = is_member.then_some(match next_use {
            Some(next_use) => Member::Queued(next_use, entry.position),
            None => Member::Ranked(entry.last_activity),
        });
        let earlier = self.members.get(key).copied();
        if member == earlier {
            return;
        }
        match earlier {
            Some(Member::Queued(next_use, position)) => {
                self.queued.remove(&(Reverse(next_use), position, *key));
            }
            // A touch moves it; no need to take it out first.
            Some(Member::Ranked(_)) if matches!(member, Some(Member::Ranked(_))) => {}
            Some(Member::Ranked(_)) => self.policy.on_remove(key),
            None => {}
        }
        match member {
            Some(Member::Queued(next_use, position)) => {
                self.queued.insert((Reverse(next_use), position, *key));
            }
            Some(Member::Ranked(_)) => self.policy.on_touch(*key, chunk),
            None => {}
        }
        match member {
            Some(member) => self.members.insert(*key, member),
            None => self.members.remove(key),
        };
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Up to `n` members, least valuable first.
    pub(super) fn victims(&mut self, n: usize, view: &View) -> Vec<Victim> {
        let mut victims = self.policy.victims(n, view);
        let rest = n - victims.len();
        victims.extend(
            self.queued
                .iter()
                .take(rest)
                .map(|(Reverse(next_use), _, key)| Victim { key: *key, value: queued_value(*next_use) }),
        );
        victims
    }

    /// The least valuable member. What came in since the clock last moved is only weighed after those that were there.
    pub(super) fn next_victim(&mut self, view: &View) -> Option<ChunkKey> {
        if self.ready_at != view.now {
            self.ready.clear();
            self.ready_at = view.now;
        }
        loop {
            if self.ready.is_empty() {
                let victims = self.victims(READY, view);
                self.ready.extend(victims.iter().map(|victim| (victim.key, self.members[&victim.key])));
            }
            let (key, member) = self.ready.pop_front()?;
            if self.members.get(&key) == Some(&member) {
                return Some(key);
            }
        }
    }

    /// What a chunk would be worth among these members.
    pub(super) fn value(&self, key: &ChunkKey, chunk: &ChunkUse, next_use: Option<NextUse>, view: &View) -> f64 {
        match next_use {
            Some(next_use) => queued_value(next_use),
            None => self.policy.value(key, chunk, view),
        }
    }
}

fn queued_value(next_use: NextUse) -> f64 {
    QUEUED_VALUE - next_use.arrived.as_secs_f64()
}

/// Chunks in the order of their last activity, those in use after all others.
#[derive(Default)]
pub(super) struct Recency {
    order: BTreeSet<((bool, Duration), ChunkKey)>,
    members: ChunkMap<(bool, Duration)>,
}

impl Recency {
    pub(super) fn set(&mut self, key: &ChunkKey, entry: &ChunkEntry, is_member: bool) {
        let place = (entry.refs() > 0, entry.last_activity);
        if is_member && self.members.get(key) == Some(&place) {
            return;
        }
        if let Some(earlier) = self.members.remove(key) {
            self.order.remove(&(earlier, *key));
        }
        if is_member {
            self.members.insert(*key, place);
            self.order.insert((place, *key));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Up to `n` members, those in use first, then the most recently active.
    pub(super) fn latest(&self, n: usize) -> Vec<ChunkKey> {
        self.order.iter().rev().take(n).map(|(_, key)| *key).collect()
    }
}
