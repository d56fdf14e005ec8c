//! Owns: one conversation's turns in memory, and its running replies. Receives: `BeginTurn`, `CancelTurn`, `CutTurns`, `ForgetTurn`,
//! `SequenceProgressed`. Sends: `SubmitSequence`, `StopSequence`, `SaveTurn`, and each turn's events. Never: tokenises on its own
//! thread, or sends a final event before the turn is durable.
//!
//! Turns form a tree: two requests that continue one turn are two running replies here, and both succeed.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{
    Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, MessageResult, ResponseActFuture,
    WrapFuture,
};
use dashmap::DashMap;
use keepsake_model::Model;
use keepsake_tiers::{ChunkKey, Health, KeyChain, TurnRecord, TurnStore};
use tokio::sync::{mpsc, OwnedSemaphorePermit};

use crate::actors::scheduler::SchedulerActor;
use crate::actors::store::StoreActor;
use crate::conversation::{self, Kind, Node, PromptTokens, Reply, TurnDocument};
use crate::core::{FinishCause, Rejected, SequenceEvent, SequenceId, SequenceRequest, SequenceUsage};
use crate::messages::observe::Observe;
use crate::messages::scheduler::{SequenceProgressed, StopSequence, SubmitSequence};
use crate::messages::session::{
    BeginTurn, CancelTurn, CutTurns, ForgetTurn, StartTurn, TenantId, TurnError, TurnEvent, TurnId, TurnOutcome,
    TurnUsage,
};
use crate::messages::store::SaveTurn;
use crate::telemetry::metrics::Metrics;

/// Live sessions beyond which one ends as soon as nothing of it runs; its turns come back from the store.
const MANY_SESSIONS: usize = 512;

/// Turns beyond which an idle session leaves memory (forks of one turn, mostly).
const MANY_TURNS: usize = 1024;

/// Sessions by the turns that they hold.
pub type LiveTurns = DashMap<TurnId, Addr<SessionActor>>;

/// What every session needs; shared.
pub struct SessionParts {
    pub model: Arc<Model>,
    pub scheduler: Addr<SchedulerActor>,
    pub store: Addr<StoreActor>,
    /// Only its health is asked here.
    pub turn_store: Arc<TurnStore>,
    /// Where a live session holds a turn, by the turn's id.
    pub live: Arc<LiveTurns>,
    pub num_sessions: AtomicU64,
    pub next_sequence: AtomicU64,
    pub metrics: Arc<Metrics>,
    /// Secret that tenants' chunk keys are salted with.
    pub secret: [u8; 32],
    /// Tenants' shares of the device, by name; one where none is set.
    pub weights: HashMap<String, f64>,
    /// Of weights, layout, dtype, backend and its numeric version.
    pub fingerprint: [u8; 32],
    /// Names of the tiers below the device, in order.
    pub tier_names: Vec<String>,
    pub idle_after: Duration,
    pub queue_retry_after: Duration,
}

impl SessionParts {
    fn root_key(&self, tenant: &TenantId) -> ChunkKey {
        KeyChain::root(&KeyChain::tenant_salt(&self.secret, tenant.as_str()), &self.fingerprint)
    }

    /// A turn that could not be kept is refused before it costs anything.
    pub fn check_store(&self) -> Result<(), TurnError> {
        match self.turn_store.health() {
            Health::Ok => Ok(()),
            Health::ReadOnly(reason) | Health::Down(reason) => Err(TurnError::StoreUnavailable(reason)),
        }
    }

    fn fingerprints(&self) -> [[u8; 32]; 3] {
        [self.model.fingerprint(), self.model.tokenizer.fingerprint(), self.model.chat.fingerprint()]
    }
}

pub struct SessionActor {
    parts: Arc<SessionParts>,
    nodes: HashMap<TurnId, Node>,
    running: HashMap<SequenceId, Running>,
    /// Turns from their request until they are durable or given up.
    unfinished: HashMap<TurnId, Unfinished>,
    /// `BeginTurn`s that wait for their answer.
    num_answers: usize,
    last_used: Instant,
}

/// A turn that cannot be continued yet.
struct Unfinished {
    tenant: TenantId,
    is_cancelled: bool,
}

