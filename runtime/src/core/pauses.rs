//! Which conversations pause, so that their return can be recognised: by the last full chunk of their log, whoever sends it.

use std::collections::VecDeque;
use std::time::Duration;

use keepsake_tiers::eviction::{Class, ReturnTimes};
use keepsake_tiers::{ChunkKey, ChunkMap};

use super::sequence::Sequence;

/// Conversations remembered; the one that has paused longest is forgotten first.
const MAX_PAUSES: usize = 1 << 14;

/// Pausing conversations by the last full chunk of their log.
#[derive(Debug)]
pub(super) struct Pauses {
    by_chunk: ChunkMap<Pause>,
    /// With the number of the pause, since a chunk may pause again.
    order: VecDeque<(ChunkKey, u64)>,
    num_begun: u64,
}

#[derive(Clone, Copy, Debug)]
struct Pause {
    begin: Duration,
    turn: u32,
    number: u64,
}

impl Default for Pauses {
    /// Takes its memory at once, so that a server's does not creep up for hours.
    fn default() -> Self {
        let by_chunk = ChunkMap::with_capacity_and_hasher(MAX_PAUSES + 1, Default::default());
        Self { by_chunk, order: VecDeque::with_capacity(MAX_PAUSES + 1), num_begun: 0 }
    }
}

impl Pauses {
    /// A new turn: ends the pause of the conversation that it continues, if that is remembered. Returns the turn's class.
    pub(super) fn end(
        &mut self,
        sequence: &mut Sequence,
        chunk_tokens: usize,
        returns: &mut ReturnTimes,
        now: Duration,
    ) -> Class {
        let tenant = sequence.tenant();
        let num_full = sequence.tokens.len() / chunk_tokens;
        let paused = (0..num_full).rev().find_map(|index| self.by_chunk.remove(&sequence.key(index, chunk_tokens)));
        let turn = match paused {
            Some(pause) => {
                returns.returned(Class::of(tenant, pause.turn), now.saturating_sub(pause.begin), now);
                pause.turn + 1
            }
            None => 1,
        };
        sequence.turn = turn;
        Class::of(tenant, turn)
    }

    /// A turn has ended.
    pub(super) fn begin(
        &mut self,
        sequence: &mut Sequence,
        chunk_tokens: usize,
        returns: &mut ReturnTimes,
        now: Duration,
    ) {
        let kept = sequence.keep.min(sequence.tokens.len());
        let Some(last) = (kept / chunk_tokens).checked_sub(1) else { return };
        returns.paused(sequence.class, now);
        let (key, number) = (sequence.key(last, chunk_tokens), self.num_begun);
        self.num_begun += 1;
        self.by_chunk.insert(key, Pause { begin: now, turn: sequence.turn, number });
        self.order.push_back((key, number));
        while self.order.len() > MAX_PAUSES {
            let Some((key, number)) = self.order.pop_front() else { break };
            if self.by_chunk.get(&key).is_some_and(|pause| pause.number == number) {
                self.by_chunk.remove(&key);
            }
        }
    }
}
