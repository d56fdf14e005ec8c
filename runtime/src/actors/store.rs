//! Owns: the turn store. Receives: `SaveTurn`, `LoadTurns`, `LoadTurn`, `DeleteTurn`. Sends: answers, `ForgetChunks` of what was
//! deleted or has expired, `ForgetTurn` of what has expired. Never: reads or writes on its own thread; keeps turns in memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use actix::{Actor, AsyncContext, Context, Handler, MessageResult, Recipient, ResponseFuture};
use crossbeam_channel::{bounded, Sender, TrySendError};
use keepsake_tiers::{ChunkKey, KeyChain, KeysOf, Removed, RemovedLog, Tier, TierError, TurnRecord, TurnStore};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::actors::session::LiveTurns;
use crate::messages::observe::Observe;
use crate::messages::scheduler::ForgetChunks;
use crate::messages::session::{ForgetTurn, TenantId, TurnError, TurnId};
use crate::messages::store::{DeleteTurn, LoadTurn, LoadTurns, SaveTurn};
use crate::telemetry::metrics::Metrics;

/// Prefix of the reading threads' names; a panic on one ends the process.
pub const THREAD_PREFIX: &str = "store-";

const NUM_THREADS: usize = 2;
/// Expired turns are looked for four times in a TTL, but at least and at most this often.
const EXPIRE_EVERY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(600)];
/// Chunks of deleted turns are taken to be gone from durable tiers after this: removals wait for copies and for sequences in flight.
const DOOMED_FOR: Duration = Duration::from_secs(30);
const HEALTH_EVERY: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce(&Parts) + Send>;

/// What the store's threads work with.
pub struct StoreParts {
    pub store: Arc<TurnStore>,
    /// Tiers that hold chunks over a restart.
    pub durable: Vec<Arc<dyn Tier>>,
    pub live: Arc<LiveTurns>,
    pub scheduler: Recipient<ForgetChunks>,
    /// Secret that tenants' chunk keys are salted with.
    pub secret: [u8; 32],
    /// Of weights, layout, dtype, backend and its numeric version.
    pub fingerprint: [u8; 32],
    pub chunk_tokens: usize,
    pub metrics: Arc<Metrics>,
}

/// [`StoreParts`] and what the threads share beside them.
struct Parts {
    given: StoreParts,
    keys_of: KeysOf,
    /// Chunks of deleted turns, and since when; see [`TurnStore::delete`].
    doomed: Mutex<VecDeque<(Instant, Vec<ChunkKey>)>>,
}

pub struct StoreActor {
    parts: Arc<Parts>,
    jobs: Sender<Job>,
}

impl StoreActor {
    /// `queue` is the number of reads that may wait; beyond it callers get `Overloaded`.
    pub fn start_threads(given: StoreParts, queue: usize) -> Self {
        let (secret, fingerprint, chunk_tokens) = (given.secret, given.fingerprint, given.chunk_tokens);
        let keys_of: KeysOf = Arc::new(move |log| {
            let mut keys = KeyChain::chunk_keys(root_key(&secret, &fingerprint, log), &log.tokens, chunk_tokens);
            keys.split_off((log.num_kept / chunk_tokens).min(keys.len()))
        });
        let parts = Arc::new(Parts { given, keys_of, doomed: Mutex::default() });
        let (jobs, receiver) = bounded::<Job>(queue);
        for index in 0..NUM_THREADS {
            let parts = Arc::clone(&parts);
            let receiver = receiver.clone();
            std::thread::Builder::new()
                .name(format!("{THREAD_PREFIX}{index}"))
                .spawn(move || receiver.iter().for_each(|job| job(&parts)))
                .expect("the operating system can start one more thread at start-up");
        }
        Self { parts, jobs }
    }

    /// Runs `work` on a store thread.
    fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Parts) -> Result<T, TurnError> + Send + 'static,
    ) -> ResponseFuture<Result<T, TurnError>> {
        let (sender, receiver) = oneshot::channel();
        let job: Job = Box::new(move |parts| {
            // The asker may have gone away meanwhile.
            let _ = sender.send(work(parts));
        });
        let queued = self.jobs.try_send(job);
        Box::pin(async move {
            match queued {
                Ok(()) => receiver.await.unwrap_or(Err(TurnError::ShuttingDown)),
                Err(TrySendError::Full(_)) => Err(TurnError::Overloaded { retry_after: Duration::from_secs(1) }),
                Err(TrySendError::Disconnected(_)) => Err(TurnError::ShuttingDown),
            }
        })
    }
}

impl Parts {
    /// The chunks of removed turns may go, and sessions lose sight of them.
    fn forget(&self, removed: Removed) {
        let StoreParts { live, scheduler, secret, fingerprint, .. } = &self.given;
        for id in removed.ids {
            let session = live.get(&TurnId(id)).map(|session| session.clone());
            if let Some(session) = session {
                session.do_send(ForgetTurn(TurnId(id)));
            }
        }
        for log in removed.logs {
            let doomed = (self.keys_of)(&log);
            if !doomed.is_empty() && !self.given.durable.is_empty() {
                self.doomed.lock().push_back((Instant::now(), doomed));
            }
            let root = root_key(secret, fingerprint, &log);
            scheduler.do_send(ForgetChunks { root, tokens: log.tokens, keep_tokens: log.num_kept });
        }
    }

    fn expire(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        match self.given.store.expire(now, &self.keys_of) {
            Ok(removed) if removed.ids.is_empty() => {}
            Ok(removed) => {
                tracing::info!(num_turns = removed.ids.len(), "turns expired");
                self.forget(removed);
            }
            Err(error) => tracing::warn!(%error, "turns could not be expired"),
        }
    }

