//! Owns: one tier below the device. Receives: `CarryOut`. Sends: `MoveEnded`, `TierReported`. Never: chooses what moves.
//!
//! Reserving and pinning block, and so do removals, so they run on the tier's own thread; copies run on the mover's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use actix::{Actor, AsyncContext, Context, Handler, MessageResult, Recipient};
use crossbeam_channel::{bounded, Receiver, Sender};
use keepsake_kernels::KvLayout;
use keepsake_tiers::{
    ChunkMeta, DeviceTier, MoveError, MoveOutcome, MoveRequest, Mover, MoverPool, Pinned, Place, Tier, TierError,
};

use crate::core::{Command, CommandKind, MoveDone, MoveFault, TierIndex};
use crate::messages::observe::Observe;
use crate::messages::scheduler::{MoveEnded, TierReported};
use crate::messages::tier::CarryOut;
use crate::telemetry::metrics::Metrics;

/// Prefix of the threads' names; a panic on one ends the process.
pub const THREAD_PREFIX: &str = "tier-";

const REPORT_EVERY: Duration = Duration::from_secs(1);
/// A tier that refused is asked again after this: soon, but not so soon that refusals spin.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// What every tier's thread needs.
#[derive(Clone)]
pub struct TierParts {
    pub device: Arc<DeviceTier>,
    /// All tiers below the device, in the core's order: a spill reads one and writes another.
    pub tiers: Vec<Arc<dyn Tier>>,
    pub mover: Arc<MoverPool>,
    pub layout: KvLayout,
    pub layout_id: [u8; 16],
    pub load_timeout: Duration,
    pub ended: Recipient<MoveEnded>,
    pub reported: Recipient<TierReported>,
    pub metrics: Arc<Metrics>,
}

pub struct TierActor {
    index: TierIndex,
    tier: Arc<dyn Tier>,
    jobs: Sender<Job>,
    /// Set by a refused or failed write, until the next report.
    has_refused: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    num_commands: u64,
}

enum Job {
    CarryOut(Command),
    Report,
}

impl TierActor {
    /// Starts the tier's thread; `credits` is the number of commands that can be under way.
    pub fn start_thread(index: TierIndex, parts: TierParts, credits: usize) -> Self {
        let tier = Arc::clone(&parts.tiers[index.0]);
        // One place more than there are credits: for the report.
        let (jobs, queue) = bounded(credits + 1);
        let has_refused = Arc::new(AtomicBool::new(false));
        let worker = Worker { index, tier: Arc::clone(&tier), parts, has_refused: Arc::clone(&has_refused) };
        let thread = std::thread::Builder::new()
            .name(format!("{THREAD_PREFIX}{}", tier.name()))
            .spawn(move || worker.run(&queue))
            .expect("the operating system can start one more thread at start-up");
        Self { index, tier, jobs, has_refused, thread: Some(thread), num_commands: 0 }
    }
}

impl Actor for TierActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(REPORT_EVERY, |actor, _| {
            // With a full queue the report waits for the next round: the thread is busy and the numbers are changing.
            let _ = actor.jobs.try_send(Job::Report);
        });
        ctx.run_interval(ASK_AGAIN_AFTER, |actor, _| {
            if actor.has_refused.swap(false, Ordering::Relaxed) {
                let _ = actor.jobs.try_send(Job::Report);
            }
        });
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        let (closed, _) = bounded(0);
        self.jobs = closed;
        if let Some(thread) = self.thread.take() {
            // A panic there has ended the process already.
            let _ = thread.join();
        }
    }
}

impl Handler<CarryOut> for TierActor {
    type Result = ();

    fn handle(&mut self, CarryOut(command): CarryOut, _: &mut Self::Context) {
        self.num_commands += 1;
        self.jobs.try_send(Job::CarryOut(command)).expect("the scheduler holds a credit for every command");
    }
}

impl Handler<Observe> for TierActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let usage = self.tier.usage();
        MessageResult(serde_json::json!({
            "index": self.index.0,
            "name": self.tier.name(),
            "health": format!("{:?}", self.tier.health()),
            "chunks": usage.num_chunks,
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "physical_bytes": usage.physical_bytes,
            "commands": self.num_commands,
        }))
    }
}

struct Worker {
    index: TierIndex,
    tier: Arc<dyn Tier>,
    parts: TierParts,
    has_refused: Arc<AtomicBool>,
}

impl Worker {
    fn run(self, queue: &Receiver<Job>) {
        self.report();
        while let Ok(job) = queue.recv() {
            match job {
                Job::CarryOut(command) => self.carry_out(command),
                Job::Report => self.report(),
            }
        }
    }

    fn carry_out(&self, command: Command) {
        let device = &self.parts.device;
        let meta = self.meta(command.position);
        let key = command.key;
        let copy = match command.kind {
            CommandKind::Remove { .. } => {
                if let Err(error) = self.tier.remove(&key) {
                    tracing::warn!(tier = self.tier.name(), %key, %error, "removal failed; the entry is dropped all the same");
                }
                return self.end(command, Ok(()));
            }
            CommandKind::Load { block, .. } => {
                self.pin(self.index, command).map(|from| (from, device.adopt(block, key, meta)))
            }
            CommandKind::SwapOut { block, .. } => {
                self.reserve(command, &meta).map(|to| (device.lend(block, key, meta), to))
            }
            CommandKind::Spill { from, .. } | CommandKind::Prefetch { from, .. } => {
                self.reserve(command, &meta).and_then(|to| self.pin(from, command).map(|from| (from, to)))
            }
        };
        match copy {
            Ok((from, to)) => self.submit(command, from, to),
            Err(fault) => self.end(command, Err(fault)),
        }
    }

