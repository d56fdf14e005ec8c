//! A simulated device, simulated tiers and a clock that the test turns.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use keepsake_model::sampler::SamplingParams;
use keepsake_tiers::{BlockPool, ChunkKey};

use crate::core::*;

pub(super) const CHUNK: usize = 4;
pub(super) const ROOT: ChunkKey = ChunkKey([7; 16]);

/// One token's K/V: the token, and a hash of everything up to it.
type Slot = (u32, u64);

/// What the model would say after this prefix.
fn reply_token(hash: u64) -> u32 {
    (hash % 1_000) as u32 + 1
}

fn extend(hash: u64, token: u32) -> u64 {
    (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) ^ 0x5851_F42D
}

/// The reply of a server with room for everything.
pub(super) fn expected_reply(prompt: &[u32], len: usize) -> Vec<u32> {
    let mut hash = prompt.iter().fold(0, |h, t| extend(h, *t));
    let mut reply = Vec::new();
    for _ in 0..len {
        let token = reply_token(hash);
        reply.push(token);
        hash = extend(hash, token);
    }
    reply
}

pub(super) fn config() -> CoreConfig {
    CoreConfig {
        chunk_tokens: CHUNK,
        max_context: 10_000,
        max_running: 8,
        max_waiting: 100,
        step_tokens: 16,
        reserve: 0.1,
        swap_out_below: 0.25,
        steps_in_flight: 1,
        load_timeout: Duration::from_secs(5),
        moves_in_flight: 8,
        reuse: true,
        protect_queued: true,
        queue: QueueOrder::CacheAware { age_bound: Duration::from_secs(30) },
        device_policy: lru(),
        costs: Costs::unmeasured(2),
    }
}

pub(super) fn lru() -> PolicyChoice {
    PolicyChoice { name: "lru".to_owned(), idle_cutoff: None }
}

pub(super) fn tier(name: &str, capacity: usize, durable: bool) -> TierSpec {
    TierSpec { name: name.to_owned(), capacity, durable, policy: lru() }
}

/// How moves behave.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// One load in so many fails; 0: none.
    pub(super) load_every: u64,
    /// One write in so many fails.
    pub(super) write_every: u64,
    pub(super) delay: Duration,
}

pub(super) struct Harness {
    pub(super) core: Scheduler,
    pub(super) now: Duration,
    pub(super) faults: Faults,
    slots: Vec<Option<Slot>>,
    tiers: Vec<HashMap<ChunkKey, Vec<Option<Slot>>>>,
    /// Moves by their end.
    moving: BTreeMap<(Duration, u64), Command>,
    steps: VecDeque<StepPlan>,
    last: HashMap<SequenceId, u32>,
    num_loads: u64,
    num_writes: u64,
    pub(super) replies: HashMap<SequenceId, Vec<u32>>,
    pub(super) finished: HashMap<SequenceId, (FinishCause, SequenceUsage)>,
    next_id: u64,
}

impl Harness {
    pub(super) fn new(config: CoreConfig, num_blocks: usize, tiers: Vec<TierSpec>) -> Self {
        let num_tiers = tiers.len();
        Self {
            core: Scheduler::new(config, Arc::new(BlockPool::new(num_blocks)), tiers),
            now: Duration::from_secs(1_000),
            faults: Faults::default(),
            slots: vec![None; num_blocks * CHUNK],
            tiers: vec![HashMap::new(); num_tiers],
            moving: BTreeMap::new(),
            steps: VecDeque::new(),
            last: HashMap::new(),
            num_loads: 0,
            num_writes: 0,
            replies: HashMap::new(),
            finished: HashMap::new(),
            next_id: 0,
        }
    }

    pub(super) fn submit(&mut self, tokens: &[u32], num_past: usize, len: usize) -> Result<SequenceId, Rejected> {
        self.submit_with(tokens, num_past, len, true)
    }

    pub(super) fn submit_with(
        &mut self,
        tokens: &[u32],
        num_past: usize,
        max_new_tokens: usize,
        durable: bool,
    ) -> Result<SequenceId, Rejected> {
        let request = SequenceRequest { num_past, durable, ..self.request(tokens, max_new_tokens) };
        self.submit_request(request)
    }

    /// As another tenant, with a weight of its own.
    pub(super) fn submit_as(
        &mut self,
        tenant: u8,
        weight: f64,
        tokens: &[u32],
        max_new_tokens: usize,
    ) -> Result<SequenceId, Rejected> {
        let request = SequenceRequest { root: ChunkKey([tenant; 16]), weight, ..self.request(tokens, max_new_tokens) };
        self.submit_request(request)
    }

