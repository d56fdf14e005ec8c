//! Filling a step: admission, decode rows, then prompts and holes within the token budget.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use keepsake_kernels::{BlockId, Entry};

use super::admission::{self, AdmissionPlan, Lane, Source};
use super::command::CommandKind;
use super::plan::{RowInput, Sample, SamplerStart, StepId, StepPlan};
use super::request::{SequenceId, SequenceUsage};
use super::scheduler::{InFlight, Scheduler};
use super::sequence::{Owner, Page};

impl Scheduler {
    /// The next step, or `None` when there is nothing to compute now or enough steps are in flight.
    pub fn plan(&mut self, now: Duration) -> Option<StepPlan> {
        if self.in_flight.len() >= self.config.steps_in_flight {
            return None;
        }
        self.now = now;
        self.wanted = 0;
        self.give_up_late_loads(now);
        self.admit_waiting(now);
        self.prefetch();
        let mut step = Builder::new(StepId(self.next_step), self.config.step_tokens);
        self.add_decode_rows(&mut step, now);
        self.add_prompt_rows(&mut step);
        if step.plan.num_rows() == 0 {
            return None;
        }
        self.next_step += 1;
        self.counters.num_steps += 1;
        step.plan.ends = std::mem::take(&mut self.ends);
        for (id, _) in &step.rows {
            self.sequence_mut(*id).num_steps += 1;
        }
        self.in_flight.push_back(InFlight { id: step.plan.id, rows: step.rows });
        Some(step.plan)
    }

    fn admit_waiting(&mut self, now: Duration) {
        while self.running.len() < self.config.max_running && self.prompt_backlog() < self.config.step_tokens {
            let Some(id) = self.queue.next(now) else { return };
            let plan = self.admission_plan(id);
            let usable = self.available().saturating_sub(plan.num_own_clean);
            let reserve = if self.running.is_empty() { 0 } else { self.reserved_blocks() };
            if plan.num_blocks + reserve > usable {
                self.wanted = self.wanted.max(plan.num_blocks + reserve + plan.num_own_clean);
                return;
            }
            self.leave_queue(id);
            self.admit(id, plan, now);
        }
    }

    /// Prompt tokens of running sequences that have still to be computed. A step's worth keeps the device busy; sequences beyond it
    /// would only hold empty blocks that are worth more as somebody's cache.
    fn prompt_backlog(&self) -> usize {
        self.running.iter().map(|id| self.sequences[id].holes.num_tokens()).sum()
    }

    fn admission_plan(&mut self, id: SequenceId) -> AdmissionPlan {
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence exists");
        let mut plan = admission::plan(sequence, &self.directory, self.config.chunk_tokens);
        let lanes: Vec<Lane> = self
            .tiers
            .iter()
            .zip(&self.config.costs.tiers)
            .map(|(tier, costs)| Lane { load: costs.load, busy: tier.loads_in_flight })
            .collect();
        // Somebody else could use the device: what is computed for one is time taken from another.
        let is_contended = self.queue.len() > 1 || !self.running.is_empty();
        admission::choose(&mut plan, &self.config.costs.chunk, &lanes, self.config.chunk_tokens, is_contended);
        plan
    }

    fn reserved_blocks(&self) -> usize {
        (self.pool.num_total() as f64 * self.config.reserve).ceil() as usize
    }

