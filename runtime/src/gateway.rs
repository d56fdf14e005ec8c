//! The way from HTTP (and the bench) to sessions: finds or spawns them, and bounds how many turns there are.
//!
//! A turn holds a permit from here to its end, so queues behind this door are bounded whatever mailboxes do.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use actix::{Actor, Addr, ArbiterHandle};
use futures_util::Stream;
use keepsake_model::chat::ChatMessage;
use keepsake_model::tokenizer::Tokenizer;
use tokio::sync::{mpsc, Semaphore, SemaphorePermit};

use crate::actors::eviction::EvictionActor;
use crate::actors::gpu_worker::GpuWorkerActor;
use crate::actors::session::{SessionActor, SessionParts};
use crate::actors::tier::TierActor;
use crate::conversation::Node;
use crate::messages::observe::Observe;
use crate::messages::session::{
    BeginTurn, CancelTurn, CutTurns, ForgetTurn, Prompt, StartTurn, StoredTurn, TenantId, TurnError, TurnEvent, TurnId,
};
use crate::messages::store::{DeleteTurn, LoadTurn, LoadTurns};
use crate::telemetry::metrics::Metrics;

/// Texts that are tokenised at the same time.
const TOKENISING: usize = 2;

/// What clients may know of the model.
#[derive(Clone, Debug)]
pub struct ModelCard {
    pub name: String,
    /// Unix seconds.
    pub created: u64,
    /// Longest prompt and output together, in tokens: the model's context or the device pool, whichever is smaller.
    pub max_context: usize,
    pub vocab_size: usize,
}

/// Actors that only answer `Observe` here.
#[derive(Clone)]
pub struct Observed {
    pub worker: Addr<GpuWorkerActor>,
    pub eviction: Addr<EvictionActor>,
    pub tiers: Vec<Addr<TierActor>>,
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Gateway {
    inner: Arc<Inner>,
}

struct Inner {
    parts: Arc<SessionParts>,
    card: ModelCard,
    /// Where sessions run.
    arbiters: Vec<ArbiterHandle>,
    permits: Arc<Semaphore>,
    num_permits: usize,
    /// Tokenising takes hundreds of bytes of memory for each byte of text: only so many texts at a time.
    tokenising: Semaphore,
    longest_token_bytes: usize,
    is_ready: AtomicBool,
    observed: Observed,
}

impl Gateway {
    pub fn new(
        parts: Arc<SessionParts>,
        card: ModelCard,
        arbiters: Vec<ArbiterHandle>,
        num_permits: usize,
        observed: Observed,
    ) -> Self {
        let permits = Arc::new(Semaphore::new(num_permits));
        let is_ready = AtomicBool::new(true);
        let tokenising = Semaphore::new(TOKENISING);
        let longest_token_bytes = parts.model.tokenizer.longest_token_bytes();
        Self {
            inner: Arc::new(Inner {
                parts,
                card,
                arbiters,
                permits,
                num_permits,
                tokenising,
                longest_token_bytes,
                is_ready,
                observed,
            }),
        }
    }

    /// Checks limits, finds or spawns the session, and returns once the turn is accepted.
    pub async fn start_turn(&self, turn: StartTurn) -> Result<TurnStream, TurnError> {
        let arrived = Instant::now();
        let inner = &self.inner;
        if !self.is_ready() {
            return Err(TurnError::ShuttingDown);
        }
        self.check_length(text_bytes(&turn))?;
        if turn.store {
            inner.parts.check_store()?;
        }
        let permit = Arc::clone(&inner.permits).try_acquire_owned().map_err(|_| {
            inner.parts.metrics.queue_rejections.inc();
            TurnError::Overloaded { retry_after: inner.parts.queue_retry_after }
        })?;
        let id = TurnId::random();
        let created_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let session = self.session_for(&turn).await?;
        let _tokenising = self.tokenising().await;
        let (events, receiver) = mpsc::unbounded_channel();
        // From here on, dropping this future or the stream cancels the turn.
        let stream = TurnStream { id, created_at, receiver, session: session.clone(), is_finished: false };
        let begin = BeginTurn { id, turn, created_at, arrived, events, permit };
        match session.send(begin).await {
            Ok(Ok(())) => Ok(stream),
            Ok(Err(error)) => Err(error),
            // The session ended as the message came in, which takes an idle moment that long: the client may simply try again.
            Err(_) => Err(TurnError::Overloaded { retry_after: Duration::from_secs(1) }),
        }
    }

