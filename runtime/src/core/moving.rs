//! Blocks and tiers: who gives a block, what moves where, and what the end of a move changes.

use std::time::Duration;

use keepsake_kernels::BlockId;
use keepsake_tiers::eviction::{Victim, View};
use keepsake_tiers::ChunkKey;

use super::command::{Command, CommandKind, MoveDone, MoveFault, MoveId, TierIndex};
use super::directory::{ChunkEntry, InTier, OnDevice};
use super::eviction::{Candidate, Pressure, Proposal, TierPressure};
use super::planning::count_computed;
use super::request::SequenceId;
use super::scheduler::{Scheduler, TierState};
use super::sequence::{Owner, Page};

/// Candidates of one kind shown to the eviction actor at a time.
const CANDIDATES: usize = 64;

impl Scheduler {
    /// Blocks that can be handed out at once: empty and clean ones.
    pub fn available(&self) -> usize {
        self.pool.num_free() + self.clean.len()
    }

    /// A free block, else the least valuable clean one.
    pub(super) fn take_block(&mut self) -> Option<BlockId> {
        if let Some(block) = self.pool.alloc() {
            return Some(block);
        }
        let view = View { now: self.now, costs: &self.config.costs.chunk, returns: &self.returns };
        let victim = self.clean.next_victim(&view)?;
        Some(self.take_evictable(&victim))
    }

    /// The block of an unused chunk; the chunk leaves the device.
    pub(super) fn take_evictable(&mut self, key: &ChunkKey) -> BlockId {
        let entry = self.directory.get_mut(key).expect("an indexed chunk has an entry");
        let block = entry.evict();
        self.reindex(key);
        block
    }

    /// Takes a block for a chunk and asks its tier to fill it; the sequence waits.
    pub(super) fn start_load(&mut self, id: SequenceId, key: ChunkKey, from: TierIndex, now: Duration) -> BlockId {
        let block = self.take_block().expect("admission counted the blocks");
        let class = self.sequence(id).class;
        let entry = self.directory.get_mut(&key).expect("a readable chunk has an entry");
        entry.begin_load(from, block);
        entry.touch(now, class);
        let position = entry.position;
        entry.acquire();
        self.tiers[from.0].loads_in_flight += 1;
        self.issue(key, position, CommandKind::Load { from, block });
        self.reindex(&key);
        self.wait_for_load(id, position as usize, key);
        block
    }

    pub(super) fn wait_for_load(&mut self, id: SequenceId, page: usize, key: ChunkKey) {
        self.waiters.entry(key).or_default().push(id);
        self.sequence_mut(id).loading.insert(page);
    }

    pub(super) fn stop_waiting(&mut self, id: SequenceId, key: &ChunkKey) {
        if let Some(waiters) = self.waiters.get_mut(key) {
            waiters.retain(|w| *w != id);
            if waiters.is_empty() {
                self.waiters.remove(key);
            }
        }
    }

    pub(super) fn issue(&mut self, key: ChunkKey, position: u32, kind: CommandKind) {
        let id = MoveId(self.next_move);
        self.next_move += 1;
        let command = Command { id, key, position, kind };
        self.moves.insert(id, command);
        self.commands.push(command);
        for tier in tiers_of(kind) {
            self.tiers[tier.0].moves_in_flight += 1;
        }
    }

    /// Takes a move's end. Unknown ids are a bug of the caller.
    pub fn move_done(&mut self, done: MoveDone, now: Duration) {
        self.now = now;
        let command = self.moves.remove(&done.id).expect("a move ends once");
        let key = command.key;
        for tier in tiers_of(command.kind) {
            self.tiers[tier.0].moves_in_flight -= 1;
        }
        match command.kind {
            CommandKind::Load { from, block } => self.load_done(command, from, block, done.result, now),
            CommandKind::SwapOut { to, .. } => {
                self.entry_mut(&key).end_swap_out(to, done.result.is_ok());
                self.write_done(to, done.result);
            }
            CommandKind::Spill { from, to } | CommandKind::Prefetch { from, to } => {
                self.entry_mut(&key).end_copy(from, to, done.result.is_ok());
                self.write_done(to, done.result);
                if done.result == Err(MoveFault::Lost) {
                    self.lose(&key, from);
                }
            }
            CommandKind::Remove { from } => {
                let tier = &mut self.tiers[from.0];
                tier.used -= 1;
                tier.leaving -= 1;
                self.entry_mut(&key).end_remove(from);
            }
        }
        self.reindex(&key);
    }