    fn admit(&mut self, id: SequenceId, plan: AdmissionPlan, now: Duration) {
        let chunk_tokens = self.config.chunk_tokens;
        let class = self.sequence(id).class;
        // Shared chunks and tails first: once they are in use, taking blocks cannot evict them.
        let mut tail_blocks = VecDeque::new();
        for source in &plan.sources {
            match *source {
                Source::Device(key) => self.acquire(&key, class, now),
                Source::Tail(key, _) => tail_blocks.push_back(self.take_evictable(&key)),
                Source::Load(..) | Source::Compute(..) | Source::Hole => {}
            }
        }
        let mut usage = SequenceUsage { loaded: vec![0; self.tiers.len()], ..SequenceUsage::default() };
        let (len, num_past) = {
            let sequence = self.sequence(id);
            (sequence.tokens.len(), if sequence.admitted_before { usize::MAX } else { sequence.request.num_past })
        };
        let mut pages = Vec::with_capacity(plan.sources.len());
        for (index, source) in plan.sources.iter().enumerate() {
            let range = index * chunk_tokens..((index + 1) * chunk_tokens).min(len);
            if let Source::Device(key) | Source::Load(key, _) = *source {
                let parent = self.sequence_mut(id).parent_key(index, chunk_tokens);
                self.directory.learn_parent(&key, parent);
            }
            pages.push(match *source {
                Source::Device(key) => {
                    let (block, loading_from) = self.device_block(&key);
                    match loading_from {
                        None => usage.device += range.len(),
                        Some(tier) => {
                            usage.loaded[tier.0] += range.len();
                            self.wait_for_load(id, index, key);
                        }
                    }
                    Page { block, owner: Owner::Shared(key) }
                }
                Source::Load(key, tier) => {
                    usage.loaded[tier.0] += range.len();
                    let block = self.start_load(id, key, tier, now);
                    self.counters.chunks_load_chosen[tier.0] += 1;
                    Page { block, owner: Owner::Shared(key) }
                }
                Source::Tail(_, rows) => {
                    // The last token is computed again even when its row is there: its logits are wanted.
                    let rows = rows.min(range.len() - 1);
                    usage.device += rows;
                    let compute = range.start + rows..range.end;
                    count_computed(&mut usage, compute.clone(), num_past);
                    self.sequence_mut(id).holes.push(compute);
                    let block = tail_blocks.pop_front().expect("taken above, in this order");
                    Page { block, owner: Owner::Private { rows } }
                }
                Source::Hole | Source::Compute(..) => {
                    if let Source::Compute(tier) = *source {
                        self.counters.chunks_compute_chosen[tier.0] += 1;
                    }
                    count_computed(&mut usage, range.clone(), num_past);
                    self.sequence_mut(id).holes.push(range);
                    let block = self.take_block().expect("admission counted the blocks");
                    Page { block, owner: Owner::Private { rows: 0 } }
                }
            });
        }
        let deadline = now + self.config.load_timeout;
        let sequence = self.sequence_mut(id);
        usage.queued = now.saturating_sub(sequence.arrived);
        sequence.pages = pages;
        sequence.load_deadline = deadline;
        sequence.admission = Some(usage);
        self.running.push(id);
        self.running.sort_unstable_by_key(|id| self.sequences[id].arrival_order());
    }

    fn add_decode_rows(&mut self, step: &mut Builder, now: Duration) {
        let ids: Vec<_> = self.running.clone();
        for id in ids {
            // A suspension in this loop may have taken it out.
            if step.budget == 0
                || !self.sequences.get(&id).is_some_and(|s| s.can_decode())
                || !self.running.contains(&id)
            {
                continue;
            }
            let position = self.sequence(id).planned_len() - 1;
            if !self.has_page(id, position, now) {
                continue;
            }
            let sequence = self.sequence(id);
            let input = match sequence.tokens.get(position) {
                Some(&token) => RowInput::Token(token),
                None => RowInput::Sampled(id),
            };
            let pages = &sequence.pages;
            let table = step.add_table(pages);
            step.add_rows(id, position..position + 1, |_| input, pages, table, self.config.chunk_tokens);
            step.add_sample(id, position + 1);
            self.sequence_mut(id).num_pending += 1;
        }
    }

    /// Makes sure that `position` has a slot; suspends the latest arrival when nothing else can give a block.
    fn has_page(&mut self, id: SequenceId, position: usize, now: Duration) -> bool {
        if position / self.config.chunk_tokens < self.sequence(id).pages.len() {
            return true;
        }
        loop {
            if let Some(block) = self.take_block() {
                self.sequence_mut(id).pages.push(Page { block, owner: Owner::Private { rows: 0 } });
                return true;
            }
            self.wanted = self.wanted.max(1);
            let relief_is_coming =
                self.dirty.len() > 0 || self.moves.values().any(|m| matches!(m.kind, CommandKind::SwapOut { .. }));
            if relief_is_coming {
                return false;
            }
            let latest = self.running.iter().rev().copied().find(|id| {
                let sequence = &self.sequences[id];
                sequence.num_steps == 0 && sequence.num_pending == 0
            });
            let Some(latest) = latest else { return false };
            self.suspend(latest, now);
            if latest == id {
                return false;
            }
        }
    }

    /// Gives a sequence's blocks up and puts it back at the queue's head; it goes on from its tokens later.
    pub(super) fn suspend(&mut self, id: SequenceId, now: Duration) {
        self.counters.num_suspensions += 1;
        self.release_pages(id, now);
        self.running.retain(|r| *r != id);
        let sequence = self.sequence_mut(id);
        sequence.admitted_before |= sequence.num_sampled > 0;
        sequence.is_lost = false;
        self.enqueue(id, true);
    }

