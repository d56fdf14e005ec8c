//! Policies by value: chunks whose values keep their order over time share a group, the victim is the least of the groups' heads.
//!
//! `Cost / T` of two chunks may swap places as time goes on, so no heap of values stays right. But among chunks of one cost (and, for
//! [`ReturnProbability`], one class) the value falls with idle time, so the longest idle is the least: a group is ordered by last
//! activity. Costs are put into buckets of a quarter of a power of two of the context length; a victim costs one look at each head.

use std::cmp::Ordering;
use std::collections::{btree_map, BTreeMap, BinaryHeap, HashMap};
use std::time::Duration;

use super::{ChunkUse, EvictionPolicy, Victim, View};
use crate::{ChunkKey, ChunkMap};

/// Buckets of context length in a power of two.
const BUCKETS_PER_OCTAVE: f32 = 4.0;
/// As many as there are for any length: 4 x 32 octaves.
const MAX_BUCKETS: u32 = 128;
/// Idle times below this count as this: a chunk in use a moment ago is not infinitely valuable.
const LEAST_IDLE: f64 = 1e-3;

/// What a chunk is worth, and which chunks keep their order.
pub trait Rank: Send {
    fn name(&self) -> &'static str;

    /// Chunks of one group are worth less the longer they are idle, at any time.
    fn group(&self, chunk: &ChunkUse) -> u32;

    fn value(&self, chunk: &ChunkUse, view: &View) -> f64;
}

/// A chunk's place in its group: the longest idle first; of one moment the leading chunk first, then the one that came first.
type Place = (Duration, u32, u64);

/// A policy by value.
pub struct RankedPolicy<R> {
    rank: R,
    groups: HashMap<u32, BTreeMap<Place, (ChunkKey, ChunkUse)>>,
    by_key: ChunkMap<(u32, Place)>,
    num_touches: u64,
}

impl<R: Rank> RankedPolicy<R> {
    pub fn new(rank: R) -> Self {
        Self { rank, groups: HashMap::new(), by_key: ChunkMap::default(), num_touches: 0 }
    }
}

impl<R: Rank> EvictionPolicy for RankedPolicy<R> {
    fn name(&self) -> &'static str {
        self.rank.name()
    }

    fn on_touch(&mut self, key: ChunkKey, chunk: ChunkUse) {
        self.on_remove(&key);
        let group = self.rank.group(&chunk);
        let place = (chunk.last_activity, chunk.context_tokens, self.num_touches);
        self.num_touches += 1;
        self.groups.entry(group).or_default().insert(place, (key, chunk));
        self.by_key.insert(key, (group, place));
    }

    fn on_remove(&mut self, key: &ChunkKey) {
        let Some((group, place)) = self.by_key.remove(key) else { return };
        let members = self.groups.get_mut(&group).expect("a member's group is known");
        members.remove(&place);
        if members.is_empty() {
            self.groups.remove(&group);
        }
    }

    fn victims(&mut self, n: usize, view: &View) -> Vec<Victim> {
        let head = |(key, chunk): &(ChunkKey, ChunkUse)| Head {
            value: self.rank.value(chunk, view),
            idle_since: chunk.last_activity,
            key: *key,
        };
        let mut rests: Vec<btree_map::Values<Place, _>> = self.groups.values().map(BTreeMap::values).collect();
        let firsts = rests.iter_mut().enumerate().filter_map(|(group, rest)| Some((head(rest.next()?), group)));
        let mut heads: BinaryHeap<(Head, usize)> = firsts.collect();
        let mut victims = Vec::with_capacity(n.min(self.by_key.len()));
        while victims.len() < n {
            let Some((Head { key, value, .. }, group)) = heads.pop() else { break };
            victims.push(Victim { key, value });
            heads.extend(rests[group].next().map(|next| (head(next), group)));
        }
        victims
    }

    fn value(&self, _: &ChunkKey, chunk: &ChunkUse, view: &View) -> f64 {
        self.rank.value(chunk, view)
    }

    fn len(&self) -> usize {
        self.by_key.len()
    }
}

/// The head of a group; the least value is the heap's greatest, of equal ones the longest idle.
struct Head {
    value: f64,
    idle_since: Duration,
    key: ChunkKey,
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_value = other.value.total_cmp(&self.value);
        by_value.then(other.idle_since.cmp(&self.idle_since)).then(other.key.cmp(&self.key))
    }
}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Head {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Head {}

/// Least recently used: one group. Of chunks touched at one moment, the leading ones of a conversation go first.
pub struct LeastRecentlyUsed;

impl Rank for LeastRecentlyUsed {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn group(&self, _: &ChunkUse) -> u32 {
        0
    }

    fn value(&self, chunk: &ChunkUse, _: &View) -> f64 {
        chunk.last_activity.as_secs_f64()
    }
}

/// `V = Cost(l) / T` (Pensieve, section 4.3): old conversations first, and the leading chunks of one first.
pub struct Retention {
    pub idle_cutoff: Option<Duration>,
}

impl Rank for Retention {
    fn name(&self) -> &'static str {
        "retention"
    }

    fn group(&self, chunk: &ChunkUse) -> u32 {
        cost_bucket(chunk.context_tokens)
    }

    fn value(&self, chunk: &ChunkUse, view: &View) -> f64 {
        match idle_seconds(chunk, view, self.idle_cutoff) {
            Some(idle) => view.costs.at(chunk.context_tokens) / idle,
            None => 0.0,
        }
    }
}