    fn write_done(&mut self, to: TierIndex, result: Result<(), MoveFault>) {
        let tier = &mut self.tiers[to.0];
        match result {
            Ok(()) => {}
            Err(fault) => {
                tier.used -= 1;
                // Until the tier's next report says otherwise; asking again at once would only fail again.
                tier.accepts &= !matches!(fault, MoveFault::Full | MoveFault::Failed);
            }
        }
    }

    fn load_done(
        &mut self,
        command: Command,
        from: TierIndex,
        block: BlockId,
        result: Result<(), MoveFault>,
        now: Duration,
    ) {
        let key = command.key;
        self.tiers[from.0].loads_in_flight -= 1;
        let is_current = self.entry_mut(&key).end_load(from, block, result.is_ok());
        if result.is_err() {
            self.counters.load_failures += 1;
            self.discard_failed_copy(&key, from, result);
        }
        if self.orphans.remove(&command.id).is_some() {
            self.pool.free(block);
            return;
        }
        debug_assert!(is_current, "a load that was not abandoned still owns its block");
        let waiters = self.waiters.remove(&key).unwrap_or_default();
        if result.is_ok() {
            for id in waiters {
                self.sequence_mut(id).loading.remove(&(command.position as usize));
            }
            return;
        }
        for id in &waiters {
            self.sequence_mut(*id).computes_all = true;
        }
        self.turn_into_holes(&key, from, &waiters, Some(block), now);
    }

    /// A copy that could not be read is not asked for again: the chunk is recomputed, and written anew later.
    fn discard_failed_copy(&mut self, key: &ChunkKey, from: TierIndex, result: Result<(), MoveFault>) {
        if result == Err(MoveFault::Lost) {
            self.lose(key, from);
        } else if result == Err(MoveFault::Failed) && self.entry_mut(key).is_tier_idle(from) {
            self.begin_remove(key, from);
        }
    }

    /// The tier has already let go of it.
    fn lose(&mut self, key: &ChunkKey, tier: TierIndex) {
        if self.entry_mut(key).lose(tier) {
            self.tiers[tier.0].used -= 1;
        }
    }

    /// Sequences that waited for a load compute its chunk instead, each into a private block; the first gets the load's own.
    fn turn_into_holes(
        &mut self,
        key: &ChunkKey,
        from: TierIndex,
        waiters: &[SequenceId],
        mut block: Option<BlockId>,
        now: Duration,
    ) {
        let chunk_tokens = self.config.chunk_tokens;
        let index = self.entry_mut(key).position as usize;
        for &id in waiters {
            let Some(own) = block.take().or_else(|| self.take_block()) else {
                // No block for it now: it goes back to the queue and takes stock again.
                let sequence = self.sequence_mut(id);
                sequence.pages[index].owner = Owner::Lost;
                sequence.loading.remove(&index);
                sequence.is_lost = true;
                self.suspend_if_lost(id, now);
                continue;
            };
            let sequence = self.sequence_mut(id);
            sequence.loading.remove(&index);
            sequence.pages[index] = Page { block: own, owner: Owner::Private { rows: 0 } };
            sequence.holes.insert(index * chunk_tokens..(index + 1) * chunk_tokens);
            let num_past = if sequence.admitted_before { usize::MAX } else { sequence.request.num_past };
            if let Some(usage) = sequence.admission.as_mut() {
                usage.loaded[from.0] -= chunk_tokens;
                count_computed(usage, index * chunk_tokens..(index + 1) * chunk_tokens, num_past);
            }
        }
        if let Some(unused) = block {
            self.pool.free(unused);
        }
    }