    fn request(&mut self, tokens: &[u32], max_new_tokens: usize) -> SequenceRequest {
        self.next_id += 1;
        SequenceRequest {
            id: SequenceId(self.next_id - 1),
            root: ROOT,
            weight: 1.0,
            tokens: tokens.to_vec(),
            num_past: 0,
            durable: true,
            max_new_tokens,
            end_tokens: Arc::new(HashSet::new()),
            min_new_tokens: 0,
            sampling: SamplingParams::default(),
        }
    }

    fn submit_request(&mut self, request: SequenceRequest) -> Result<SequenceId, Rejected> {
        let id = request.id;
        self.core.submit(request, self.now)?;
        self.replies.insert(id, Vec::new());
        Ok(id)
    }

    pub(super) fn forget(&mut self, log: &[u32], keep_tokens: usize) {
        self.core.forget(ROOT, log, keep_tokens, self.now);
    }

    /// A new core over what the durable tiers hold.
    pub(super) fn restart(self, config: CoreConfig, num_blocks: usize, tiers: Vec<TierSpec>) -> Self {
        let mut next = Self::new(config, num_blocks, tiers);
        next.now = self.now;
        for (index, held) in self.tiers.into_iter().enumerate() {
            let chunks: Vec<_> = held.keys().map(|key| (*key, 0, next.now)).collect();
            next.core.recover(TierIndex(index), &chunks);
            next.tiers[index] = held;
        }
        next
    }

    /// At rest, with nothing kept anywhere.
    pub(super) fn assert_empty(&self) {
        let gauges = self.core.gauges();
        assert_eq!((gauges.num_chunks, gauges.free_blocks), (0, gauges.total_blocks), "{gauges:?}");
        assert!(gauges.tiers.iter().all(|tier| tier.num_chunks == 0), "{gauges:?}");
        assert!(self.tiers.iter().all(HashMap::is_empty), "a tier holds what the directory has forgotten");
    }

    /// One round: plan, run a step, end moves that are due, evict. Returns whether anything happened.
    pub(super) fn turn(&mut self) -> bool {
        self.now += Duration::from_millis(10);
        let mut busy = false;
        while let Some(plan) = self.core.plan(self.now) {
            self.steps.push_back(plan);
            busy = true;
        }
        self.start_moves();
        if let Some(plan) = self.steps.pop_front() {
            let output = self.run(&plan);
            self.core.apply(&output, self.now);
            busy = true;
        }
        busy |= self.end_moves();
        if self.core.needs_eviction() {
            let proposals = decide(&self.core.pressure());
            busy |= self.core.accept(&proposals) > 0;
        }
        self.start_moves();
        for event in self.core.drain_events() {
            match event {
                SequenceEvent::Sampled { id, token } => self.replies.get_mut(&id).expect("submitted").push(token),
                SequenceEvent::Finished { id, cause, usage } => {
                    self.finished.insert(id, (cause, usage));
                }
            }
        }
        self.core.check().expect("invariants hold");
        busy || !self.moving.is_empty()
    }

    /// Plans a step that the next turn will run.
    pub(super) fn plan_only(&mut self) {
        let plan = self.core.plan(self.now).expect("there is something to run");
        self.steps.push_back(plan);
    }

    /// Turns until nothing runs, waits or moves.
    pub(super) fn settle(&mut self) {
        for _ in 0..20_000 {
            let busy = self.turn();
            if !busy && self.core.is_idle() {
                return;
            }
        }
        panic!("never came to rest: {:?}", self.core.snapshot());
    }

    pub(super) fn turns(&mut self, n: usize) {
        for _ in 0..n {
            self.turn();
        }
    }

    /// Submits, runs to the end, and checks the reply against the reference.
    pub(super) fn converse(&mut self, tokens: &[u32], num_past: usize, len: usize) -> (Vec<u32>, SequenceUsage) {
        let id = self.submit(tokens, num_past, len).expect("accepted");
        self.settle();
        let reply = self.replies[&id].clone();
        assert_eq!(reply, expected_reply(tokens, len));
        (reply, self.finished[&id].1.clone())
    }

    /// Different chunks anywhere, and those that are both on the device and in the first tier.
    pub(super) fn held_and_mirrored(&self) -> (usize, usize) {
        let snapshot = self.core.snapshot();
        let held = snapshot.gauges.num_chunks;
        let places = snapshot.resident_blocks + self.tiers[0].len();
        (held, places.saturating_sub(held))
    }

