//! The scheduler: who runs, in which blocks, and what each step computes.
//!
//! `plan` and `apply` bracket a step; `move_done` and `accept` let tiers and the eviction actor in between. This file holds the state
//! and the requests' way in and out; `planning.rs` fills steps, `applying.rs` takes their results, `moving.rs` talks to tiers.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use keepsake_kernels::BlockId;
use keepsake_tiers::eviction::{policy, EvictionPolicy, ReturnTimes, View};
use keepsake_tiers::{BlockPool, ChunkKey, ChunkMap};

use super::command::{Command, CommandKind, MoveId};
use super::costs::Costs;
use super::directory::Directory;
use super::forgetting::Forgetting;
use super::index::{Index, Recency};
use super::pauses::Pauses;
use super::plan::StepId;
use super::queue::{Arrival, Queue, QueueOrder};
use super::request::{FinishCause, Rejected, SequenceEvent, SequenceId, SequenceRequest};
use super::sequence::Sequence;
use super::snapshot::CoreCounters;

/// Sizes and limits the core works within.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    pub chunk_tokens: usize,
    /// Longest token log, prompt and output together.
    pub max_context: usize,
    pub max_running: usize,
    pub max_waiting: usize,
    /// Rows in one step, decode rows included.
    pub step_tokens: usize,
    /// Fraction of blocks that admission leaves available for decoding.
    pub reserve: f64,
    /// Copy chunks down ahead of time below this fraction of available blocks.
    pub swap_out_below: f64,
    pub steps_in_flight: usize,
    /// A load that takes longer becomes a hole.
    pub load_timeout: Duration,
    /// Moves in flight towards or from one tier.
    pub moves_in_flight: usize,
    /// Keep chunks for later turns. Without it every turn computes its whole log: what a stateless server does, to compare with.
    pub reuse: bool,
    pub queue: QueueOrder,
    /// Chunks that queued sequences will use are given up after everybody else's.
    pub protect_queued: bool,
    pub device_policy: PolicyChoice,
    pub costs: Costs,
}

/// An eviction policy by name, and its cut-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyChoice {
    pub name: String,
    /// Chunks idle for longer go first.
    pub idle_cutoff: Option<Duration>,
}

/// A tier below the device.
#[derive(Clone, Debug)]
pub struct TierSpec {
    pub name: String,
    /// Chunks that fit.
    pub capacity: usize,
    pub durable: bool,
    pub policy: PolicyChoice,
}

pub(super) struct TierState {
    pub(super) spec: TierSpec,
    /// Chunks present, being written or being removed.
    pub(super) used: usize,
    pub(super) leaving: usize,
    pub(super) accepts: bool,
    pub(super) moves_in_flight: usize,
    /// Loads to the device under way: a new one queues behind them.
    pub(super) loads_in_flight: usize,
    /// Idle copies of chunks that are not on the device.
    pub(super) only: Index,
    /// Idle copies of chunks that are also on the device.
    pub(super) mirrors: Recency,
}

/// A planned step, until its result is applied.
pub(super) struct InFlight {
    pub(super) id: StepId,
    /// Rows by sequence, as token positions.
    pub(super) rows: Vec<(SequenceId, std::ops::Range<usize>)>,
}

pub struct Scheduler {
    pub(super) config: CoreConfig,
    pub(super) pool: Arc<BlockPool>,
    pub(super) directory: Directory,
    pub(super) tiers: Vec<TierState>,
    /// Unused device chunks whose block can be handed over without loss.
    pub(super) clean: Index,
    /// Unused device chunks without a copy below.
    pub(super) dirty: Index,
    pub(super) sequences: HashMap<SequenceId, Sequence>,
    pub(super) queue: Queue,
    /// In order of arrival.
    pub(super) running: Vec<SequenceId>,
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) moves: HashMap<MoveId, Command>,
    pub(super) returns: ReturnTimes,
    pub(super) pauses: Pauses,
    /// Who waits for a chunk's load.
    pub(super) waiters: ChunkMap<Vec<SequenceId>>,
    /// Blocks of abandoned loads, until the copy into them has ended.
    pub(super) orphans: HashMap<MoveId, BlockId>,
    /// Blocks that the queue's head or a decode row lacked in the last plan.
    pub(super) wanted: usize,
    /// What a shutdown has still to copy to the durable tier, once it has begun.
    pub(super) to_save: Option<Vec<ChunkKey>>,
    /// Logs on their way out.
    pub(super) forgetting: Forgetting,
    pub(super) commands: Vec<Command>,
    pub(super) events: Vec<SequenceEvent>,
    /// For the worker: sequences whose sampler state goes with the next step.
    pub(super) ends: Vec<SequenceId>,
    /// The latest time that any caller gave.
    pub(super) now: Duration,
    pub(super) next_move: u64,
    pub(super) next_step: u64,
    pub(super) counters: CoreCounters,
}

impl Scheduler {
    /// Policies are named in the configuration, which was checked when it was read.
    pub fn new(config: CoreConfig, pool: Arc<BlockPool>, tiers: Vec<TierSpec>) -> Self {
        let by_name = |choice: &PolicyChoice| {
            policy(&choice.name, choice.idle_cutoff).expect("the configuration names a known policy")
        };
        Self::with_policies(config, pool, tiers, by_name)
    }

