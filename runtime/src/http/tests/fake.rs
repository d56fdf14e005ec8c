//! A service that answers every turn by a script and remembers what it was asked.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use futures_util::{stream, StreamExt};
use keepsake_model::chat::ChatMessage;
use parking_lot::Mutex;

use crate::gateway::ModelCard;
use crate::http::service::{RunningTurn, TurnService};
use crate::messages::session::{
    FinishReason, StartTurn, StoredTurn, TenantId, TurnError, TurnEvent, TurnId, TurnOutcome, TurnUsage,
};
use crate::telemetry::metrics::Metrics;

pub(super) const VOCAB_SIZE: usize = 300;
pub(super) const CREATED_AT: u64 = 1_700_000_000;

#[derive(Clone)]
pub(super) enum Script {
    /// Started, these deltas, Finished.
    Reply(Vec<&'static str>, FinishReason),
    /// Started, one delta, then this.
    FailMidway(TurnError),
    /// Started, one delta, then the stream just ends.
    EndEarly,
    /// Started, one delta, then nothing for ever.
    Hang,
    /// `start_turn` fails.
    Refuse(TurnError),
    Panic,
}

pub(super) struct Fake {
    model: ModelCard,
    metrics: Arc<Metrics>,
    script: Script,
    pub(super) turns: Mutex<Vec<StartTurn>>,
    stored: Mutex<HashMap<TurnId, (TenantId, StoredTurn)>>,
    /// Streams alive, finished or not.
    pub(super) open: Arc<AtomicUsize>,
}

impl Fake {
    pub(super) fn new(script: Script) -> Arc<Self> {
        Arc::new(Self {
            model: ModelCard {
                name: "org/tiny".to_owned(),
                created: CREATED_AT,
                max_context: 2048,
                vocab_size: VOCAB_SIZE,
            },
            metrics: Arc::new(Metrics::new()),
            script,
            turns: Mutex::default(),
            stored: Mutex::default(),
            open: Arc::default(),
        })
    }

    pub(super) fn replying() -> Arc<Self> {
        Self::new(Script::Reply(vec!["Hel", "lo \u{1f600}"], FinishReason::Stop))
    }

    pub(super) fn last_turn(&self) -> StartTurn {
        self.turns.lock().last().expect("a turn was started").clone()
    }
}

pub(super) fn usage() -> TurnUsage {
    TurnUsage {
        input_tokens: 100,
        cached_tokens: 64,
        output_tokens: 2,
        cached_by_tier: vec![("device".to_owned(), 64)],
        recomputed_tokens: 0,
        ttft: Duration::from_millis(5),
    }
}

/// Counts a stream while it lives.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl TurnService for Fake {
    fn start_turn(&self, turn: StartTurn) -> LocalBoxFuture<'_, Result<RunningTurn, TurnError>> {
        self.turns.lock().push(turn.clone());
        let id = TurnId::random();
        let (mut events, mut hangs) = (vec![TurnEvent::Started], false);
        match self.script.clone() {
            Script::Reply(deltas, finish_reason) => {
                events.extend(deltas.iter().map(|text| TurnEvent::Delta((*text).to_owned())));
                let outcome = TurnOutcome { text: deltas.concat(), finish_reason, usage: usage() };
                if turn.store {
                    let stored = StoredTurn {
                        id,
                        parent: turn.parent,
                        created_at: CREATED_AT,
                        echo: turn.echo,
                        outcome: outcome.clone(),
                    };
                    self.stored.lock().insert(id, (turn.tenant, stored));
                }
                events.push(TurnEvent::Finished(Box::new(outcome)));
            }
            Script::FailMidway(error) => events.extend([TurnEvent::Delta("x".to_owned()), TurnEvent::Failed(error)]),
            Script::EndEarly => events.push(TurnEvent::Delta("x".to_owned())),
            Script::Hang => {
                events.push(TurnEvent::Delta("x".to_owned()));
                hangs = true;
            }
            Script::Refuse(error) => return Box::pin(async { Err(error) }),
            Script::Panic => panic!("the script says so"),
        }
        self.open.fetch_add(1, Ordering::SeqCst);
        let open = Open(self.open.clone());
        let rest = if hangs { stream::pending().boxed_local() } else { stream::empty().boxed_local() };
        let events = stream::iter(events).chain(rest).inspect(move |_| {
            // The closure owns the counter: it goes when the stream goes.
            let _ = &open;
        });
        Box::pin(async move { Ok(RunningTurn { id, created_at: CREATED_AT, events: events.boxed_local() }) })
    }

    fn get_turn<'a>(&'a self, tenant: &'a TenantId, id: TurnId) -> LocalBoxFuture<'a, Result<StoredTurn, TurnError>> {
        let found = self.stored.lock().get(&id).filter(|(owner, _)| owner == tenant).map(|(_, turn)| turn.clone());
        Box::pin(async move { found.ok_or(TurnError::NotFound(format!("resp_{id}"))) })
    }

    fn delete_turn<'a>(&'a self, tenant: &'a TenantId, id: TurnId) -> LocalBoxFuture<'a, Result<(), TurnError>> {
        Box::pin(async move {
            self.get_turn(tenant, id).await?;
            self.stored.lock().remove(&id);
            Ok(())
        })
    }

    /// Bytes as tokens, 256 as the beginning of a sequence.
    fn encode(&self, text: String, add_bos: bool) -> LocalBoxFuture<'_, Result<Vec<u32>, TurnError>> {
        let bos = add_bos.then_some(256);
        Box::pin(async move { Ok(bos.into_iter().chain(text.bytes().map(u32::from)).collect()) })
    }

    fn encode_chat(&self, messages: Vec<ChatMessage>) -> LocalBoxFuture<'_, Result<Vec<u32>, TurnError>> {
        let text: String = messages.into_iter().map(|message| message.content).collect();
        self.encode(text, true)
    }

    fn decode(&self, tokens: Vec<u32>) -> LocalBoxFuture<'_, Result<String, TurnError>> {
        let bytes: Vec<u8> = tokens.into_iter().filter_map(|token| u8::try_from(token).ok()).collect();
        Box::pin(async move { Ok(String::from_utf8_lossy(&bytes).into_owned()) })
    }

    fn model(&self) -> &ModelCard {
        &self.model
    }

    fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    fn is_ready(&self) -> bool {
        !matches!(self.script, Script::Refuse(TurnError::ShuttingDown))
    }
}
