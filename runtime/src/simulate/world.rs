//! One run: the core, a device, lanes and users, on a clock that jumps from event to event.
//!
//! Owns: the core and the order of events. The loop is the scheduler actor's own: after whatever happened at one moment, plan steps,
//! carry out commands, ask the eviction rules while they help, and tell the users.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use keepsake_tiers::BlockPool;

use crate::core::{
    decide, Command, MoveDone, Rejected, Scheduler, SequenceEvent, SequenceId, SequenceUsage, StepOutput, StepPlan,
};

use super::clairvoyant::{self, SharedOracle};
use super::lanes::Lanes;
use super::prices::Prices;
use super::report::Report;
use super::request::Requests;
use super::settings::Settings;
use super::tally::Tally;
use super::traffic::{Traffic, Turn};
use super::SimulateError;

/// Something whose time has come.
enum Event {
    Arrival(Arrival),
    StepEnd,
    MoveEnd(Command),
}

/// A turn on its way in, again after each refusal.
struct Arrival {
    turn: Turn,
    first_sent: Duration,
    num_refusals: u32,
}

struct Timed {
    at: Duration,
    /// Of events at one moment, the one that was known first comes first.
    order: u64,
    event: Event,
}

/// A turn in the core.
struct Live {
    turn: Turn,
    sent: Duration,
    /// Rows before this position had K/V once, here or in earlier turns.
    computed: usize,
    is_counted: bool,
    has_token: bool,
}

/// A planned step, waiting for the device or on it.
struct Step {
    output: StepOutput,
    length: Duration,
}

pub(super) struct World<'a> {
    settings: &'a Settings,
    core: Scheduler,
    traffic: Box<dyn Traffic>,
    prices: Arc<Prices>,
    lanes: Lanes,
    requests: Requests,
    oracle: Option<SharedOracle>,
    now: Duration,
    events: BinaryHeap<Reverse<Timed>>,
    num_events: u64,
    /// The first one is on the device.
    steps: VecDeque<Step>,
    /// By sequence id.
    live: Vec<Option<Live>>,
    num_live: usize,
    /// The last proposals changed nothing: ask again only after something else did.
    eviction_stalled: bool,
    tally: Tally,
}

impl<'a> World<'a> {
    pub(super) fn new(settings: &'a Settings, traffic: Box<dyn Traffic>) -> Self {
        let max_context = settings.max_context.min(traffic.max_context() + 1);
        let (tiers, costs) = settings.existing_tiers();
        let prices = Arc::new(Prices::new(&costs, settings.chunk_tokens, max_context));
        let oracle =
            settings.is_clairvoyant().then(|| clairvoyant::Oracle::shared(settings.chunk_tokens, prices.clone()));
        let config = settings.core_config(costs.clone());
        let pool = Arc::new(BlockPool::new(settings.device_chunks));
        Self {
            lanes: Lanes::new(&costs, tiers.len()),
            tally: Tally::new(tiers.len()),
            core: Scheduler::with_policies(config, pool, tiers, |name| clairvoyant::make(name, oracle.as_ref())),
            settings,
            traffic,
            prices,
            requests: Requests::new(),
            oracle,
            now: Duration::ZERO,
            events: BinaryHeap::new(),
            num_events: 0,
            steps: VecDeque::new(),
            live: Vec::new(),
            num_live: 0,
            eviction_stalled: false,
        }
    }

    /// Plays all events.
    pub(super) fn run(&mut self) -> Result<(), SimulateError> {
        for (at, turn) in self.traffic.start() {
            self.send(at, turn);
        }
        let mut num_rounds = 0;
        while let Some(Reverse(next)) = self.events.pop() {
            self.advance(next.at);
            self.happen(next.event);
            while self.events.peek().is_some_and(|Reverse(other)| other.at == self.now) {
                let Some(Reverse(other)) = self.events.pop() else { break };
                self.happen(other.event);
            }
            self.pump();
            num_rounds += 1;
            if self.settings.check_every > 0 && num_rounds % self.settings.check_every == 0 {
                self.check()?;
            }
        }
        match self.num_live {
            0 => self.check(),
            num_sequences => Err(SimulateError::Stuck { num_sequences, seconds: self.now.as_secs_f64() }),
        }
    }

    pub(super) fn report(self, wall: Duration) -> Report {
        let suspended = self.core.counters().num_suspensions;
        Report::new(self.settings, self.tally, suspended, self.now, wall)
    }

    fn check(&self) -> Result<(), SimulateError> {
        self.core.check().map_err(|broken| SimulateError::Broken { broken, seconds: self.now.as_secs_f64() })
    }

    fn advance(&mut self, to: Duration) {
        if self.steps.is_empty() && self.lanes.num_loads() > 0 && self.is_counting() {
            self.tally.stall += to - self.now;
        }
        self.now = to;
    }

    fn is_counting(&self) -> bool {
        self.now.as_secs_f64() >= self.settings.warmup
    }

    fn happen(&mut self, event: Event) {
        self.eviction_stalled = false;
        match event {
            Event::Arrival(arrival) => self.arrive(arrival),
            Event::StepEnd => {
                let step = self.steps.pop_front().expect("the step that ends was begun");
                self.core.apply(&step.output, self.now);
                self.begin_step();
            }
            Event::MoveEnd(command) => {
                self.lanes.end(&command);
                self.core.move_done(MoveDone { id: command.id, result: Ok(()) }, self.now);
            }
        }
    }

