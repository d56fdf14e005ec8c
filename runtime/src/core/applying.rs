//! Taking a step's results: rows become K/V, full chunks become shared, samples become tokens, sequences end.

use std::time::Duration;

use keepsake_kernels::BlockId;
use keepsake_tiers::eviction::Class;
use keepsake_tiers::ChunkKey;

use super::command::TierIndex;
use super::directory::{ChunkEntry, OnDevice};
use super::plan::StepOutput;
use super::request::{FinishCause, SequenceEvent, SequenceId};
use super::scheduler::Scheduler;
use super::sequence::{Owner, Sequence};

impl Scheduler {
    /// Applies the oldest step in flight.
    pub fn apply(&mut self, output: &StepOutput, now: Duration) {
        self.now = now;
        let step = self.in_flight.pop_front().expect("a step was planned before it was run");
        assert_eq!(step.id, output.id, "steps end in the order they were planned");
        for (id, rows) in step.rows {
            let sequence = self.sequence_mut(id);
            sequence.num_steps -= 1;
            if sequence.finished.is_some() {
                self.counters.rows_wasted += rows.len() as u64;
                continue;
            }
            self.mark_computed(id, rows, now);
        }
        for &(id, token) in &output.tokens {
            // Retired meanwhile, when a stop found no step of it in flight.
            if self.sequences.get(&id).is_some_and(|s| s.finished.is_none()) {
                self.append(id, token);
            }
        }
        let ended: Vec<_> = self.running.iter().copied().filter(|id| self.sequence(*id).finished.is_some()).collect();
        for id in ended {
            self.retire_if_idle(id, now);
        }
        let lost: Vec<_> = self.running.iter().copied().filter(|id| self.sequence(*id).is_lost).collect();
        for id in lost {
            self.suspend_if_lost(id, now);
        }
    }

    fn mark_computed(&mut self, id: SequenceId, rows: std::ops::Range<usize>, now: Duration) {
        let chunk_tokens = self.config.chunk_tokens;
        for index in rows.start / chunk_tokens..rows.end.div_ceil(chunk_tokens) {
            let start = index * chunk_tokens;
            let computed = rows.end.min(start + chunk_tokens) - start;
            let page = &mut self.sequence_mut(id).pages[index];
            if let Owner::Private { rows } = &mut page.owner {
                *rows = (*rows).max(computed);
                if *rows == chunk_tokens {
                    self.publish(id, index, now);
                }
            }
        }
    }

    /// Makes a sequence's full private chunk known under its key, unless another got there first.
    fn publish(&mut self, id: SequenceId, index: usize, now: Duration) {
        if !self.config.reuse {
            return;
        }
        let chunk_tokens = self.config.chunk_tokens;
        let num_tiers = self.tiers.len();
        let sequence = self.sequences.get_mut(&id).expect("publishing for a running sequence");
        let key = sequence.key(index, chunk_tokens);
        let parent = sequence.parent_key(index, chunk_tokens);
        let durable = sequence.request.durable;
        let class = sequence.class;
        let page = &mut sequence.pages[index];
        if self.directory.get(&key).is_none() {
            self.directory.insert(key, ChunkEntry::new(parent, index as u32, num_tiers, now));
        }
        self.directory.learn_parent(&key, parent);
        let entry = self.directory.get_mut(&key).expect("inserted above");
        if entry.device() != OnDevice::Absent {
            return;
        }
        entry.publish(page.block);
        entry.acquire();
        entry.touch(now, class);
        entry.durable |= durable;
        page.owner = Owner::Shared(key);
        self.reindex(&key);
    }

    fn append(&mut self, id: SequenceId, token: u32) {
        let sequence = self.sequences.get_mut(&id).expect("checked by the caller");
        sequence.tokens.push(token);
        sequence.num_sampled += 1;
        sequence.num_pending -= 1;
        let admission = sequence.admission.take();
        let first = sequence.num_sampled == 1;
        let end = sequence.end_after(token);
        self.events.push(SequenceEvent::Sampled { id, token });
        self.counters.tokens_sampled += 1;
        if let Some(usage) = admission {
            self.counters.tokens_device += usage.device as u64;
            self.counters.tokens_recomputed += usage.recomputed as u64;
            self.counters.tokens_new += usage.new as u64;
            for (total, loaded) in self.counters.tokens_loaded.iter_mut().zip(&usage.loaded) {
                *total += *loaded as u64;
            }
            if first {
                self.sequence_mut(id).usage = usage;
            }
        }
        if let Some(cause) = end {
            self.sequence_mut(id).finished = Some(cause);
        }
    }