/// One running turn.
struct Running {
    id: TurnId,
    turn: StartTurn,
    prompt: PromptTokens,
    reply: Reply,
    created_at: u64,
    arrived: Instant,
    first_token: Option<Duration>,
    last_token: Instant,
    events: mpsc::UnboundedSender<TurnEvent>,
    _permit: OwnedSemaphorePermit,
}

impl SessionActor {
    /// A session that already knows `nodes`: a path from a root.
    pub fn new(parts: Arc<SessionParts>, nodes: Vec<Node>) -> Self {
        let nodes = nodes.into_iter().map(|node| (node.id(), node)).collect();
        Self {
            parts,
            nodes,
            running: HashMap::new(),
            unfinished: HashMap::new(),
            num_answers: 0,
            last_used: Instant::now(),
        }
    }

    /// The turns from the root to `parent`, checked: they must have been made by this model and be finished.
    fn path_to(&self, parent: TurnId, tenant: &TenantId) -> Result<Vec<Node>, TurnError> {
        let mut path = Vec::new();
        let mut next = Some(parent);
        while let Some(id) = next {
            let node = self.nodes.get(&id).ok_or_else(|| self.missing(id, tenant))?;
            let is_deleted = id == parent && node.record.hidden;
            if is_deleted || node.record.tenant != tenant.as_str() {
                return Err(TurnError::NotFound(id.to_string()));
            }
            next = node.record.parent.map(TurnId);
            path.push(node.clone());
        }
        path.reverse();
        let is_foreign = path.iter().any(|node| node.record.fingerprints != self.parts.fingerprints());
        if is_foreign {
            let message = "the previous response was made with another model, tokenizer or chat template";
            return Err(TurnError::Conflict(message.to_owned()));
        }
        Ok(path)
    }

    fn missing(&self, id: TurnId, tenant: &TenantId) -> TurnError {
        let is_unfinished = self.unfinished.get(&id).is_some_and(|turn| turn.tenant == *tenant);
        match is_unfinished {
            true => TurnError::Conflict("the previous response is not finished".to_owned()),
            false => TurnError::NotFound(id.to_string()),
        }
    }

    /// The turn has ended, kept or not.
    fn forget_unfinished(&mut self, id: TurnId) {
        self.unfinished.remove(&id);
        if !self.nodes.contains_key(&id) {
            self.parts.live.remove(&id);
        }
    }

    /// Queues a turn whose prompt is known.
    fn submit(
        &mut self,
        begin: BeginTurn,
        prompt: PromptTokens,
        ctx: &mut Context<Self>,
    ) -> ResponseActFuture<Self, Result<(), TurnError>> {
        let BeginTurn { id, turn, created_at, arrived, events, permit } = begin;
        let sequence = SequenceId(self.parts.next_sequence.fetch_add(1, Ordering::Relaxed));
        let num_past = prompt.past.len();
        let tokens: Vec<u32> = prompt.past.iter().chain(&prompt.appended).copied().collect();
        if prompt.rebased {
            self.parts.metrics.rebased_conversations.inc();
        }
        let tokenizer = &self.parts.model.tokenizer;
        let sampling = turn.sampling.clone();
        let reply = Reply::new(Arc::clone(tokenizer), &tokens, turn.stop.clone(), sampling.stop_token_ids.clone());
        let model_ends = tokenizer.eog_ids().iter().filter(|_| !sampling.ignore_eos);
        let end_tokens: HashSet<u32> = model_ends.chain(&sampling.stop_token_ids).copied().collect();
        let num_prompt = tokens.len();
        let request = SequenceRequest {
            id: sequence,
            root: self.parts.root_key(&turn.tenant),
            weight: self.parts.weights.get(turn.tenant.as_str()).copied().unwrap_or(1.0),
            tokens,
            num_past,
            durable: turn.store,
            max_new_tokens: turn.max_output_tokens.map_or(usize::MAX, |n| n.max(1) as usize),
            end_tokens: Arc::new(end_tokens),
            min_new_tokens: sampling.min_tokens as usize,
            sampling,
        };
        let running = Running {
            id,
            turn,
            prompt,
            reply,
            created_at,
            arrived,
            first_token: None,
            last_token: arrived,
            events,
            _permit: permit,
        };
        self.running.insert(sequence, running);
        let submitted = self.parts.scheduler.send(SubmitSequence { request, events: ctx.address().recipient() });
        let answer = submitted.into_actor(self).map(move |answer, actor, _| {
            let error = match answer {
                Ok(Ok(())) => {
                    if let Some(running) = actor.running.get(&sequence) {
                        let _ = running.events.send(TurnEvent::Started);
                    }
                    return Ok(());
                }
                Ok(Err(Rejected::QueueFull)) => {
                    actor.parts.metrics.queue_rejections.inc();
                    TurnError::Overloaded { retry_after: actor.parts.queue_retry_after }
                }
                Ok(Err(Rejected::TooLong { limit })) => {
                    TurnError::ContextLengthExceeded { prompt_tokens: num_prompt, limit }
                }
                Err(_) => TurnError::ShuttingDown,
            };
            actor.running.remove(&sequence);
            actor.forget_unfinished(id);
            Err(error)
        });
        Box::pin(answer)
    }