    pub(super) fn give_up_late_loads(&mut self, now: Duration) {
        let late: Vec<SequenceId> = self
            .running
            .iter()
            .copied()
            .filter(|id| {
                let sequence = self.sequence(*id);
                !sequence.loading.is_empty() && now >= sequence.load_deadline
            })
            .collect();
        for id in late {
            let Some(sequence) = self.sequences.get(&id) else { continue };
            let keys: Vec<ChunkKey> = sequence
                .pages
                .iter()
                .filter_map(|p| match p.owner {
                    Owner::Shared(key) => Some(key),
                    Owner::Private { .. } | Owner::Lost => None,
                })
                .collect();
            for key in keys {
                let device = self.directory.get(&key).map(ChunkEntry::device);
                if matches!(device, Some(OnDevice::Loading { .. })) {
                    self.abandon_load(&key, now);
                }
            }
        }
    }

    fn abandon_load(&mut self, key: &ChunkKey, now: Duration) {
        let late = self.moves.iter().find_map(|(id, m)| match m.kind {
            CommandKind::Load { from, block } if m.key == *key && !self.orphans.contains_key(id) => {
                Some((*id, from, block))
            }
            _ => None,
        });
        let (move_id, from, block) = late.expect("a loading chunk has a load in flight");
        self.entry_mut(key).abandon_load();
        self.orphans.insert(move_id, block);
        let waiters = self.waiters.remove(key).unwrap_or_default();
        for id in &waiters {
            self.sequence_mut(*id).computes_all = true;
        }
        self.turn_into_holes(key, from, &waiters, None, now);
        self.reindex(key);
    }

    /// Is there anything the eviction actor could improve? Cheap: asked after every message.
    pub fn needs_eviction(&self) -> bool {
        let ahead = (self.pool.num_total() as f64 * self.config.swap_out_below).ceil() as usize;
        let short = self.available() + self.becoming_clean() < ahead.max(self.wanted);
        let tier_is_short =
            |tier: &TierState| tier.only.len() > 0 && tier.used - tier.leaving > tier.spec.capacity * 3 / 4;
        short && self.dirty.len() > 0 || self.tiers.iter().any(tier_is_short)
    }

    fn becoming_clean(&self) -> usize {
        self.moves.values().filter(|m| matches!(m.kind, CommandKind::SwapOut { .. })).count()
    }

    /// What the eviction actor decides by.
    pub fn pressure(&mut self) -> Pressure {
        let view = View { now: self.now, costs: &self.config.costs.chunk, returns: &self.returns };
        let dirty = self.dirty.victims(CANDIDATES, &view);
        let credits_of =
            |tier: &TierState| self.config.moves_in_flight.saturating_sub(tier.moves_in_flight).min(CANDIDATES);
        let victims: Vec<Vec<Victim>> =
            self.tiers.iter_mut().map(|tier| tier.only.victims(credits_of(tier), &view)).collect();
        let tiers = self.tiers.iter().zip(victims).enumerate().map(|(index, (tier, victims))| {
            let lower_has = |e: &ChunkEntry| {
                (index + 1..self.tiers.len()).any(|t| matches!(e.in_tier(TierIndex(t)), InTier::Present))
            };
            let credits = credits_of(tier);
            TierPressure {
                durable: tier.spec.durable,
                accepts: tier.accepts,
                credits,
                capacity: tier.spec.capacity,
                used: tier.used,
                leaving: tier.leaving,
                mirrors: self.candidates(tier.mirrors.latest(credits), lower_has),
                victims: self.candidates(victims.iter().map(|v| v.key), lower_has),
            }
        });
        let tiers = tiers.collect();
        Pressure {
            total_blocks: self.pool.num_total(),
            available: self.available(),
            wanted: self.wanted,
            becoming_clean: self.becoming_clean(),
            dirty: self.candidates(dirty.iter().map(|v| v.key), |_| false),
            tiers,
            swap_out_below: self.config.swap_out_below,
        }
    }

