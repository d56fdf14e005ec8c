//! Owns: the core. Receives: sequences from sessions, ends of steps and moves, eviction proposals, tier reports. Sends: `RunStep`,
//! `CarryOut`, `PressureRose`, `SequenceProgressed`. Never: blocks, decides, or touches K/V bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use actix::{Actor, AsyncContext, Context, Handler, MessageResult, Recipient, ResponseFuture};
use tokio::sync::oneshot;

use crate::core::{CommandKind, CoreCounters, Rejected, Scheduler, SequenceEvent, SequenceId};
use crate::messages::eviction::PressureRose;
use crate::messages::observe::Observe;
use crate::messages::scheduler::{
    Drain, ForgetChunks, MoveEnded, ProposeEvictions, SequenceProgressed, StepDone, StopSequence, SubmitSequence,
    TierReported,
};
use crate::messages::tier::CarryOut;
use crate::messages::worker::RunStep;
use crate::telemetry::metrics::{BlockCounts, Metrics};

/// How often late loads are looked for and gauges are set.
const TICK: Duration = Duration::from_millis(50);

/// Where the scheduler's messages go.
pub struct Wiring {
    pub worker: Recipient<RunStep>,
    /// In the order of the core's tiers.
    pub tiers: Vec<Recipient<CarryOut>>,
    pub eviction: Recipient<PressureRose>,
}

pub struct SchedulerActor {
    core: Scheduler,
    clock: Clock,
    wiring: Option<Wiring>,
    sessions: HashMap<SequenceId, Recipient<SequenceProgressed>>,
    /// A `PressureRose` is out.
    pressure_out: bool,
    /// The last proposals changed nothing: ask again only after something else did.
    eviction_stalled: bool,
    drained: Vec<oneshot::Sender<()>>,
    is_draining: bool,
    /// Time the device spent in steps.
    busy: Duration,
    /// What the metrics have counted so far.
    published: CoreCounters,
    metrics: Arc<Metrics>,
}

impl SchedulerActor {
    pub fn new(core: Scheduler, metrics: Arc<Metrics>) -> Self {
        Self {
            core,
            clock: Clock::start(),
            wiring: None,
            sessions: HashMap::new(),
            pressure_out: false,
            eviction_stalled: false,
            drained: Vec::new(),
            is_draining: false,
            busy: Duration::ZERO,
            published: CoreCounters::default(),
            metrics,
        }
    }

    /// Carries everything out that the last message made possible.
    fn pump(&mut self) {
        let Some(wiring) = &self.wiring else { return };
        let now = self.clock.now();
        while let Some(plan) = self.core.plan(now) {
            wiring.worker.do_send(RunStep(plan));
        }
        let is_saving = self.is_draining && self.core.num_sequences() == 0 && self.core.save_chunks();
        for command in self.core.drain_commands() {
            let tier = match command.kind {
                CommandKind::Load { from, .. } | CommandKind::Remove { from } => from,
                CommandKind::SwapOut { to, .. } | CommandKind::Spill { to, .. } | CommandKind::Prefetch { to, .. } => {
                    to
                }
            };
            wiring.tiers[tier.0].do_send(CarryOut(command));
        }
        if !self.is_draining && !self.pressure_out && !self.eviction_stalled && self.core.needs_eviction() {
            self.pressure_out = true;
            wiring.eviction.do_send(PressureRose(self.core.pressure()));
        }
        self.tell_sessions();
        if self.is_draining && !is_saving && self.core.is_idle() {
            for waiter in self.drained.drain(..) {
                // A waiter that gave up has passed its deadline.
                let _ = waiter.send(());
            }
        }
    }

    /// Sets the gauges, and counts on what the core has counted since the last time.
    fn publish(&mut self) {
        let gauges = self.core.gauges();
        let metrics = &self.metrics;
        metrics.num_requests_running.set(gauges.num_running as i64);
        metrics.num_requests_waiting.set(gauges.num_waiting as i64);
        let (free, clean, total) = (gauges.free_blocks, gauges.clean_blocks, gauges.total_blocks);
        metrics.set_blocks(BlockCounts { free, clean, used: total - free - clean, total });
        let counted = std::mem::replace(&mut self.published, gauges.counters);
        metrics.num_preemptions.inc_by(self.published.num_suspensions - counted.num_suspensions);
        metrics.kv_load_failures.inc_by(self.published.load_failures - counted.load_failures);
        metrics.chunks_dropped.inc_by(self.published.chunks_dropped - counted.chunks_dropped);
        metrics.chunks_prefetched.inc_by(self.published.chunks_prefetched - counted.chunks_prefetched);
        for (index, tier) in gauges.tiers.iter().enumerate() {
            let since = |now: &[u64], before: &[u64]| now[index] - before.get(index).copied().unwrap_or(0);
            let loaded = since(&self.published.chunks_load_chosen, &counted.chunks_load_chosen);
            let computed = since(&self.published.chunks_compute_chosen, &counted.chunks_compute_chosen);
            metrics.load_decisions(&tier.name, loaded, computed);
        }
        metrics.chunks_forgotten.inc_by(self.published.chunks_forgotten - counted.chunks_forgotten);
        metrics.pins.set(self.core.num_pins() as i64);
    }

