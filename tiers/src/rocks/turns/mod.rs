//! The turn store: token logs, items and the secret that tenants' salts come from.
//!
//! One thread does all writing, so a decision about a record and its write are never torn apart, and gathers the
//! requests that wait into one sync of the log. Reads run on the caller's thread. Nothing is kept in memory but what
//! RocksDB's bounded buffers hold.
//!
//! A deleted turn whose tokens descendants still need becomes a tombstone: hidden, without its items. With its last
//! descendant it is really removed.

mod record;
mod secret;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use keepsake_config::{RocksOptions, TierConfig};
use parking_lot::Mutex;

use record::Tables;
pub use record::{RemovedLog, TurnRecord};
use writer::{Op, Request, Writer};

use super::database::Database;
use crate::registry::under;
use crate::{ChunkKey, Health, Result, TierError, Usage};

/// Requests that may wait for the writing thread; beyond it callers get [`TierError::Busy`].
const QUEUE_REQUESTS: usize = 1024;
/// Turns that one request of an expiry looks at, so that it never holds up waiting puts for long.
const EXPIRE_BATCH: usize = 256;

/// Where and how large.
#[derive(Clone, Debug)]
pub struct TurnStoreConfig {
    /// The folder `turns`; created with mode 0700.
    pub path: PathBuf,
    /// Cap on every byte in the folder.
    pub capacity_bytes: u64,
    /// Turns older than this are removed by [`TurnStore::expire`].
    pub ttl: Duration,
}

impl TurnStoreConfig {
    /// All memory that RocksDB may take, for the sum of configured memory.
    pub fn memory_bytes(&self) -> u64 {
        record::memory_bytes(self)
    }

    /// The turn store of a `rocks` tier.
    pub fn from_tier(config: &TierConfig, toml_path: &str) -> Result<Self> {
        let options = RocksOptions::of(config).map_err(|error| under(toml_path, error))?;
        Ok(Self {
            path: config.folder().join("turns"),
            capacity_bytes: options.turns_capacity.as_u64(),
            ttl: options.turn_ttl,
        })
    }
}

/// The chunks that only the removed turns of a log had, for a store that knows neither salts nor layouts.
pub type KeysOf = Arc<dyn Fn(&RemovedLog) -> Vec<ChunkKey> + Send + Sync>;

/// What a deletion or expiry took away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Turns that clients no longer see.
    pub ids: Vec<[u8; 16]>,
    /// Logs whose last turns are gone for good. A turn whose tokens descendants need is in none.
    pub logs: Vec<RemovedLog>,
}

/// Turns on disk. All methods block; share it in an `Arc`.
pub struct TurnStore {
    database: Arc<Database>,
    requests: Mutex<Option<crossbeam_channel::Sender<Request>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    secret: [u8; 32],
    ttl: Duration,
}

impl TurnStore {
    pub fn open(config: TurnStoreConfig) -> Result<Self> {
        let secret = secret::load_or_create(&config.path)?;
        let database = Arc::new(record::open_database(&config)?);
        let (sender, receiver) = crossbeam_channel::bounded(QUEUE_REQUESTS);
        let writer = Writer::new(Arc::clone(&database), receiver);
        let thread = std::thread::Builder::new()
            .name("turns-writer".to_owned())
            .spawn(move || writer.run())
            .map_err(|e| TierError::io(database.name(), "start a thread", e))?;
        Ok(Self {
            database,
            requests: Mutex::new(Some(sender)),
            thread: Mutex::new(Some(thread)),
            secret,
            ttl: config.ttl,
        })
    }

    /// A turn that clients may see. `None`: unknown, deleted or expired.
    pub fn get(&self, id: &[u8; 16]) -> Result<Option<TurnRecord>> {
        let turn = self.get_for_descendants(id)?;
        Ok(turn.filter(|turn| !turn.hidden))
    }

    /// A turn with its tokens, also a tombstone.
    pub fn get_for_descendants(&self, id: &[u8; 16]) -> Result<Option<TurnRecord>> {
        let engine = self.database.get()?;
        Tables::new(&engine, self.database.name()).turn(id)
    }

    /// All tokens from the root to the end of turn `id`, tombstones' too. `None`: `id` is unknown.
    pub fn chain(&self, id: &[u8; 16]) -> Result<Option<Vec<u32>>> {
        let path = self.path(id)?;
        Ok(path.map(|turns| turns.into_iter().flat_map(|turn| turn.tokens).collect()))
    }

    /// The turns from the root to `id`, tombstones too. `None`: `id` is unknown.
    pub fn path(&self, id: &[u8; 16]) -> Result<Option<Vec<TurnRecord>>> {
        let engine = self.database.get()?;
        Tables::new(&engine, self.database.name()).path(id)
    }