    /// With policies of the caller's own: `make` is called once for each index of a tier's chunks.
    pub fn with_policies(
        config: CoreConfig,
        pool: Arc<BlockPool>,
        tiers: Vec<TierSpec>,
        make: impl Fn(&PolicyChoice) -> Box<dyn EvictionPolicy>,
    ) -> Self {
        let counters = CoreCounters::of_tiers(tiers.len());
        let tiers = tiers
            .into_iter()
            .map(|spec| TierState {
                only: Index::new(make(&spec.policy)),
                mirrors: Recency::default(),
                spec,
                used: 0,
                leaving: 0,
                accepts: true,
                moves_in_flight: 0,
                loads_in_flight: 0,
            })
            .collect();
        Self {
            clean: Index::new(make(&config.device_policy)),
            dirty: Index::new(make(&config.device_policy)),
            queue: Queue::new(config.queue),
            config,
            pool,
            directory: Directory::default(),
            tiers,
            sequences: HashMap::new(),
            running: Vec::new(),
            in_flight: VecDeque::new(),
            moves: HashMap::new(),
            returns: ReturnTimes::default(),
            pauses: Pauses::default(),
            waiters: ChunkMap::default(),
            orphans: HashMap::new(),
            wanted: 0,
            to_save: None,
            forgetting: Forgetting::default(),
            commands: Vec::new(),
            events: Vec::new(),
            ends: Vec::new(),
            now: Duration::ZERO,
            next_move: 0,
            next_step: 0,
            counters,
        }
    }

    pub(super) fn view(&self) -> View<'_> {
        View { now: self.now, costs: &self.config.costs.chunk, returns: &self.returns }
    }

    /// The longest log that can run: the model's context, or all blocks of the device.
    pub fn limit(&self) -> usize {
        self.config.max_context.min(self.pool.num_total() * self.config.chunk_tokens)
    }

    /// Queues a sequence. Output is clipped to what the limit leaves.
    pub fn submit(&mut self, mut request: SequenceRequest, now: Duration) -> Result<(), Rejected> {
        self.now = now;
        debug_assert!(!request.tokens.is_empty() && request.max_new_tokens > 0);
        let limit = self.limit();
        if request.tokens.len() >= limit {
            return Err(Rejected::TooLong { limit });
        }
        if self.queue.len() >= self.config.max_waiting {
            self.counters.num_rejected += 1;
            return Err(Rejected::QueueFull);
        }
        request.max_new_tokens = request.max_new_tokens.min(limit - request.tokens.len());
        let id = request.id;
        let mut sequence = Sequence::new(request, now);
        sequence.class = self.pauses.end(&mut sequence, self.config.chunk_tokens, &mut self.returns, now);
        let earlier = self.sequences.insert(id, sequence);
        debug_assert!(earlier.is_none(), "a sequence id is used once");
        self.enqueue(id, false);
        Ok(())
    }

    /// Puts a sequence into the queue; the chunks it will use are evicted after everybody else's.
    pub(super) fn enqueue(&mut self, id: SequenceId, resumes: bool) {
        let chunk_tokens = self.config.chunk_tokens;
        let sequence = self.sequences.get_mut(&id).expect("a sequence is known before it waits");
        let num_shareable = (sequence.tokens.len() - 1) / chunk_tokens;
        let seconds = |index: usize| self.config.costs.chunk.at(((index + 1) * chunk_tokens) as u32);
        let chunks: Vec<(ChunkKey, f64)> =
            (0..num_shareable).map(|index| (sequence.key(index, chunk_tokens), seconds(index))).collect();
        let keys: Vec<ChunkKey> = chunks.iter().map(|(key, _)| *key).collect();
        let arrival = Arrival {
            id,
            arrived: sequence.arrived,
            tenant: sequence.tenant(),
            weight: sequence.request.weight,
            resumes,
            chunks,
            rest: seconds(num_shareable),
        };
        let directory = &self.directory;
        self.queue.push(arrival, |key| directory.get(key).is_some_and(|entry| entry.is_readable()));
        for key in keys {
            self.reindex(&key);
        }
    }

    pub(super) fn leave_queue(&mut self, id: SequenceId) {
        for key in self.queue.remove(id).unwrap_or_default() {
            self.reindex(&key);
        }
    }

    /// Ends a sequence early; its log is cut to `keep` tokens. Unknown and ended sequences are ignored: the stop came too late.
    pub fn stop(&mut self, id: SequenceId, keep: usize, now: Duration) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if sequence.finished.is_some() {
            return;
        }
        sequence.finished = Some(FinishCause::Stopped);
        sequence.keep = keep;
        self.retire_if_idle(id, now);
    }

    /// What happened to sequences since the last call.
    pub fn drain_events(&mut self) -> Vec<SequenceEvent> {
        std::mem::take(&mut self.events)
    }

    /// What tiers have to do, loads first: a swap-in before a swap-out, since both directions at once slow each other down, and disk
    /// reads before disk writes.
    pub fn drain_commands(&mut self) -> Vec<Command> {
        self.go_on_forgetting();
        let mut commands = std::mem::take(&mut self.commands);
        commands.sort_by_key(|c| match c.kind {
            CommandKind::Load { .. } => 0,
            CommandKind::Prefetch { .. } => 1,
            CommandKind::SwapOut { .. } | CommandKind::Spill { .. } | CommandKind::Remove { .. } => 2,
        });
        commands
    }

    /// Nothing runs, waits, moves or is to go.
    pub fn is_idle(&self) -> bool {
        let is_still = self.moves.is_empty() && self.in_flight.is_empty() && self.forgetting.is_empty();
        self.sequences.is_empty() && is_still
    }

    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    pub fn counters(&self) -> &CoreCounters {
        &self.counters
    }

    /// Rows of the step planned last, by sequence, as token positions: what a simulated device charges for.
    pub fn planned_rows(&self) -> &[(SequenceId, std::ops::Range<usize>)] {
        self.in_flight.back().map_or(&[], |step| &step.rows)
    }

    pub fn steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }
}