    /// Full chunks anywhere.
    pub(super) fn num_full_chunks(&self) -> usize {
        self.core.num_full_chunks()
    }

    fn run(&mut self, plan: &StepPlan) -> StepOutput {
        for id in &plan.ends {
            self.last.remove(id);
        }
        let mut hashes = vec![0; plan.num_rows()];
        for entry in &plan.entries {
            let table = &plan.block_table[entry.first_block as usize..][..entry.num_blocks as usize];
            let slot_of = |position: usize| table[position / CHUNK].0 as usize * CHUNK + position % CHUNK;
            for offset in 0..entry.num_rows as usize {
                let row = entry.first_row as usize + offset;
                let position = entry.first_position as usize + offset;
                assert_eq!(plan.positions[row] as usize, position);
                assert_eq!(plan.slots[row] as usize, slot_of(position));
                let token = match plan.inputs[row] {
                    RowInput::Token(token) => token,
                    RowInput::Sampled(id) => self.last[&id],
                };
                // Attention reads every key before the row: all must be there, and belong to one prefix.
                let before = (0..position).fold(0, |hash, p| {
                    let (token, stored) = self.slots[slot_of(p)].expect("a key that was never written");
                    let hash = extend(hash, token);
                    assert_eq!(hash, stored, "position {p} holds another prefix's K/V");
                    hash
                });
                hashes[row] = extend(before, token);
                self.slots[slot_of(position)] = Some((token, hashes[row]));
            }
        }
        let tokens = plan.samples.iter().map(|s| (s.sequence, reply_token(hashes[s.row as usize]))).collect::<Vec<_>>();
        self.last.extend(tokens.iter().copied());
        StepOutput { id: plan.id, tokens }
    }

    fn start_moves(&mut self) {
        for command in self.core.drain_commands() {
            self.moving.insert((self.now + self.faults.delay, command.id.0), command);
        }
    }

    fn end_moves(&mut self) -> bool {
        let due: Vec<_> = self.moving.range(..=(self.now, u64::MAX)).map(|(at, c)| (*at, *c)).collect();
        for (at, command) in &due {
            self.moving.remove(at);
            let result = self.carry_out(command);
            self.core.move_done(MoveDone { id: command.id, result }, self.now);
        }
        !due.is_empty()
    }

    fn carry_out(&mut self, command: &Command) -> Result<(), MoveFault> {
        let key = command.key;
        let slots_of = |block: keepsake_kernels::BlockId| block.0 as usize * CHUNK..(block.0 as usize + 1) * CHUNK;
        match command.kind {
            CommandKind::Load { from, block } => {
                self.num_loads += 1;
                if self.faults.load_every > 0 && self.num_loads.is_multiple_of(self.faults.load_every) {
                    // The copy stopped half way: the block holds rubbish.
                    self.slots[slots_of(block)].fill(Some((0, 0)));
                    return Err(if self.num_loads.is_multiple_of(2) {
                        MoveFault::Failed
                    } else {
                        self.drop_copy(from, &key)
                    });
                }
                let chunk = self.tiers[from.0].get(&key).expect("the directory said it is there").clone();
                self.slots[slots_of(block)].copy_from_slice(&chunk);
                Ok(())
            }
            CommandKind::SwapOut { block, to } => {
                let chunk = self.slots[slots_of(block)].to_vec();
                self.write(to, key, chunk)
            }
            CommandKind::Spill { from, to } | CommandKind::Prefetch { from, to } => {
                let chunk = self.tiers[from.0].get(&key).expect("the directory said it is there").clone();
                self.write(to, key, chunk)
            }
            CommandKind::Remove { from } => {
                self.tiers[from.0].remove(&key).expect("the directory said it is there");
                Ok(())
            }
        }
    }

    fn drop_copy(&mut self, from: TierIndex, key: &ChunkKey) -> MoveFault {
        self.tiers[from.0].remove(key);
        MoveFault::Lost
    }

    fn write(&mut self, to: TierIndex, key: ChunkKey, chunk: Vec<Option<Slot>>) -> Result<(), MoveFault> {
        self.num_writes += 1;
        if self.faults.write_every > 0 && self.num_writes.is_multiple_of(self.faults.write_every) {
            return Err(MoveFault::Failed);
        }
        assert!(chunk.iter().all(Option::is_some), "only full chunks leave the device");
        let earlier = self.tiers[to.0].insert(key, chunk);
        assert!(earlier.is_none(), "the directory knew that it is there");
        Ok(())
    }
}
