//! The scheduler: who runs, in which blocks, and what each step computes.
//!
//! `plan` and `apply` bracket a step; `move_done` and `accept` let tiers and the eviction actor in between. This file holds the state
//! and the requests' way in and out; `planning.rs` fills steps, `applying.rs` takes their results, `moving.rs` talks to tiers.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use keepsake_kernels::BlockId;
use keepsake_tiers::{BlockPool, ChunkKey};

use super::command::{Command, MoveId};
use super::costs::Costs;
use super::directory::Directory;
use super::forgetting::Forgetting;
use super::index::{Index, Recency};
use super::plan::StepId;
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
    pub device_policy: String,
    /// What work costs on the device in use.
    pub costs: Costs,
}

/// A tier below the device.
#[derive(Clone, Debug)]
pub struct TierSpec {
    pub name: String,
    /// Chunks that fit.
    pub capacity: usize,
    pub durable: bool,
    pub policy: String,
}

pub(super) struct TierState {
    pub(super) spec: TierSpec,
    /// Chunks present, being written or being removed.
    pub(super) used: usize,
    pub(super) leaving: usize,
    pub(super) accepts: bool,
    pub(super) moves_in_flight: usize,
    /// Idle copies of chunks that are not on the device.
    pub(super) only: Index,
    /// Idle copies of chunks that are also on the device; stays empty for a durable tier, whose copies outlive the device.
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
    pub(super) waiting: VecDeque<SequenceId>,
    /// In order of arrival.
    pub(super) running: Vec<SequenceId>,
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) moves: HashMap<MoveId, Command>,
    /// Who waits for a chunk's load.
    pub(super) waiters: HashMap<ChunkKey, Vec<SequenceId>>,
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
    pub fn new(config: CoreConfig, pool: Arc<BlockPool>, tiers: Vec<TierSpec>) -> Self {
        let counters = CoreCounters { tokens_loaded: vec![0; tiers.len()], ..CoreCounters::default() };
        let tiers = tiers
            .into_iter()
            .map(|spec| TierState {
                only: Index::new(&spec.policy, config.chunk_tokens),
                mirrors: Recency::default(),
                spec,
                used: 0,
                leaving: 0,
                accepts: true,
                moves_in_flight: 0,
            })
            .collect();
        Self {
            clean: Index::new(&config.device_policy, config.chunk_tokens),
            dirty: Index::new(&config.device_policy, config.chunk_tokens),
            config,
            pool,
            directory: Directory::default(),
            tiers,
            sequences: HashMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            in_flight: VecDeque::new(),
            moves: HashMap::new(),
            waiters: HashMap::new(),
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
        if self.waiting.len() >= self.config.max_waiting {
            self.counters.num_rejected += 1;
            return Err(Rejected::QueueFull);
        }
        request.max_new_tokens = request.max_new_tokens.min(limit - request.tokens.len());
        let id = request.id;
        self.waiting.push_back(id);
        let earlier = self.sequences.insert(id, Sequence::new(request, now));
        debug_assert!(earlier.is_none(), "a sequence id is used once");
        Ok(())
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

    /// What tiers have to do, loads first: a swap-in before a swap-out, since both directions at once slow each other down.
    pub fn drain_commands(&mut self) -> Vec<Command> {
        self.go_on_forgetting();
        let mut commands = std::mem::take(&mut self.commands);
        commands.sort_by_key(|c| !matches!(c.kind, super::CommandKind::Load { .. }));
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

    pub fn steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }
}