/// Recompute cost times the rate of return: [`Retention`] with `1 / T` replaced by what was seen of conversations like this one.
pub struct ReturnProbability {
    pub idle_cutoff: Option<Duration>,
}

impl Rank for ReturnProbability {
    fn name(&self) -> &'static str {
        "return_probability"
    }

    fn group(&self, chunk: &ChunkUse) -> u32 {
        u32::from(chunk.class.0) * MAX_BUCKETS + cost_bucket(chunk.context_tokens)
    }

    fn value(&self, chunk: &ChunkUse, view: &View) -> f64 {
        match idle_seconds(chunk, view, self.idle_cutoff) {
            Some(idle) => view.costs.at(chunk.context_tokens) * view.returns.rate(chunk.class, idle),
            None => 0.0,
        }
    }
}

fn cost_bucket(context_tokens: u32) -> u32 {
    ((context_tokens.max(1) as f32).log2() * BUCKETS_PER_OCTAVE) as u32
}

/// `None`: past the cut-off.
fn idle_seconds(chunk: &ChunkUse, view: &View, cutoff: Option<Duration>) -> Option<f64> {
    let idle = view.now.saturating_sub(chunk.last_activity);
    let is_dead = cutoff.is_some_and(|cutoff| idle > cutoff);
    (!is_dead).then_some(idle.as_secs_f64().max(LEAST_IDLE))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::conformance::key;
    use crate::eviction::{policy, Class, CostCurve, ReturnTimes};

    fn chunk(context_tokens: u32, seconds: u64) -> ChunkUse {
        ChunkUse { context_tokens, last_activity: Duration::from_secs(seconds), class: Class::default() }
    }

    fn victims(policy: &mut dyn EvictionPolicy, n: usize, seconds: u64) -> Vec<ChunkKey> {
        let costs = CostCurve::new(vec![(32, 1.0), (3200, 100.0)]).unwrap();
        let returns = ReturnTimes::default();
        let view = View { now: Duration::from_secs(seconds), costs: &costs, returns: &returns };
        policy.victims(n, &view).into_iter().map(|victim| victim.key).collect()
    }

    #[test]
    fn lru_gives_the_oldest_and_a_touch_rescues() {
        let mut lru = policy("lru", None).unwrap();
        for index in 0..4 {
            lru.on_touch(key(index), chunk(32, index));
        }
        lru.on_touch(key(0), chunk(32, 9));
        assert_eq!(victims(&mut *lru, 2, 10), [key(1), key(2)]);
        lru.on_remove(&key(1));
        assert_eq!(victims(&mut *lru, 9, 10), [key(2), key(3), key(0)]);
    }

    /// The paper's two consequences: of one conversation the leading chunks go first, of equal chunks the longest idle; and a long
    /// context outlives a short one that was idle for a little less.
    #[test]
    fn retention_weighs_cost_against_idle_time() {
        let mut retention = policy("retention", None).unwrap();
        retention.on_touch(key(1), chunk(64, 100));
        retention.on_touch(key(2), chunk(1600, 100));
        retention.on_touch(key(3), chunk(64, 60));
        assert_eq!(victims(&mut *retention, 9, 110), [key(3), key(1), key(2)]);
        let mut two = policy("retention", None).unwrap();
        two.on_touch(key(1), chunk(3200, 0));
        two.on_touch(key(2), chunk(320, 90));
        // The order of two chunks changes with time alone.
        assert_eq!(victims(&mut *two, 9, 95), [key(1), key(2)]);
        assert_eq!(victims(&mut *two, 9, 200), [key(2), key(1)]);
    }

    #[test]
    fn past_the_cutoff_a_chunk_is_worth_nothing() {
        let mut retention = policy("retention", Some(Duration::from_secs(60))).unwrap();
        retention.on_touch(key(1), chunk(3200, 0));
        retention.on_touch(key(2), chunk(32, 50));
        assert_eq!(victims(&mut *retention, 2, 59), [key(2), key(1)]);
        assert_eq!(victims(&mut *retention, 2, 61), [key(1), key(2)]);
    }

    proptest! {
        /// Against sorting everything by value: the same values in the same order, up to the width of a bucket.
        #[test]
        fn equals_a_full_sort(
            ops in prop::collection::vec((0u8..4, 0u64..20, 1u32..200), 1..300),
            which in 0usize..3,
        ) {
            let mut policy = policy(["lru", "retention", "return_probability"][which], None).unwrap();
            let costs = CostCurve::new(vec![(32, 1.0), (3200, 100.0)]).unwrap();
            let returns = ReturnTimes::default();
            let mut model: Vec<(ChunkKey, ChunkUse)> = Vec::new();
            for (step, (op, index, position)) in ops.into_iter().enumerate() {
                model.retain(|(k, _)| *k != key(index));
                if op == 0 {
                    policy.on_remove(&key(index));
                } else {
                    // Lengths at bucket borders, so that a bucket holds one cost.
                    let chunk = chunk(32 << (position % 6), step as u64);
                    policy.on_touch(key(index), chunk);
                    model.push((key(index), chunk));
                }
                let view = View { now: Duration::from_secs(step as u64 + 5), costs: &costs, returns: &returns };
                let mut sorted: Vec<f64> = model.iter().map(|(k, c)| policy.value(k, c, &view)).collect();
                sorted.sort_by(f64::total_cmp);
                let victims: Vec<f64> = policy.victims(100, &view).iter().map(|v| v.value).collect();
                prop_assert_eq!(policy.len(), model.len());
                prop_assert_eq!(victims, sorted);
            }
        }
    }
}