    fn tell_sessions(&mut self) {
        let mut news: Vec<(SequenceId, Vec<SequenceEvent>)> = Vec::new();
        for event in self.core.drain_events() {
            let id = match &event {
                SequenceEvent::Sampled { id, .. } | SequenceEvent::Finished { id, .. } => *id,
            };
            match news.iter_mut().find(|(known, _)| *known == id) {
                Some((_, events)) => events.push(event),
                None => news.push((id, vec![event])),
            }
        }
        for (id, events) in news {
            let is_last = matches!(events.last(), Some(SequenceEvent::Finished { .. }));
            let Some(session) = self.sessions.get(&id) else { continue };
            session.do_send(SequenceProgressed(events));
            if is_last {
                self.sessions.remove(&id);
            }
        }
    }
}

impl Actor for SchedulerActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(TICK, |actor, _| {
            actor.eviction_stalled = false;
            actor.pump();
            actor.publish();
        });
    }
}

/// Connects the scheduler; sent once, by `app.rs`, before anything else.
#[derive(actix::Message)]
#[rtype(result = "()")]
pub struct Connect(pub Wiring);

impl Handler<Connect> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, Connect(wiring): Connect, _: &mut Self::Context) {
        self.wiring = Some(wiring);
    }
}

impl Handler<SubmitSequence> for SchedulerActor {
    type Result = Result<(), Rejected>;

    fn handle(&mut self, message: SubmitSequence, _: &mut Self::Context) -> Self::Result {
        let id = message.request.id;
        self.core.submit(message.request, self.clock.now())?;
        self.sessions.insert(id, message.events);
        self.eviction_stalled = false;
        self.pump();
        Ok(())
    }
}

impl Handler<StopSequence> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, StopSequence { id, keep }: StopSequence, _: &mut Self::Context) {
        self.core.stop(id, keep, self.clock.now());
        self.eviction_stalled = false;
        self.pump();
    }
}

impl Handler<ForgetChunks> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, message: ForgetChunks, _: &mut Self::Context) {
        self.core.forget(message.root, &message.tokens, message.keep_tokens, self.clock.now());
        self.eviction_stalled = false;
        self.pump();
    }
}

impl Handler<StepDone> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, StepDone { output, elapsed }: StepDone, _: &mut Self::Context) {
        self.core.apply(&output, self.clock.now());
        self.busy += elapsed;
        self.eviction_stalled = false;
        self.pump();
    }
}

impl Handler<MoveEnded> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, MoveEnded(done): MoveEnded, _: &mut Self::Context) {
        self.core.move_done(done, self.clock.now());
        self.eviction_stalled = false;
        self.pump();
    }
}

impl Handler<ProposeEvictions> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, ProposeEvictions(proposals): ProposeEvictions, _: &mut Self::Context) {
        self.pressure_out = false;
        self.eviction_stalled = self.core.accept(&proposals) == 0;
        self.pump();
    }
}

impl Handler<TierReported> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, report: TierReported, _: &mut Self::Context) {
        self.core.tier_reported(report.tier, report.accepts, report.capacity);
        self.pump();
    }
}

impl Handler<Drain> for SchedulerActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Drain, _: &mut Self::Context) -> Self::Result {
        let (sender, receiver) = oneshot::channel();
        self.is_draining = true;
        self.drained.push(sender);
        self.pump();
        Box::pin(async move {
            // The sender goes only with the actor, and then everything has ended.
            let _ = receiver.await;
        })
    }
}

impl Handler<Observe> for SchedulerActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let mut value = serde_json::to_value(self.core.snapshot()).unwrap_or_default();
        value["busy_seconds"] = self.busy.as_secs_f64().into();
        value["invariants"] = match self.core.check() {
            Ok(()) => "hold".into(),
            Err(broken) => broken.into(),
        };
        MessageResult(value)
    }
}

/// Time since the Unix epoch that never goes back.
struct Clock {
    epoch: Duration,
    started: Instant,
}

impl Clock {
    fn start() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { epoch, started: Instant::now() }
    }

    fn now(&self) -> Duration {
        self.epoch + self.started.elapsed()
    }
}
