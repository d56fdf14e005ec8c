//! Victims by what the oracle says. Values only grow while a next use comes nearer, so a heap of values at the time of their
//! insertion holds lower bounds: its top is brought up to date until it stays on top, and nothing is scanned.

use std::cell::RefCell;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::time::Duration;

use keepsake_tiers::eviction::{ChunkUse, EvictionPolicy, Victim, View};
use keepsake_tiers::ChunkKey;

use super::super::log::Line;
use super::super::settings::{BELADY, CLAIRVOYANT};
use super::oracle::{Oracle, SharedOracle};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// The least recompute cost a second until the next use goes first.
    CostBySecond,
    /// The farthest next use goes first.
    Farthest,
}

pub(super) struct ClairvoyantPolicy {
    rule: Rule,
    oracle: SharedOracle,
    members: HashMap<ChunkKey, (Option<Line>, u32)>,
    /// By line; chunks that the oracle does not know are never used again. Shortest context first: the cheapest.
    lines: HashMap<Option<Line>, BTreeSet<(u32, ChunkKey)>>,
    ranking: RefCell<Ranking>,
}

/// Lines by the value of their cheapest chunk.
#[derive(Default)]
struct Ranking {
    heap: BinaryHeap<Reverse<Ranked>>,
    /// The latest entry of each line; earlier ones are stale.
    versions: HashMap<Option<Line>, u64>,
    next_version: u64,
    /// Of the oracle's changes: how many have been seen.
    num_seen: usize,
    epoch: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Ranked {
    value: f64,
    line: Option<Line>,
    version: u64,
}

impl ClairvoyantPolicy {
    pub(super) fn new(rule: Rule, oracle: SharedOracle) -> Self {
        Self { rule, oracle, members: HashMap::new(), lines: HashMap::new(), ranking: RefCell::default() }
    }

    fn value_of(&self, oracle: &Oracle, line: Option<Line>, position: u32, now: Duration) -> f64 {
        let Some(next) = line.and_then(|line| oracle.next_use(line)) else { return 0.0 };
        // A turn that should have been admitted by now is the next one.
        let seconds = next.saturating_sub(now).max(Duration::from_millis(1)).as_secs_f64();
        match self.rule {
            Rule::CostBySecond => oracle.recompute_cost(position) / seconds,
            Rule::Farthest => 1.0 / seconds,
        }
    }

    fn rank(&self, ranking: &mut Ranking, oracle: &Oracle, line: Option<Line>, now: Duration) {
        let Some((position, _)) = self.lines.get(&line).and_then(BTreeSet::first) else { return };
        let value = self.value_of(oracle, line, *position, now);
        let version = ranking.next_version;
        ranking.next_version += 1;
        ranking.versions.insert(line, version);
        ranking.heap.push(Reverse(Ranked { value, line, version }));
    }

    /// Takes in what the oracle learned since the last call.
    fn catch_up(&self, ranking: &mut Ranking, oracle: &Oracle, now: Duration) {
        if ranking.epoch != oracle.epoch() {
            // A longer queue moves every use further away: no bound holds.
            ranking.epoch = oracle.epoch();
            ranking.num_seen = oracle.changed().len();
            ranking.heap.clear();
            for line in self.lines.keys() {
                self.rank(ranking, oracle, *line, now);
            }
        }
        for line in &oracle.changed()[ranking.num_seen..] {
            self.rank(ranking, oracle, Some(*line), now);
        }
        ranking.num_seen = oracle.changed().len();
    }

    /// The line of least value now; its entry leaves the heap.
    fn pop(&self, ranking: &mut Ranking, oracle: &Oracle, now: Duration) -> Option<Ranked> {
        loop {
            let Reverse(top) = ranking.heap.pop()?;
            if ranking.versions.get(&top.line) != Some(&top.version) {
                continue;
            }
            let Some((position, _)) = self.lines.get(&top.line).and_then(BTreeSet::first) else {
                ranking.versions.remove(&top.line);
                continue;
            };
            let current = Ranked { value: self.value_of(oracle, top.line, *position, now), ..top };
            if ranking.heap.peek().is_none_or(|Reverse(next)| current <= *next) {
                return Some(current);
            }
            ranking.heap.push(Reverse(current));
        }
    }
}

impl EvictionPolicy for ClairvoyantPolicy {
    fn name(&self) -> &'static str {
        match self.rule {
            Rule::CostBySecond => CLAIRVOYANT,
            Rule::Farthest => BELADY,
        }
    }

    fn on_touch(&mut self, key: ChunkKey, chunk: ChunkUse) {
        let oracle = self.oracle.clone();
        let oracle = oracle.lock();
        let line = oracle.line(&key);
        if self.members.insert(key, (line, chunk.context_tokens)).is_some() {
            return;
        }
        let chunks = self.lines.entry(line).or_default();
        chunks.insert((chunk.context_tokens, key));
        if chunks.first() == Some(&(chunk.context_tokens, key)) {
            self.rank(&mut self.ranking.borrow_mut(), &oracle, line, chunk.last_activity);
        }
    }

    fn on_remove(&mut self, key: &ChunkKey) {
        let Some((line, position)) = self.members.remove(key) else { return };
        let chunks = self.lines.get_mut(&line).expect("a member is listed under its line");
        chunks.remove(&(position, *key));
        if chunks.is_empty() {
            self.lines.remove(&line);
        }
    }

    fn victims(&mut self, n: usize, view: &View) -> Vec<Victim> {
        let now = view.now;
        let oracle = self.oracle.lock();
        let ranking = &mut *self.ranking.borrow_mut();
        self.catch_up(ranking, &oracle, now);
        let mut victims = Vec::new();
        // Lines that gave a victim, by the value of their next chunk, with that chunk.
        let mut open: BinaryHeap<Reverse<(Ranked, (u32, ChunkKey))>> = BinaryHeap::new();
        let mut popped = Vec::new();
        let mut next_line = self.pop(ranking, &oracle, now);
        while victims.len() < n {
            let opens = match (&next_line, open.peek()) {
                (Some(line), Some(Reverse((other, _)))) => line <= other,
                (Some(_), None) => true,
                (None, _) => false,
            };
            let (ranked, chunk) = if opens {
                let ranked = next_line.take().expect("compared above");
                popped.push(ranked);
                next_line = self.pop(ranking, &oracle, now);
                let first = self.lines[&ranked.line].first().copied().expect("a line without chunks is not ranked");
                (ranked, first)
            } else {
                let Some(Reverse(entry)) = open.pop() else { break };
                entry
            };
            victims.push(Victim { key: chunk.1, value: ranked.value });
            let after = (std::ops::Bound::Excluded(chunk), std::ops::Bound::Unbounded);
            if let Some(following) = self.lines[&ranked.line].range(after).next() {
                let value = self.value_of(&oracle, ranked.line, following.0, now);
                open.push(Reverse((Ranked { value, ..ranked }, *following)));
            }
        }
        ranking.heap.extend(popped.into_iter().chain(next_line).map(Reverse));
        victims
    }

    fn value(&self, key: &ChunkKey, chunk: &ChunkUse, view: &View) -> f64 {
        let oracle = self.oracle.lock();
        self.value_of(&oracle, oracle.line(key), chunk.context_tokens, view.now)
    }

    fn len(&self) -> usize {
        self.members.len()
    }
}

impl Eq for Ranked {}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        self.value.total_cmp(&other.value).then(self.line.cmp(&other.line)).then(self.version.cmp(&other.version))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