    fn pin(&self, from: TierIndex, command: Command) -> Result<Pinned, MoveFault> {
        match self.parts.tiers[from.0].pin(&command.key) {
            Ok(Some(pinned)) => Ok(pinned),
            Ok(None) => Err(MoveFault::Lost),
            Err(error) => Err(self.fault(command, &error)),
        }
    }

    fn reserve(&self, command: Command, meta: &ChunkMeta) -> Result<Place, MoveFault> {
        match self.tier.reserve(&command.key, meta) {
            Ok(Some(place)) => Ok(place),
            Ok(None) => Err(MoveFault::Full),
            Err(error) => Err(self.fault(command, &error)),
        }
    }

    fn fault(&self, command: Command, error: &TierError) -> MoveFault {
        tracing::warn!(tier = self.tier.name(), key = %command.key, %error, "move could not start");
        match error {
            TierError::Corrupt { .. } | TierError::Gone { .. } => MoveFault::Lost,
            TierError::Full { .. } | TierError::ReadOnly { .. } => MoveFault::Full,
            _ => MoveFault::Failed,
        }
    }

    fn submit(&self, command: Command, from: Pinned, to: Place) {
        let ended = self.parts.ended.clone();
        let metrics = Arc::clone(&self.parts.metrics);
        let has_refused = Arc::clone(&self.has_refused);
        let mut request = MoveRequest::new(from, to, move |outcome| {
            let result = result_of(&outcome);
            metrics.moved(&outcome.from, &outcome.to, name_of(result), outcome.bytes);
            note_refusal(&has_refused, result);
            ended.do_send(MoveEnded(MoveDone { id: command.id, result }));
        });
        if matches!(command.kind, CommandKind::Load { .. }) {
            request.deadline = Some(Instant::now() + self.parts.load_timeout);
        }
        if let Err(refused) = self.parts.mover.submit(request) {
            // Its queue holds more than all credits together, so it is closed: the server is ending.
            drop(refused);
            self.end(command, Err(MoveFault::Late));
        }
    }

    fn end(&self, command: Command, result: Result<(), MoveFault>) {
        note_refusal(&self.has_refused, result);
        self.parts.ended.do_send(MoveEnded(MoveDone { id: command.id, result }));
    }

    fn report(&self) {
        let usage = self.tier.usage();
        let health = self.tier.health();
        self.parts.metrics.set_tier(
            self.tier.name(),
            usage.capacity_bytes,
            usage.used_bytes,
            usage.num_chunks as usize,
        );
        let full_at = if usage.full_at_bytes > 0 { usage.full_at_bytes } else { usage.capacity_bytes };
        let per_chunk = match usage.num_chunks {
            0 => self.parts.layout.chunk_bytes() as u64,
            n => ((usage.used_bytes - usage.reserved_bytes) / n).max(1),
        };
        self.parts.reported.do_send(TierReported {
            tier: self.index,
            // Whether a chunk fits is the core's own count. A disk may still refuse, for what it has not given back yet; it is
            // asked all the same, since being asked is what makes it give space back.
            accepts: health.is_ok() && (!self.tier.capability().durable || usage.used_bytes < full_at),
            capacity: (usage.capacity_bytes / per_chunk) as usize,
        });
    }

    fn meta(&self, position: u32) -> ChunkMeta {
        ChunkMeta {
            position,
            num_tokens: self.parts.layout.chunk_tokens as u32,
            layout_id: self.parts.layout_id,
            bytes: self.parts.layout.chunk_bytes() as u64,
            last_activity_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        }
    }
}

fn note_refusal(has_refused: &AtomicBool, result: Result<(), MoveFault>) {
    if matches!(result, Err(MoveFault::Full | MoveFault::Failed)) {
        has_refused.store(true, Ordering::Relaxed);
    }
}

fn result_of(outcome: &MoveOutcome) -> Result<(), MoveFault> {
    let error = match &outcome.result {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    tracing::warn!(key = %outcome.key, from = %outcome.from, to = %outcome.to, %error, "move failed");
    Err(match error {
        MoveError::Corrupt(_) | MoveError::Missing(_) => MoveFault::Lost,
        MoveError::Full(_) => MoveFault::Full,
        MoveError::TimedOut | MoveError::Closed => MoveFault::Late,
        MoveError::Fault(_) => MoveFault::Failed,
    })
}

fn name_of(result: Result<(), MoveFault>) -> &'static str {
    match result {
        Ok(()) => "ok",
        Err(MoveFault::Full) => "full",
        Err(MoveFault::Lost) => "lost",
        Err(MoveFault::Late) => "late",
        Err(MoveFault::Failed) => "failed",
    }
}