    /// Lets an ended sequence go once no step in flight reads or writes its blocks.
    pub(super) fn retire_if_idle(&mut self, id: SequenceId, now: Duration) {
        let sequence = self.sequence(id);
        if sequence.num_steps > 0 {
            return;
        }
        let cause = sequence.finished.unwrap_or(FinishCause::Stopped);
        self.release_pages(id, now);
        self.running.retain(|r| *r != id);
        self.leave_queue(id);
        let mut sequence = self.sequences.remove(&id).expect("looked up above");
        if sequence.num_sampled > 0 {
            self.pauses.begin(&mut sequence, self.config.chunk_tokens, &mut self.returns, now);
        }
        if sequence.num_sampled > 0 || sequence.admission.is_some() {
            self.ends.push(id);
        }
        self.events.push(SequenceEvent::Finished { id, cause, usage: sequence.usage });
    }

    /// Gives a sequence's pages up: shared chunks lose a reference, the last rows become a tail, the rest is freed.
    pub(super) fn release_pages(&mut self, id: SequenceId, now: Duration) {
        let chunk_tokens = self.config.chunk_tokens;
        let sequence = self.sequence_mut(id);
        let pages = std::mem::take(&mut sequence.pages);
        sequence.holes.clear();
        sequence.loading.clear();
        let durable = sequence.request.durable;
        let class = sequence.class;
        let kept = sequence.keep.min(sequence.tokens.len());
        for (index, page) in pages.iter().enumerate() {
            match page.owner {
                Owner::Shared(key) => {
                    self.stop_waiting(id, &key);
                    let entry = self.directory.get_mut(&key).expect("a shared page's chunk has an entry");
                    entry.release();
                    entry.touch(now, class);
                    entry.durable |= durable;
                    self.reindex(&key);
                }
                Owner::Private { rows } => {
                    let start = index * chunk_tokens;
                    let rows = rows.min(kept.saturating_sub(start));
                    let is_complete_before = pages[..index].iter().all(|p| match p.owner {
                        Owner::Shared(_) => true,
                        Owner::Private { rows } => rows == chunk_tokens,
                        Owner::Lost => false,
                    });
                    let is_tail = rows > 0 && rows < chunk_tokens && is_complete_before;
                    if !(is_tail && self.config.reuse && self.keep_tail(id, index, rows, page.block, now)) {
                        self.pool.free(page.block);
                    }
                }
                Owner::Lost => {}
            }
        }
    }

    /// Keeps the partial last chunk for the turn that continues this log. `false`: the same tail is there already.
    fn keep_tail(&mut self, id: SequenceId, index: usize, rows: usize, block: BlockId, now: Duration) -> bool {
        let chunk_tokens = self.config.chunk_tokens;
        let num_tiers = self.tiers.len();
        let sequence = self.sequence_mut(id);
        let class = sequence.class;
        let parent = sequence.parent_key(index, chunk_tokens);
        let start = index * chunk_tokens;
        let tokens = sequence.tokens[start..start + rows].to_vec();
        let key = parent.child(&tokens);
        if self.directory.get(&key).is_some() {
            return false;
        }
        let mut entry = ChunkEntry::new(parent, index as u32, num_tiers, now);
        entry.tail = Some(tokens);
        entry.touch(now, class);
        entry.publish(block);
        self.directory.insert(key, entry);
        self.reindex(&key);
        true
    }

    pub(super) fn sequence(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(&id).expect("a scheduled sequence exists until it retires")
    }

    pub(super) fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("a scheduled sequence exists until it retires")
    }

    pub(super) fn acquire(&mut self, key: &ChunkKey, class: Class, now: Duration) {
        let entry = self.directory.get_mut(key).expect("admission saw the chunk");
        entry.acquire();
        entry.touch(now, class);
        self.reindex(key);
    }

    /// The chunk's device block, and the tier whose load is still writing it.
    pub(super) fn device_block(&self, key: &ChunkKey) -> (BlockId, Option<TierIndex>) {
        match self.directory.get(key).expect("admission saw the chunk").device() {
            OnDevice::Resident(block) => (block, None),
            OnDevice::Loading { block, from } => (block, Some(from)),
            OnDevice::Absent => unreachable!("admission acquired the chunk"),
        }
    }
}