    fn progressed(&mut self, event: SequenceEvent, ctx: &mut Context<Self>) {
        match event {
            SequenceEvent::Sampled { id, token } => self.sampled(id, token),
            SequenceEvent::Finished { id, cause, usage } => self.finished(id, cause, &usage, ctx),
        }
    }

    fn sampled(&mut self, id: SequenceId, token: u32) {
        let Some(running) = self.running.get_mut(&id) else { return };
        let now = Instant::now();
        match running.first_token {
            None => running.first_token = Some(running.arrived.elapsed()),
            Some(_) => self.parts.metrics.token_interval(now - running.last_token),
        }
        running.last_token = now;
        let was_stopped = running.reply.is_stopped();
        let progress = running.reply.push(token);
        if !progress.text.is_empty() {
            // A client that went away is noticed by its stream's guard.
            let _ = running.events.send(TurnEvent::Delta(progress.text));
        }
        if progress.stopped && !was_stopped {
            let cut = running.reply.cut(keepsake_model::chat::ReplyEnd::Stop);
            let keep = running.prompt.past.len() + running.prompt.appended.len() + cut.num_kept;
            self.parts.scheduler.do_send(StopSequence { id, keep });
        }
    }

    /// The sequence has ended: what is left of the text goes out, the turn is made durable, then the final event follows.
    fn finished(&mut self, id: SequenceId, cause: FinishCause, usage: &SequenceUsage, ctx: &mut Context<Self>) {
        let Some(mut running) = self.running.remove(&id) else { return };
        self.last_used = Instant::now();
        if self.unfinished.get(&running.id).is_some_and(|turn| turn.is_cancelled) {
            self.parts.metrics.aborted_requests.inc();
            self.forget_unfinished(running.id);
            self.stop_if_many(ctx);
            return;
        }
        let rest = running.reply.finish();
        if !rest.is_empty() {
            let _ = running.events.send(TurnEvent::Delta(rest));
        }
        let usage = self.usage(&running, usage);
        let node = self.close_turn(&running, cause, usage.clone());
        let outcome =
            TurnOutcome { text: running.reply.text().to_owned(), finish_reason: running.reply.end(cause).0, usage };
        if !running.turn.store {
            self.forget_unfinished(running.id);
            self.announce(&running, outcome);
            self.stop_if_many(ctx);
            return;
        }
        self.save(running, node, outcome, ctx);
    }

    fn save(&mut self, running: Running, node: Node, outcome: TurnOutcome, ctx: &mut Context<Self>) {
        let save = self.parts.store.send(SaveTurn(node.record.clone()));
        let saved = save.into_actor(self).map(move |result, actor, ctx| {
            match result.unwrap_or(Err(TurnError::ShuttingDown)) {
                Err(TurnError::NotFound(_)) if node.record.parent.is_some() => {
                    // Its parent was deleted meanwhile, and nothing else held it: this turn becomes a root.
                    let root = node.into_root(&running.prompt.past);
                    actor.save(running, root, outcome, ctx);
                    return;
                }
                Ok(()) => {
                    actor.nodes.insert(running.id, node);
                    actor.forget_unfinished(running.id);
                    actor.announce(&running, outcome);
                }
                Err(error) => {
                    tracing::error!(turn = %running.id, %error, "a finished turn could not be stored");
                    actor.forget_unfinished(running.id);
                    let _ = running.events.send(TurnEvent::Failed(error));
                }
            }
            actor.stop_if_many(ctx);
        });
        ctx.spawn(saved);
    }