    /// Turns that continue `id`, tombstones too.
    pub fn num_children(&self, id: &[u8; 16]) -> Result<usize> {
        let engine = self.database.get()?;
        Tables::new(&engine, self.database.name()).num_children(id, usize::MAX)
    }

    /// Stores turns, all or none, durable when it returns. A turn of the same id is replaced. A parent must be stored
    /// already or come earlier in `turns`. [`TierError::Full`] and [`TierError::ReadOnly`] mean that token logs cannot be
    /// written now.
    pub fn put(&self, turns: Vec<TurnRecord>) -> Result<()> {
        self.wait_for(Op::Put(turns)).map(|_| ())
    }

    /// As [`TurnStore::put`] without waiting: `on_done` runs on the writing thread, after the sync.
    pub fn put_then(&self, turns: Vec<TurnRecord>, on_done: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        let done = Box::new(move |result: Result<Removed>| on_done(result.map(|_| ())));
        self.submit(Op::Put(turns), done, false)
    }

    /// Deletes a turn for its client, durably. `None`: unknown or deleted already.
    ///
    /// The chunks of what is removed for good, as `keys_of` names them, are doomed in the same write. Removals in `kv/` have no
    /// log and come back after a kill: remove these keys there, flush it, then [`TurnStore::forget_doomed`]; after a restart begin
    /// with [`TurnStore::doomed_chunks`].
    pub fn delete(&self, id: &[u8; 16], keys_of: KeysOf) -> Result<Option<Removed>> {
        let removed = self.wait_for(Op::Delete { id: *id, keys_of })?;
        Ok((!removed.ids.is_empty()).then_some(removed))
    }

    /// Chunks of deleted turns whose removal from `kv/` was not confirmed.
    pub fn doomed_chunks(&self) -> Result<Vec<ChunkKey>> {
        let engine = self.database.get()?;
        Tables::new(&engine, self.database.name()).doomed()
    }

    /// Confirms that chunks are gone from `kv/` for good.
    pub fn forget_doomed(&self, chunks: &[ChunkKey]) -> Result<()> {
        self.wait_for(Op::ForgetDoomed(chunks.to_vec())).map(|_| ())
    }

    /// Removes turns made more than the TTL before `now_unix`; those with younger descendants become tombstones. Gives both, and
    /// dooms chunks as [`TurnStore::delete`] does.
    pub fn expire(&self, now_unix: u64, keys_of: &KeysOf) -> Result<Removed> {
        let mut expired = Removed::default();
        loop {
            let before = now_unix.saturating_sub(self.ttl.as_secs());
            let here = self.wait_for(Op::Expire { before, limit: EXPIRE_BATCH, keys_of: Arc::clone(keys_of) })?;
            let is_last = here.ids.len() < EXPIRE_BATCH;
            expired.ids.extend(here.ids);
            expired.logs.extend(here.logs);
            if is_last {
                return Ok(expired);
            }
        }
    }

    /// See [`TurnStoreConfig::ttl`].
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// `used_bytes` is what lies in the folder; `num_chunks` is not counted and stays 0.
    pub fn usage(&self) -> Usage {
        self.database.usage()
    }

    pub fn health(&self) -> Health {
        self.database.health()
    }

    /// What tenants' salts are derived from; created once, kept in a file of mode 0600.
    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }

    /// Writes what waits, syncs, and closes the database. Calling it again is `Ok`.
    pub fn close(&self, deadline: Instant) -> Result<()> {
        drop(self.requests.lock().take());
        if let Some(thread) = self.thread.lock().take() {
            if thread.join().is_err() {
                tracing::error!("the turn store's thread panicked");
            }
        }
        self.database.close(deadline)
    }

    fn wait_for(&self, op: Op) -> Result<Removed> {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let done = Box::new(move |result| {
            // The receiver waits below for as long as this closure lives.
            let _ = sender.send(result);
        });
        self.submit(op, done, true)?;
        let closed = |_| TierError::Closed { tier: Arc::clone(self.database.name()) };
        receiver.recv().map_err(closed)?
    }

    fn submit(&self, op: Op, done: writer::Done, wait: bool) -> Result<()> {
        let tier = Arc::clone(self.database.name());
        let Some(sender) = self.requests.lock().clone() else {
            return Err(TierError::Closed { tier });
        };
        let request = Request { op, done };
        if wait {
            let closed = |_| TierError::Closed { tier };
            return sender.send(request).map_err(closed);
        }
        sender.try_send(request).map_err(|error| match error {
            crossbeam_channel::TrySendError::Full(_) => TierError::Busy { tier },
            crossbeam_channel::TrySendError::Disconnected(_) => TierError::Closed { tier },
        })
    }
}

impl Drop for TurnStore {
    fn drop(&mut self) {
        if let Err(error) = self.close(Instant::now() + Duration::from_secs(5)) {
            tracing::warn!(%error, "turn store not closed cleanly");
        }
    }
}

#[cfg(test)]
mod tests;