    pub async fn get_turn(&self, tenant: &TenantId, id: TurnId) -> Result<StoredTurn, TurnError> {
        let load = LoadTurn { tenant: tenant.clone(), id };
        let record = self.inner.parts.store.send(load).await.map_err(|_| TurnError::ShuttingDown)??;
        Node::from_record(record)?.to_stored().ok_or_else(|| TurnError::NotFound(id.to_string()))
    }

    pub async fn delete_turn(&self, tenant: &TenantId, id: TurnId) -> Result<(), TurnError> {
        let parts = &self.inner.parts;
        let delete = DeleteTurn { tenant: tenant.clone(), id };
        parts.store.send(delete).await.map_err(|_| TurnError::ShuttingDown)??;
        let session = parts.live.get(&id).map(|addr| addr.clone());
        if let Some(session) = session {
            // A session that has ended meanwhile holds nothing.
            let _ = session.send(ForgetTurn(id)).await;
        }
        Ok(())
    }

    pub fn model(&self) -> &ModelCard {
        &self.inner.card
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.inner.parts.model.tokenizer
    }

    /// The tokens of a chat prompt, as a turn would compute them.
    pub fn render_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, TurnError> {
        let model = &self.inner.parts.model;
        let refused = |error: keepsake_model::chat::ChatError| TurnError::Invalid {
            message: error.to_string(),
            param: Some("messages"),
        };
        model.chat.prompt_tokens(&model.tokenizer, messages, true).map_err(refused)
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.inner.parts.metrics
    }

    /// Refuses a text that must be too long before it is tokenised.
    pub fn check_length(&self, num_bytes: usize) -> Result<(), TurnError> {
        let limit = self.inner.card.max_context;
        let prompt_tokens = num_bytes / self.inner.longest_token_bytes;
        match prompt_tokens > limit {
            true => Err(TurnError::ContextLengthExceeded { prompt_tokens, limit }),
            false => Ok(()),
        }
    }

    /// Waits for its turn to tokenise a text.
    pub async fn tokenising(&self) -> Option<SemaphorePermit<'_>> {
        self.inner.tokenising.acquire().await.ok()
    }

    /// Ends every running turn with an error event: the shutdown's deadline has passed.
    pub fn cut_turns(&self) {
        let live = &self.inner.parts.live;
        let sessions: Vec<_> = live.iter().map(|entry| entry.value().clone()).collect();
        for session in sessions {
            session.do_send(CutTurns);
        }
    }

    /// False while draining.
    pub fn is_ready(&self) -> bool {
        self.inner.is_ready.load(Ordering::Relaxed)
    }

    /// Takes nothing new from now on; running turns go on.
    pub fn drain(&self) {
        self.inner.is_ready.store(false, Ordering::Relaxed);
    }

    /// Turns that hold a permit.
    pub fn num_turns(&self) -> usize {
        self.inner.num_permits - self.inner.permits.available_permits()
    }

    /// A snapshot of every actor but the sessions, of which only the number is told.
    pub async fn observe(&self) -> serde_json::Value {
        let Inner { parts, observed, .. } = &*self.inner;
        let mut tiers = Vec::new();
        for tier in &observed.tiers {
            tiers.push(tier.send(Observe).await.unwrap_or_default());
        }
        serde_json::json!({
            "scheduler": parts.scheduler.send(Observe).await.unwrap_or_default(),
            "worker": observed.worker.send(Observe).await.unwrap_or_default(),
            "eviction": observed.eviction.send(Observe).await.unwrap_or_default(),
            "store": parts.store.send(Observe).await.unwrap_or_default(),
            "tiers": tiers,
            "sessions": parts.num_sessions.load(Ordering::Relaxed),
            "turns": self.num_turns(),
        })
    }