    fn announce(&self, running: &Running, outcome: TurnOutcome) {
        self.parts.metrics.turn_finished(&outcome.usage, outcome.finish_reason, running.arrived.elapsed());
        let _ = running.events.send(TurnEvent::Finished(Box::new(outcome)));
    }

    fn usage(&self, running: &Running, usage: &SequenceUsage) -> TurnUsage {
        let mut cached_by_tier = vec![("device".to_owned(), usage.device as u32)];
        let loaded = self.parts.tier_names.iter().zip(&usage.loaded);
        cached_by_tier.extend(loaded.map(|(name, n)| (name.clone(), *n as u32)));
        TurnUsage {
            input_tokens: (running.prompt.past.len() + running.prompt.appended.len()) as u32,
            cached_tokens: cached_by_tier.iter().map(|(_, n)| n).sum(),
            output_tokens: running.reply.num_tokens() as u32,
            cached_by_tier,
            recomputed_tokens: usage.recomputed as u32,
            ttft: running.first_token.unwrap_or_default(),
        }
    }

    fn close_turn(&self, running: &Running, cause: FinishCause, usage: TurnUsage) -> Node {
        let (finish_reason, end) = running.reply.end(cause);
        let cut = running.reply.cut(end);
        let PromptTokens { kind, appended, messages, rebased, .. } = &running.prompt;
        let parent = running.turn.parent;
        let document = TurnDocument {
            kind: *kind,
            parent: parent.map(|p| p.to_string()),
            messages: messages.clone(),
            is_cut: false,
            instructions: running.turn.instructions.clone(),
            text: running.reply.text().to_owned(),
            num_prompt: appended.len(),
            ends_with_eot: *kind == Kind::Chat && end.leaves_end_of_turn(),
            finish_reason,
            usage,
            echo: running.turn.echo.clone(),
        };
        let items = serde_json::to_vec(&document).expect("a document has string keys only");
        let record = TurnRecord {
            id: running.id.0,
            parent: parent.filter(|_| !rebased).map(|p| p.0),
            tenant: running.turn.tenant.as_str().to_owned(),
            tokens: appended.iter().copied().chain(running.reply.log(&cut)).collect(),
            items,
            created_at: running.created_at,
            fingerprints: self.parts.fingerprints(),
            finished: true,
            hidden: false,
        };
        Node { record, document: Some(document) }
    }

    fn is_idle(&self) -> bool {
        self.unfinished.is_empty() && self.num_answers == 0
    }

    /// With many sessions about, or none or too many of its turns kept, an idle one makes room at once.
    fn stop_if_many(&self, ctx: &mut Context<Self>) {
        let is_many = self.parts.num_sessions.load(Ordering::Relaxed) as usize > MANY_SESSIONS;
        if self.is_idle() && (is_many || self.nodes.is_empty() || self.nodes.len() > MANY_TURNS) {
            ctx.stop();
        }
    }
}

impl Actor for SessionActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.parts.num_sessions.fetch_add(1, Ordering::Relaxed);
        for id in self.nodes.keys() {
            self.parts.live.insert(*id, ctx.address());
        }
        let idle_after = self.parts.idle_after;
        ctx.run_interval(idle_after / 4, move |actor, ctx| {
            if actor.is_idle() && actor.last_used.elapsed() >= idle_after {
                ctx.stop();
            }
        });
    }

    fn stopped(&mut self, ctx: &mut Self::Context) {
        self.parts.num_sessions.fetch_sub(1, Ordering::Relaxed);
        let this = ctx.address();
        for id in self.nodes.keys().chain(self.unfinished.keys()) {
            self.parts.live.remove_if(id, |_, addr| *addr == this);
        }
    }
}

impl Handler<BeginTurn> for SessionActor {
    type Result = ResponseActFuture<Self, Result<(), TurnError>>;

