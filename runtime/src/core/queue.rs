//! Who waits, in which order they are admitted, and which chunks they will use.
//!
//! Order: suspended sequences first, then any sequence that has waited for longer than the age bound, oldest first; then, among the
//! tenants that had least of the device for their weight, the sequence that costs the device least (what is cached costs
//! nothing). A first-come queue makes the returns of conversations nearly cyclic, and a cache then evicts each one just before its turn.
//! Past its age bound nobody overtakes a sequence but those that were there before it.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use keepsake_tiers::{ChunkKey, ChunkMap};

use super::request::SequenceId;

/// When a chunk will be used: how long the first sequence that wants it has waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NextUse {
    pub(super) arrived: Duration,
    pub(super) id: SequenceId,
}

/// A chunk that a queued sequence will use.
pub(super) struct Wish {
    pub(super) key: ChunkKey,
    pub(super) position: u32,
}

/// How the queue is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOrder {
    /// First come, first served.
    Arrival,
    /// The cheapest first, within an age bound.
    CacheAware { age_bound: Duration },
}

/// Seconds of device time by which one tenant may be ahead of another of its weight before it has to wait.
const TENANT_LEAD: f64 = 2.0;

#[derive(Debug)]
struct Waiting {
    arrived: Duration,
    tenant: u64,
    /// Was running before: goes first.
    resumes: bool,
    /// Its full chunks, in order, with the seconds that computing each costs.
    chunks: Vec<(ChunkKey, f64)>,
    /// Seconds of device time that it needs as things are.
    cost: f64,
    /// Chunks before this one were looked at for a prefetch.
    next_wish: usize,
}

/// A chunk that queued sequences want.
#[derive(Debug, Default)]
struct Wanted {
    by: Vec<SequenceId>,
    next_use: Option<NextUse>,
    /// Some tier or the device holds it.
    is_held: bool,
}

#[derive(Debug)]
struct Tenant {
    weight: f64,
    /// Device seconds over weight; a tenant that had nothing to do starts where the least served one stands.
    served: f64,
    num_waiting: usize,
}

#[derive(Debug)]
pub(super) struct Queue {
    order: QueueOrder,
    /// Suspended ones in front, else by arrival.
    ids: VecDeque<SequenceId>,
    waiting: HashMap<SequenceId, Waiting>,
    wanted: ChunkMap<Wanted>,
    tenants: HashMap<u64, Tenant>,
}

/// What the queue has to know of a sequence.
pub(super) struct Arrival {
    pub(super) id: SequenceId,
    pub(super) arrived: Duration,
    pub(super) tenant: u64,
    pub(super) weight: f64,
    pub(super) resumes: bool,
    pub(super) chunks: Vec<(ChunkKey, f64)>,
    /// Seconds for what no chunk can hold: the end of the prompt.
    pub(super) rest: f64,
}

impl Queue {
    pub(super) fn new(order: QueueOrder) -> Self {
        Self {
            order,
            ids: VecDeque::new(),
            waiting: HashMap::new(),
            wanted: ChunkMap::default(),
            tenants: HashMap::new(),
        }
    }

    /// `is_held`: does the device or a tier hold the chunk now?
    pub(super) fn push(&mut self, arrival: Arrival, is_held: impl Fn(&ChunkKey) -> bool) {
        let Arrival { id, arrived, tenant, weight, resumes, chunks, rest } = arrival;
        let mut cost = rest;
        for (key, seconds) in &chunks {
            let wanted =
                self.wanted.entry(*key).or_insert_with(|| Wanted { is_held: is_held(key), ..Wanted::default() });
            wanted.by.push(id);
            let next_use = NextUse { arrived, id };
            wanted.next_use = Some(wanted.next_use.map_or(next_use, |earlier| earlier.min(next_use)));
            cost += if wanted.is_held { 0.0 } else { *seconds };
        }
        let least = self.tenants.values().filter(|t| t.num_waiting > 0).map(|t| t.served).fold(f64::NAN, f64::min);
        let share = self.tenants.entry(tenant).or_insert(Tenant { weight, served: 0.0, num_waiting: 0 });
        share.weight = weight;
        if share.num_waiting == 0 && least > share.served {
            share.served = least;
        }
        share.num_waiting += 1;
        self.waiting.insert(id, Waiting { arrived, tenant, resumes, chunks, cost, next_wish: 0 });
        match resumes {
            true => self.ids.push_front(id),
            false => self.ids.push_back(id),
        }
    }