    fn candidates(
        &self,
        keys: impl IntoIterator<Item = ChunkKey>,
        backed: impl Fn(&ChunkEntry) -> bool,
    ) -> Vec<Candidate> {
        let view = self.view();
        let candidate = |key: ChunkKey| {
            let entry = self.directory.get(&key).expect("an indexed chunk has an entry");
            let chunk = entry.chunk_use(self.config.chunk_tokens);
            let next_use = self.queue.next_use(&key).filter(|_| self.config.protect_queued);
            Candidate {
                key,
                generation: entry.generation,
                durable: entry.durable,
                values: self.tiers.iter().map(|tier| tier.only.value(&key, &chunk, next_use, &view)).collect(),
                in_use: entry.refs() > 0,
                backed: backed(entry),
            }
        };
        keys.into_iter().map(candidate).collect()
    }

    /// Carries out what is still possible of the eviction actor's proposals; the others are stale and only counted.
    /// Returns how many were.
    pub fn accept(&mut self, proposals: &[Proposal]) -> usize {
        let accepted = proposals.iter().filter(|p| self.accept_one(**p)).count();
        self.counters.proposals_refused += (proposals.len() - accepted) as u64;
        accepted
    }

    fn accept_one(&mut self, proposal: Proposal) -> bool {
        let (key, generation) = match proposal {
            Proposal::SwapOut { key, generation, .. }
            | Proposal::Spill { key, generation, .. }
            | Proposal::Remove { key, generation, .. }
            | Proposal::Drop { key, generation } => (key, generation),
        };
        let Some(entry) = self.directory.get_mut(&key).filter(|e| e.generation == generation) else { return false };
        let position = entry.position;
        match proposal {
            Proposal::SwapOut { to, .. } => {
                if !entry.is_evictable() || entry.tail.is_some() || entry.in_tier(to) != InTier::Absent {
                    return false;
                }
                let block = entry.begin_swap_out(to);
                self.tiers[to.0].used += 1;
                self.issue(key, position, CommandKind::SwapOut { block, to });
            }
            Proposal::Spill { from, to, .. } => {
                if !entry.is_tier_idle(from) || entry.in_tier(to) != InTier::Absent {
                    return false;
                }
                entry.begin_copy(from, to);
                self.tiers[to.0].used += 1;
                self.issue(key, position, CommandKind::Spill { from, to });
            }
            Proposal::Remove { from, .. } => {
                if !entry.is_tier_idle(from) {
                    return false;
                }
                let was_last = entry.device() == OnDevice::Absent && self.num_copies(&key) == 1;
                self.counters.chunks_dropped += u64::from(was_last);
                self.begin_remove(&key, from);
            }
            Proposal::Drop { .. } => {
                if !entry.is_evictable() || entry.is_backed() {
                    return false;
                }
                self.counters.chunks_dropped += 1;
                let block = self.take_evictable(&key);
                self.pool.free(block);
            }
        }
        self.reindex(&key);
        true
    }

    fn num_copies(&self, key: &ChunkKey) -> usize {
        let entry = self.directory.get(key);
        let present =
            |e: &ChunkEntry| (0..self.tiers.len()).filter(|t| e.in_tier(TierIndex(*t)) == InTier::Present).count();
        entry.map_or(0, present)
    }

    pub(super) fn begin_remove(&mut self, key: &ChunkKey, from: TierIndex) {
        let entry = self.entry_mut(key);
        entry.begin_remove(from);
        let position = entry.position;
        self.tiers[from.0].leaving += 1;
        self.issue(*key, position, CommandKind::Remove { from });
    }

    /// A durable tier's chunks of an earlier run, least recently active first.
    pub fn recover(&mut self, tier: TierIndex, chunks: &[(ChunkKey, u32, Duration)]) {
        let num_tiers = self.tiers.len();
        for &(key, position, last_activity) in chunks {
            if self.directory.get(&key).is_none() {
                // Its parent is learned when a log with both is seen.
                self.directory.insert(key, ChunkEntry::new(key, position, num_tiers, last_activity));
            }
            let entry = self.entry_mut(&key);
            entry.durable = true;
            entry.recover(tier);
            self.tiers[tier.0].used += 1;
            self.reindex(&key);
        }
    }