    fn handle(&mut self, begin: BeginTurn, ctx: &mut Self::Context) -> Self::Result {
        self.last_used = Instant::now();
        let path = match begin.turn.parent {
            None => Ok(Vec::new()),
            Some(parent) => self.path_to(parent, &begin.turn.tenant),
        };
        let path = match path {
            Ok(path) => path,
            Err(error) => return failed(self, error),
        };
        self.unfinished.insert(begin.id, Unfinished { tenant: begin.turn.tenant.clone(), is_cancelled: false });
        self.parts.live.insert(begin.id, ctx.address());
        let id = begin.id;
        let model = Arc::clone(&self.parts.model);
        let work = actix_web::web::block(move || {
            let turn = &begin.turn;
            let prompt =
                conversation::build(&model.tokenizer, &model.chat, &path, turn.instructions.as_deref(), &turn.prompt);
            (begin, prompt)
        });
        let accepted = work.into_actor(self).then(move |built, actor, ctx| {
            let is_cancelled = actor.unfinished.get(&id).is_some_and(|turn| turn.is_cancelled);
            let error = match built {
                Ok((begin, Ok(prompt))) if !is_cancelled => return actor.submit(begin, prompt, ctx),
                // Nobody listens any more.
                Ok((_, Ok(_))) => TurnError::ShuttingDown,
                Ok((_, Err(error))) => error,
                Err(_) => TurnError::Internal("tokenising failed".to_owned()),
            };
            actor.parts.metrics.aborted_requests.inc_by(u64::from(is_cancelled));
            actor.forget_unfinished(id);
            failed(actor, error)
        });
        // A short turn can end before its acceptance has been told; ending the session then would lose the answer.
        self.num_answers += 1;
        Box::pin(accepted.map(|answer, actor, ctx| {
            actor.num_answers -= 1;
            ctx.run_later(Duration::ZERO, |actor, ctx| actor.stop_if_many(ctx));
            answer
        }))
    }
}

fn failed(actor: &SessionActor, error: TurnError) -> ResponseActFuture<SessionActor, Result<(), TurnError>> {
    Box::pin(async move { Err(error) }.into_actor(actor))
}

impl Handler<CancelTurn> for SessionActor {
    type Result = ();

    fn handle(&mut self, CancelTurn(id): CancelTurn, ctx: &mut Self::Context) {
        let Some(turn) = self.unfinished.get_mut(&id) else {
            // The client left before its turn began here: a session without turns has no reason to live.
            self.stop_if_many(ctx);
            return;
        };
        turn.is_cancelled = true;
        if let Some((sequence, _)) = self.running.iter().find(|(_, r)| r.id == id) {
            self.parts.scheduler.do_send(StopSequence { id: *sequence, keep: usize::MAX });
        }
    }
}

impl Handler<CutTurns> for SessionActor {
    type Result = ();

    fn handle(&mut self, _: CutTurns, _: &mut Self::Context) {
        for (sequence, running) in &self.running {
            let _ = running.events.send(TurnEvent::Failed(TurnError::ShuttingDown));
            if let Some(turn) = self.unfinished.get_mut(&running.id) {
                turn.is_cancelled = true;
            }
            self.parts.scheduler.do_send(StopSequence { id: *sequence, keep: usize::MAX });
        }
    }
}

impl Handler<ForgetTurn> for SessionActor {
    type Result = ();

    fn handle(&mut self, ForgetTurn(id): ForgetTurn, _: &mut Self::Context) {
        // Its tokens stay for turns that continue it; only clients lose sight of it.
        if let Some(node) = self.nodes.get_mut(&id) {
            node.document = None;
            node.record.hidden = true;
        }
        self.parts.live.remove(&id);
    }
}

impl Handler<SequenceProgressed> for SessionActor {
    type Result = ();

    fn handle(&mut self, SequenceProgressed(events): SequenceProgressed, ctx: &mut Self::Context) {
        for event in events {
            self.progressed(event, ctx);
        }
    }
}

impl Handler<Observe> for SessionActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        MessageResult(
            serde_json::json!({ "turns": self.nodes.len(), "running": self.running.len(), "unfinished": self.unfinished.len() }),
        )
    }
}
