//! When each chunk is used next.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use keepsake_tiers::ChunkKey;
use parking_lot::Mutex;

use super::super::log::{Line, Log};
use super::super::prices::Prices;
use super::super::request::ROOT;
use super::super::traffic::Turn;

/// One world's oracle, for all its policies. Worlds are single-threaded: the lock is never waited for.
pub(in super::super) type SharedOracle = Arc<Mutex<Oracle>>;

/// Below this, the wait in the queue is taken as unchanged.
const WAIT_STEP: Duration = Duration::from_secs(1);

pub(in super::super) struct Oracle {
    chunk_tokens: usize,
    prices: Arc<Prices>,
    lines: HashMap<ChunkKey, Line>,
    /// Times of turns that are to be sent or have not ended, in ascending order.
    uses: HashMap<Line, VecDeque<Duration>>,
    /// Of conversations of their own: how many chunks are known, and the last one's key.
    known: HashMap<Line, (usize, ChunkKey)>,
    /// Lines whose next use changed, in the order of the changes.
    changed: Vec<Line>,
    /// How long the queue makes a turn wait: the time between sending and use.
    wait: Duration,
    /// Counts changes of `wait`.
    epoch: u64,
}

impl Oracle {
    pub(in super::super) fn shared(chunk_tokens: usize, prices: Arc<Prices>) -> SharedOracle {
        Arc::new(Mutex::new(Self {
            chunk_tokens,
            prices,
            lines: HashMap::new(),
            uses: HashMap::new(),
            known: HashMap::new(),
            changed: Vec::new(),
            wait: Duration::ZERO,
            epoch: 0,
        }))
    }

    /// A turn will be sent at `at`.
    pub(in super::super) fn expect_use(&mut self, turn: &Turn, at: Duration) {
        for line in turn.log.lines(turn.prompt) {
            let uses = self.uses.entry(line).or_default();
            let place = uses.partition_point(|other| *other <= at);
            uses.insert(place, at);
            if place == 0 {
                self.changed.push(line);
            }
        }
    }

    /// A turn that was expected at `at` is over.
    pub(in super::super) fn was_used(&mut self, turn: &Turn, at: Duration) {
        for line in turn.log.lines(turn.prompt) {
            let Some(uses) = self.uses.get_mut(&line) else { continue };
            if let Ok(place) = uses.binary_search(&at) {
                uses.remove(place);
                self.changed.push(line);
            }
            if uses.is_empty() {
                self.uses.remove(&line);
            }
        }
    }

    /// Learns which chunks a turn's log has, its reply and the tail included: all of them will be there when it has ended.
    pub(in super::super) fn learn(&mut self, turn: &Turn) {
        let size = self.chunk_tokens;
        let total = turn.prompt + turn.output;
        let own = match &turn.log {
            Log::Own { seed } => Some(Line::Own(*seed)),
            Log::Blocks { .. } => None,
        };
        let (first, mut key) = own.and_then(|line| self.known.get(&line).copied()).unwrap_or((0, ROOT));
        for index in first..total / size {
            key = key.child(&turn.log.tokens(index * size..(index + 1) * size));
            self.lines.insert(key, turn.log.line((index + 1) * size));
        }
        if let Some(line) = own {
            self.known.insert(line, (total / size, key));
        }
        // The last token of a reply is never fed.
        let tail = total / size * size..total - 1;
        if !tail.is_empty() {
            let line = turn.log.line(tail.end);
            self.lines.insert(key.child(&turn.log.tokens(tail)), line);
        }
    }

    /// A turn was admitted after waiting so long.
    pub(in super::super) fn waited(&mut self, wait: Duration, _now: Duration) {
        let (low, high) = (self.wait.min(wait), self.wait.max(wait));
        if high - low > WAIT_STEP.max(self.wait / 4) {
            self.wait = wait;
            self.epoch += 1;
        }
    }

    pub(super) fn line(&self, key: &ChunkKey) -> Option<Line> {
        self.lines.get(key).copied()
    }

    /// When a line's chunks are used next; `None`: never again.
    pub(super) fn next_use(&self, line: Line) -> Option<Duration> {
        self.uses.get(&line)?.front().map(|sent| *sent + self.wait)
    }

    pub(super) fn changed(&self) -> &[Line] {
        &self.changed
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn recompute_cost(&self, position_tokens: u32) -> f64 {
        self.prices.chunk_ending_at(position_tokens)
    }
}