    /// A sequence that a failed load left without a block goes back to the queue; a step in flight may still use its other blocks.
    pub(super) fn suspend_if_lost(&mut self, id: SequenceId, now: Duration) {
        let sequence = self.sequence(id);
        if sequence.is_lost && sequence.num_steps == 0 && sequence.finished.is_none() {
            self.suspend(id, now);
        }
    }

    fn add_prompt_rows(&mut self, step: &mut Builder) {
        for id in self.running.clone() {
            let chunk_tokens = self.config.chunk_tokens;
            let sequence = self.sequence_mut(id);
            if sequence.finished.is_some() || sequence.is_lost || sequence.holes.is_empty() {
                continue;
            }
            let computable = sequence.computable(chunk_tokens);
            let mut table = None;
            while step.budget > 0 {
                let Some(range) = self.sequence_mut(id).holes.take(step.budget, computable) else { break };
                self.charge(id, range.clone());
                let sequence = self.sequence(id);
                let table = *table.get_or_insert_with(|| step.add_table(&sequence.pages));
                let input = |position: usize| RowInput::Token(sequence.tokens[position]);
                step.add_rows(id, range, input, &sequence.pages, table, self.config.chunk_tokens);
            }
            if step.budget == 0 && table.is_none() {
                return;
            }
            let sequence = self.sequence_mut(id);
            if table.is_some() && sequence.holes.is_empty() {
                let len = sequence.tokens.len();
                sequence.num_pending += 1;
                let start = (sequence.num_sampled == 0).then(|| SamplerStart {
                    sequence: id,
                    params: sequence.request.sampling.clone(),
                    prompt: sequence.prompt(),
                });
                step.add_sample(id, len);
                step.plan.starts.extend(start);
            }
        }
    }
}

impl Scheduler {
    /// Counts device time for a tenant, so that others of the queue may go before it.
    fn charge(&mut self, id: SequenceId, rows: Range<usize>) {
        let tenant = self.sequence(id).tenant();
        let chunks = rows.len() as f64 / self.config.chunk_tokens as f64;
        let seconds = chunks * self.config.costs.chunk.at(rows.end as u32);
        self.queue.charge(tenant, seconds);
    }
}

/// Counts tokens that will be computed: again, up to `num_past`, or for the first time.
pub(super) fn count_computed(usage: &mut SequenceUsage, range: Range<usize>, num_past: usize) {
    let past = range.end.min(num_past).saturating_sub(range.start);
    usage.recomputed += past;
    usage.new += range.len() - past;
}

/// A step while it is being filled.
struct Builder {
    plan: StepPlan,
    rows: Vec<(SequenceId, Range<usize>)>,
    budget: usize,
}

impl Builder {
    fn new(id: StepId, budget: usize) -> Self {
        let plan = StepPlan {
            id,
            inputs: Vec::new(),
            positions: Vec::new(),
            slots: Vec::new(),
            entries: Vec::new(),
            block_table: Vec::new(),
            samples: Vec::new(),
            starts: Vec::new(),
            ends: Vec::new(),
        };
        Self { plan, rows: Vec::new(), budget }
    }

    /// Appends a sequence's page table; returns where it starts.
    fn add_table(&mut self, pages: &[Page]) -> u32 {
        let start = self.plan.block_table.len() as u32;
        self.plan.block_table.extend(pages.iter().map(|p| p.block));
        start
    }

    fn add_rows(
        &mut self,
        id: SequenceId,
        range: Range<usize>,
        input: impl Fn(usize) -> RowInput,
        pages: &[Page],
        table: u32,
        chunk_tokens: usize,
    ) {
        let first_row = self.plan.inputs.len() as u32;
        for position in range.clone() {
            let BlockId(block) = pages[position / chunk_tokens].block;
            self.plan.inputs.push(input(position));
            self.plan.positions.push(position as u32);
            self.plan.slots.push(block * chunk_tokens as u32 + (position % chunk_tokens) as u32);
        }
        self.plan.entries.push(Entry {
            first_row,
            num_rows: range.len() as u32,
            first_position: range.start as u32,
            first_block: table,
            num_blocks: range.end.div_ceil(chunk_tokens) as u32,
        });
        self.budget -= range.len();
        match self.rows.last_mut() {
            Some((last, rows)) if *last == id && rows.end == range.start => rows.end = range.end,
            _ => self.rows.push((id, range)),
        }
    }

    /// The row added last is sampled.
    fn add_sample(&mut self, sequence: SequenceId, position: usize) {
        let row = self.plan.inputs.len() as u32 - 1;
        self.plan.samples.push(Sample { row, sequence, position: position as u32 });
    }
}