    /// Takes a sequence out; returns the chunks it wanted. `None`: it does not wait.
    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Vec<ChunkKey>> {
        let waiting = self.waiting.remove(&id)?;
        self.ids.retain(|waiting| *waiting != id);
        for (key, _) in &waiting.chunks {
            let wanted = self.wanted.get_mut(key).expect("wanted since the sequence came");
            wanted.by.retain(|by| *by != id);
            let uses = wanted.by.iter().map(|by| NextUse { arrived: self.waiting[by].arrived, id: *by });
            wanted.next_use = uses.min();
            if wanted.by.is_empty() {
                self.wanted.remove(key);
            }
        }
        let share = self.tenants.get_mut(&waiting.tenant).expect("counted since the sequence came");
        share.num_waiting -= 1;
        if self.waiting.is_empty() {
            // Nobody waits: nobody is owed anything.
            self.tenants.clear();
        }
        Some(waiting.chunks.into_iter().map(|(key, _)| key).collect())
    }

    /// The device will spend `seconds` on a tenant's sequence.
    pub(super) fn charge(&mut self, tenant: u64, seconds: f64) {
        if let Some(share) = self.tenants.get_mut(&tenant) {
            share.served += seconds / share.weight;
        }
    }

    /// Who is to be admitted next.
    pub(super) fn next(&self, now: Duration) -> Option<SequenceId> {
        let first = *self.ids.front()?;
        let QueueOrder::CacheAware { age_bound } = self.order else { return Some(first) };
        let oldest = &self.waiting[&first];
        if oldest.resumes || now.saturating_sub(oldest.arrived) >= age_bound {
            return Some(first);
        }
        let least_served =
            self.tenants.values().filter(|t| t.num_waiting > 0).map(|t| t.served).fold(f64::INFINITY, f64::min);
        let may_go = |waiting: &Waiting| self.tenants[&waiting.tenant].served <= least_served + TENANT_LEAD;
        let candidates =
            self.ids.iter().map(|id| (self.waiting[id].cost, *id)).filter(|(_, id)| may_go(&self.waiting[id]));
        // The first of equals: they stand in order of arrival.
        candidates.reduce(|best, other| if other.0 < best.0 { other } else { best }).map(|(_, id)| id)
    }

    /// The next chunk that could be brought nearer, each once.
    pub(super) fn next_wish(&mut self) -> Option<Wish> {
        for id in &self.ids {
            let waiting = self.waiting.get_mut(id).expect("queued ids wait");
            if let Some((key, _)) = waiting.chunks.get(waiting.next_wish) {
                let position = waiting.next_wish as u32;
                waiting.next_wish += 1;
                return Some(Wish { key: *key, position });
            }
        }
        None
    }

    /// When the chunk will be used; `None`: nobody in the queue wants it.
    pub(super) fn next_use(&self, key: &ChunkKey) -> Option<NextUse> {
        self.wanted.get(key)?.next_use
    }

    /// A chunk came somewhere, or left the last place that held it.
    pub(super) fn set_held(&mut self, key: &ChunkKey, position: u32, is_held: bool) {
        let Some(wanted) = self.wanted.get_mut(key).filter(|wanted| wanted.is_held != is_held) else { return };
        wanted.is_held = is_held;
        for id in &wanted.by {
            let waiting = self.waiting.get_mut(id).expect("who wants a chunk waits");
            let seconds = waiting.chunks[position as usize].1;
            waiting.cost += if is_held { -seconds } else { seconds };
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }
}
