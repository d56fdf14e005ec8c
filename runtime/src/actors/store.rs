//! Owns: the turn store. Receives: `SaveTurn`, `LoadTurns`, `LoadTurn`, `DeleteTurn`. Sends: answers only. Never: reads or writes on
//! its own thread; keeps turns in memory.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix::{Actor, AsyncContext, Context, Handler, MessageResult, ResponseFuture};
use crossbeam_channel::{bounded, Sender, TrySendError};
use keepsake_tiers::{Tier, TierError, TurnRecord, TurnStore};
use tokio::sync::oneshot;

use crate::messages::observe::Observe;
use crate::messages::session::{TenantId, TurnError, TurnId};
use crate::messages::store::{DeleteTurn, LoadTurn, LoadTurns, SaveTurn};
use crate::telemetry::metrics::Metrics;

/// Prefix of the reading threads' names; a panic on one ends the process.
pub const THREAD_PREFIX: &str = "store-";

const NUM_THREADS: usize = 2;
const EXPIRE_EVERY: Duration = Duration::from_secs(600);
const HEALTH_EVERY: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce(&TurnStore) + Send>;

pub struct StoreActor {
    store: Arc<TurnStore>,
    /// Only their health is looked at, for the gauge.
    durable: Vec<Arc<dyn Tier>>,
    jobs: Sender<Job>,
    metrics: Arc<Metrics>,
}

impl StoreActor {
    /// `queue` is the number of reads that may wait; beyond it callers get `Overloaded`.
    pub fn start_threads(
        store: Arc<TurnStore>,
        durable: Vec<Arc<dyn Tier>>,
        queue: usize,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (jobs, receiver) = bounded::<Job>(queue);
        for index in 0..NUM_THREADS {
            let store = Arc::clone(&store);
            let receiver = receiver.clone();
            std::thread::Builder::new()
                .name(format!("{THREAD_PREFIX}{index}"))
                .spawn(move || receiver.iter().for_each(|job| job(&store)))
                .expect("the operating system can start one more thread at start-up");
        }
        Self { store, durable, jobs, metrics }
    }

    /// Runs `work` on a store thread.
    fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&TurnStore) -> Result<T, TurnError> + Send + 'static,
    ) -> ResponseFuture<Result<T, TurnError>> {
        let (sender, receiver) = oneshot::channel();
        let job: Job = Box::new(move |store| {
            // The asker may have gone away meanwhile.
            let _ = sender.send(work(store));
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

impl Actor for StoreActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(HEALTH_EVERY, |actor, _| {
            let is_ok = actor.store.health().is_ok() && actor.durable.iter().all(|tier| tier.health().is_ok());
            actor.metrics.store_read_only.set(i64::from(!is_ok));
        });
        ctx.run_interval(EXPIRE_EVERY, |actor, _| {
            let expire: Job = Box::new(|store| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                match store.expire(now) {
                    Ok(0) => {}
                    Ok(num_turns) => tracing::info!(num_turns, "turns expired"),
                    Err(error) => tracing::warn!(%error, "turns could not be expired"),
                }
            });
            // A full queue means that readers wait: the next round is soon enough.
            let _ = actor.jobs.try_send(expire);
        });
    }
}

impl Handler<SaveTurn> for StoreActor {
    type Result = ResponseFuture<Result<(), TurnError>>;

    fn handle(&mut self, SaveTurn(record): SaveTurn, _: &mut Self::Context) -> Self::Result {
        let parent = record.parent.map(TurnId);
        let (sender, receiver) = oneshot::channel();
        let queued = self.store.put_then(vec![record], move |result| {
            // The session waits below for as long as it lives.
            let _ = sender.send(result);
        });
        let metrics = Arc::clone(&self.metrics);
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
        self.run(move |store| {
            visible(store, &tenant, id)?;
            store.path(&id.0).map_err(cannot_read)?.ok_or_else(|| not_found(id))
        })
    }
}

impl Handler<LoadTurn> for StoreActor {
    type Result = ResponseFuture<Result<TurnRecord, TurnError>>;

    fn handle(&mut self, LoadTurn { tenant, id }: LoadTurn, _: &mut Self::Context) -> Self::Result {
        self.run(move |store| visible(store, &tenant, id))
    }
}

impl Handler<DeleteTurn> for StoreActor {
    type Result = ResponseFuture<Result<(), TurnError>>;

    fn handle(&mut self, DeleteTurn { tenant, id }: DeleteTurn, _: &mut Self::Context) -> Self::Result {
        self.run(move |store| {
            visible(store, &tenant, id)?;
            match store.delete(&id.0).map_err(cannot_write)? {
                true => Ok(()),
                false => Err(not_found(id)),
            }
        })
    }
}

impl Handler<Observe> for StoreActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let usage = self.store.usage();
        MessageResult(serde_json::json!({
            "health": format!("{:?}", self.store.health()),
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "queued": self.jobs.len(),
        }))
    }
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