    /// Before the end: copies chunks of stored turns to the durable tier that has none of them, the most recently active first, as
    /// far as its room and the credits reach. Call it again when moves have ended; `false`: there is nothing left to copy.
    pub fn save_chunks(&mut self) -> bool {
        let Some(to) = self.tiers.iter().position(|t| t.spec.durable && t.accepts).map(TierIndex) else { return false };
        let to_save = match self.to_save.take() {
            Some(keys) => keys,
            None => self.unsaved_chunks(to),
        };
        let tier = &self.tiers[to.0];
        let room = (tier.spec.capacity * 4 / 5).saturating_sub(tier.used);
        let credits = self.config.moves_in_flight.saturating_sub(tier.moves_in_flight);
        let num_now = room.min(credits).min(to_save.len());
        let (rest, now) = to_save.split_at(to_save.len() - num_now);
        for key in now.iter().rev() {
            let Some(entry) = self.directory.get(key) else { continue };
            let generation = entry.generation;
            let above = (0..to.0).map(TierIndex).find(|t| entry.is_tier_idle(*t));
            let proposal = match above {
                Some(from) => Proposal::Spill { key: *key, generation, from, to },
                None => Proposal::SwapOut { key: *key, generation, to },
            };
            self.accept_one(proposal);
        }
        let is_done = rest.is_empty() || room == 0;
        self.to_save = Some(if room == 0 { Vec::new() } else { rest.to_vec() });
        !is_done || num_now > 0
    }

    /// Chunks that a durable tier may take and has not, the most recently active last.
    fn unsaved_chunks(&self, to: TierIndex) -> Vec<ChunkKey> {
        let is_unsaved = |e: &ChunkEntry| e.durable && e.tail.is_none() && e.in_tier(to) == InTier::Absent;
        let mut chunks: Vec<_> =
            self.directory.iter().filter(|(_, e)| is_unsaved(e)).map(|(key, e)| (e.last_activity, *key)).collect();
        chunks.sort_unstable();
        chunks.into_iter().map(|(_, key)| key).collect()
    }

    /// A tier's own word on itself: whether it takes chunks, and how many fit in what its files leave.
    pub fn tier_reported(&mut self, tier: TierIndex, accepts: bool, capacity: usize) {
        let state = &mut self.tiers[tier.0];
        state.accepts = accepts;
        state.spec.capacity = capacity;
    }

    /// Puts a chunk into exactly the indexes that its state calls for.
    pub(super) fn reindex(&mut self, key: &ChunkKey) {
        self.forgetting.wake(key);
        self.directory.count_follower(key);
        let Some(entry) = self.directory.get(key) else { return };
        let next_use = self.queue.next_use(key);
        let (chunk, protection) =
            (entry.chunk_use(self.config.chunk_tokens), next_use.filter(|_| self.config.protect_queued));
        let is_clean = entry.is_clean();
        self.clean.set(key, entry, chunk, is_clean, protection);
        self.dirty.set(key, entry, chunk, entry.is_evictable() && !is_clean, protection);
        let on_device = entry.device() != OnDevice::Absent;
        for (index, tier) in self.tiers.iter_mut().enumerate() {
            let idle = entry.is_tier_idle(TierIndex(index));
            tier.only.set(key, entry, chunk, idle && !on_device, protection);
            tier.mirrors.set(key, entry, idle && on_device);
        }
        if next_use.is_some() {
            self.queue.set_held(key, entry.position, entry.is_readable());
        }
        self.directory.forget_if_gone(key);
    }

    pub(super) fn entry_mut(&mut self, key: &ChunkKey) -> &mut ChunkEntry {
        self.directory.get_mut(key).expect("a chunk that moves has an entry")
    }
}

/// The tiers whose credits a command holds. Loads hold none: the device's blocks bound them.
fn tiers_of(kind: CommandKind) -> Vec<TierIndex> {
    match kind {
        CommandKind::Load { .. } => vec![],
        CommandKind::Remove { from } => vec![from],
        CommandKind::SwapOut { to, .. } => vec![to],
        CommandKind::Spill { from, to } | CommandKind::Prefetch { from, to } => vec![from, to],
    }
}