    /// Makes removals of some time ago final, so that the next start need not repeat them.
    fn confirm_doomed(&self) {
        let due: Vec<ChunkKey> = {
            let mut doomed = self.doomed.lock();
            let num_due = doomed.iter().take_while(|(since, _)| since.elapsed() >= DOOMED_FOR).count();
            doomed.drain(..num_due).flat_map(|(_, keys)| keys).collect()
        };
        if due.is_empty() {
            return;
        }
        let flushed = self.given.durable.iter().try_for_each(|tier| tier.flush());
        if let Err(error) = flushed.and_then(|()| self.given.store.forget_doomed(&due)) {
            tracing::warn!(%error, "chunks of deleted turns are not known to be gone: the next start removes them");
        }
    }
}

impl Actor for StoreActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(HEALTH_EVERY, |actor, _| {
            let StoreParts { store, durable, metrics, .. } = &actor.parts.given;
            let is_ok = store.health().is_ok() && durable.iter().all(|tier| tier.health().is_ok());
            metrics.store_read_only.set(i64::from(!is_ok));
        });
        let [least, most] = EXPIRE_EVERY;
        // A full queue means that readers wait: the next round is soon enough.
        ctx.run_interval((self.parts.given.store.ttl() / 4).clamp(least, most), |actor, _| {
            let _ = actor.jobs.try_send(Box::new(|parts: &Parts| parts.expire()));
        });
        ctx.run_interval(DOOMED_FOR / 3, |actor, _| {
            let _ = actor.jobs.try_send(Box::new(|parts: &Parts| parts.confirm_doomed()));
        });
    }
}

impl Handler<SaveTurn> for StoreActor {
    type Result = ResponseFuture<Result<(), TurnError>>;

    fn handle(&mut self, SaveTurn(record): SaveTurn, _: &mut Self::Context) -> Self::Result {
        let parent = record.parent.map(TurnId);
        let (sender, receiver) = oneshot::channel();
        let queued = self.parts.given.store.put_then(vec![record], move |result| {
            // The session waits below for as long as it lives.
            let _ = sender.send(result);
        });
        let metrics = Arc::clone(&self.parts.given.metrics);
        Box::pin(async move {
            queued.map_err(cannot_write)?;
            match receiver.await.map_err(|_| TurnError::ShuttingDown)? {
                Ok(()) => {}
                // The only thing about a record that the store can object to is a parent that it does not have.
                Err(error) => match (error, parent) {
                    (TierError::Invalid { .. }, Some(parent)) => return Err(not_found(parent)),
                    (error, _) => return Err(cannot_write(error)),
                },
            }
            metrics.turns_stored.inc();
            Ok(())
        })
    }
}

impl Handler<LoadTurns> for StoreActor {
    type Result = ResponseFuture<Result<Vec<TurnRecord>, TurnError>>;

    fn handle(&mut self, LoadTurns { tenant, id }: LoadTurns, _: &mut Self::Context) -> Self::Result {
        self.run(move |parts| {
            let store = &parts.given.store;
            visible(store, &tenant, id)?;
            store.path(&id.0).map_err(cannot_read)?.ok_or_else(|| not_found(id))
        })
    }
}

impl Handler<LoadTurn> for StoreActor {
    type Result = ResponseFuture<Result<TurnRecord, TurnError>>;

    fn handle(&mut self, LoadTurn { tenant, id }: LoadTurn, _: &mut Self::Context) -> Self::Result {
        self.run(move |parts| visible(&parts.given.store, &tenant, id))
    }
}

impl Handler<DeleteTurn> for StoreActor {
    type Result = ResponseFuture<Result<(), TurnError>>;

    fn handle(&mut self, DeleteTurn { tenant, id }: DeleteTurn, _: &mut Self::Context) -> Self::Result {
        self.run(move |parts| {
            let store = &parts.given.store;
            visible(store, &tenant, id)?;
            let removed = store.delete(&id.0, Arc::clone(&parts.keys_of)).map_err(cannot_write)?;
            parts.forget(removed.ok_or_else(|| not_found(id))?);
            Ok(())
        })
    }
}

impl Handler<Observe> for StoreActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let store = &self.parts.given.store;
        let usage = store.usage();
        MessageResult(serde_json::json!({
            "health": format!("{:?}", store.health()),
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "queued": self.jobs.len(),
        }))
    }
}

/// The chain root of the log's tenant.
fn root_key(secret: &[u8; 32], fingerprint: &[u8; 32], log: &RemovedLog) -> ChunkKey {
    KeyChain::root(&KeyChain::tenant_salt(secret, &log.tenant), fingerprint)
}

/// Another tenant's turn is unknown.
fn visible(store: &TurnStore, tenant: &TenantId, id: TurnId) -> Result<TurnRecord, TurnError> {
    let record = store.get(&id.0).map_err(cannot_read)?;
    record.filter(|r| r.tenant == tenant.as_str()).ok_or_else(|| not_found(id))
}

fn not_found(id: TurnId) -> TurnError {
    TurnError::NotFound(id.to_string())
}

fn cannot_read(error: TierError) -> TurnError {
    TurnError::Internal(format!("the turn store cannot be read: {error}"))
}

fn cannot_write(error: TierError) -> TurnError {
    match error {
        TierError::Busy { .. } => TurnError::Overloaded { retry_after: Duration::from_secs(1) },
        TierError::Closed { .. } => TurnError::ShuttingDown,
        error => TurnError::StoreUnavailable(error.to_string()),
    }
}