    /// Carries everything out that the last events made possible.
    fn pump(&mut self) {
        loop {
            while let Some(plan) = self.core.plan(self.now) {
                self.take_step(&plan);
            }
            for command in self.core.drain_commands() {
                let end = self.lanes.start(&command, self.now);
                self.schedule(end, Event::MoveEnd(command));
            }
            self.tell_users();
            if self.eviction_stalled || !self.core.needs_eviction() {
                return;
            }
            let proposals = decide(&self.core.pressure());
            let num_accepted = self.core.accept(&proposals);
            self.eviction_stalled = num_accepted == 0;
            if self.is_counting() {
                self.tally.num_victims += num_accepted as u64;
            }
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        let Arrival { turn, first_sent, num_refusals } = arrival;
        let id = SequenceId(self.live.len() as u64);
        let is_counted = first_sent.as_secs_f64() >= self.settings.warmup;
        match self.core.submit(self.requests.request(id, &turn), self.now) {
            Ok(()) => {
                if let Some(oracle) = &self.oracle {
                    oracle.lock().learn(&turn);
                }
                let computed = turn.num_past;
                self.live.push(Some(Live { turn, sent: first_sent, computed, is_counted, has_token: false }));
                self.num_live += 1;
            }
            Err(Rejected::QueueFull) => {
                self.tally.num_rejected += u64::from(is_counted);
                if num_refusals < self.settings.retries {
                    let again = self.now + Duration::from_secs_f64(self.settings.retry_after);
                    let arrival = Arrival { turn, first_sent, num_refusals: num_refusals + 1 };
                    self.schedule(again, Event::Arrival(arrival));
                } else {
                    self.tally.num_given_up += u64::from(is_counted);
                    self.follow(&turn, false, first_sent);
                }
            }
            Err(Rejected::TooLong { .. }) => {
                self.tally.num_too_long += u64::from(is_counted);
                self.follow(&turn, false, first_sent);
            }
        }
    }

    fn send(&mut self, at: Duration, turn: Turn) {
        if at.as_secs_f64() > self.settings.seconds {
            return;
        }
        if let Some(oracle) = &self.oracle {
            oracle.lock().expect_use(&turn, at);
        }
        self.schedule(at, Event::Arrival(Arrival { turn, first_sent: at, num_refusals: 0 }));
    }

    /// What its user does after a turn that was sent at `sent`.
    fn follow(&mut self, turn: &Turn, completed: bool, sent: Duration) {
        if let Some((at, next)) = self.traffic.ended(turn, completed, self.now) {
            self.send(at, next);
        }
        if let Some(oracle) = &self.oracle {
            oracle.lock().was_used(turn, sent);
        }
    }

    fn take_step(&mut self, plan: &StepPlan) {
        let mut seconds = self.prices.step();
        let is_counting = self.is_counting();
        for (id, rows) in self.core.planned_rows() {
            let live = self.live[id.0 as usize].as_mut().expect("a planned sequence was submitted");
            let is_decode = live.has_token && rows.start >= live.turn.prompt && rows.start >= live.computed;
            if is_decode {
                seconds += rows.clone().map(|position| self.prices.decode_row(position)).sum::<f64>();
            } else {
                seconds += self.prices.prompt(rows.clone());
                let again = rows.start..rows.end.min(live.computed).max(rows.start);
                if live.is_counted {
                    self.tally.recomputed_seconds += self.prices.prompt(again);
                }
            }
            live.computed = live.computed.max(rows.end);
        }
        let tokens = plan.samples.iter().map(|sample| {
            let live = self.live[sample.sequence.0 as usize].as_ref().expect("a planned sequence was submitted");
            (sample.sequence, live.turn.log.token(sample.position as usize))
        });
        let output = StepOutput { id: plan.id, tokens: tokens.collect() };
        let length = Duration::from_secs_f64(seconds);
        self.tally.num_steps += u64::from(is_counting);
        self.steps.push_back(Step { output, length });
        if self.steps.len() == 1 {
            self.begin_step();
        }
    }

    /// The first step in line goes to the device.
    fn begin_step(&mut self) {
        let Some(step) = self.steps.front() else { return };
        let length = step.length;
        if self.is_counting() {
            self.tally.busy += length;
        }
        self.schedule(self.now + length, Event::StepEnd);
    }

    fn tell_users(&mut self) {
        for event in self.core.drain_events() {
            match event {
                SequenceEvent::Sampled { id, .. } => {
                    let live = self.live[id.0 as usize].as_mut().expect("a sequence with a token has not ended");
                    self.tally.sampled += u64::from(live.is_counted);
                    if !live.has_token {
                        live.has_token = true;
                        if live.is_counted {
                            self.tally.ttft.push((self.now - live.sent).as_secs_f64());
                        }
                    }
                }
                SequenceEvent::Finished { id, usage, .. } => self.end_turn(id, &usage),
            }
        }
    }

    fn end_turn(&mut self, id: SequenceId, usage: &SequenceUsage) {
        let live = self.live[id.0 as usize].take().expect("a sequence ends once");
        self.num_live -= 1;
        if live.is_counted {
            let tally = &mut self.tally;
            tally.num_turns += 1;
            tally.num_turns_in_time += u64::from(self.now.as_secs_f64() <= self.settings.seconds);
            tally.input += live.turn.prompt as u64;
            tally.past_seconds += self.prices.prompt(0..live.turn.num_past);
            tally.count_sources(usage);
        }
        if let Some(oracle) = &self.oracle {
            oracle.lock().waited(usage.queued, self.now);
        }
        self.follow(&live.turn, true, live.sent);
    }

    fn schedule(&mut self, at: Duration, event: Event) {
        let order = self.num_events;
        self.num_events += 1;
        self.events.push(Reverse(Timed { at, order, event }));
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Timed {}