    async fn session_for(&self, turn: &StartTurn) -> Result<Addr<SessionActor>, TurnError> {
        let parts = &self.inner.parts;
        let Some(parent) = turn.parent else {
            return Ok(self.spawn(Vec::new()));
        };
        let live = parts.live.get(&parent).map(|addr| addr.clone());
        if let Some(session) = live.filter(Addr::connected) {
            return Ok(session);
        }
        let load = LoadTurns { tenant: turn.tenant.clone(), id: parent };
        let records = parts.store.send(load).await.map_err(|_| TurnError::ShuttingDown)??;
        let nodes = records.into_iter().map(Node::from_record).collect::<Result<Vec<_>, _>>()?;
        // Of two requests that load one conversation at once, the second finds the first's session.
        let session = match parts.live.entry(parent) {
            dashmap::Entry::Occupied(entry) if entry.get().connected() => entry.get().clone(),
            dashmap::Entry::Occupied(mut entry) => {
                entry.insert(self.spawn(nodes));
                entry.get().clone()
            }
            dashmap::Entry::Vacant(entry) => entry.insert(self.spawn(nodes)).clone(),
        };
        self.forget_deleted(turn, parent, &session).await?;
        Ok(session)
    }

    /// A turn may have been deleted after the session's turns were read and before the session could be found.
    async fn forget_deleted(
        &self,
        turn: &StartTurn,
        parent: TurnId,
        session: &Addr<SessionActor>,
    ) -> Result<(), TurnError> {
        let load = LoadTurns { tenant: turn.tenant.clone(), id: parent };
        match self.inner.parts.store.send(load).await.map_err(|_| TurnError::ShuttingDown)? {
            Ok(records) => {
                for record in records.iter().filter(|r| r.hidden) {
                    session.do_send(ForgetTurn(TurnId(record.id)));
                }
                Ok(())
            }
            Err(error) => {
                session.do_send(ForgetTurn(parent));
                Err(error)
            }
        }
    }

    fn spawn(&self, nodes: Vec<Node>) -> Addr<SessionActor> {
        let Inner { parts, arbiters, .. } = &*self.inner;
        let turn = parts.num_sessions.load(Ordering::Relaxed) as usize;
        let parts = Arc::clone(parts);
        SessionActor::start_in_arbiter(&arbiters[turn % arbiters.len()], |_| SessionActor::new(parts, nodes))
    }
}

fn text_bytes(turn: &StartTurn) -> usize {
    let prompt = match &turn.prompt {
        Prompt::Messages(messages) => messages.iter().map(|m| m.content.len()).sum(),
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(_) => 0,
    };
    prompt + turn.instructions.as_ref().map_or(0, String::len)
}

/// A running turn's events. Dropping it cancels the turn.
pub struct TurnStream {
    pub id: TurnId,
    /// Unix seconds.
    pub created_at: u64,
    receiver: mpsc::UnboundedReceiver<TurnEvent>,
    session: Addr<SessionActor>,
    is_finished: bool,
}

impl TurnStream {
    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<TurnEvent> {
        std::future::poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
    }
}

impl Stream for TurnStream {
    type Item = TurnEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<TurnEvent>> {
        let event = self.receiver.poll_recv(cx);
        if let Poll::Ready(None | Some(TurnEvent::Finished(_) | TurnEvent::Failed(_))) = &event {
            self.is_finished = true;
        }
        event
    }
}

impl Drop for TurnStream {
    fn drop(&mut self) {
        if !self.is_finished {
            self.session.do_send(CancelTurn(self.id));
        }
    }
}
