//! The turn store's writing thread: gathers requests, applies them in order, syncs the log once, answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use rocksdb::{WriteBatch, DB};

use super::record::Tables;
use super::{KeysOf, Removed, TurnRecord};
use crate::rocks::database::{storage_error, Database};
use crate::{ChunkKey, Result, TierError};

/// Requests that share a sync.
const GROUP_REQUESTS: usize = 256;
/// How often an idle thread measures the folder and, after a failure, tries to recover.
const TICK: Duration = Duration::from_secs(1);
/// Space is pressed out of a nearly full store at most this often.
const COMPACT_EVERY: Duration = Duration::from_secs(10);

pub(super) type Done = Box<dyn FnOnce(Result<Removed>) + Send>;

pub(super) struct Request {
    pub(super) op: Op,
    pub(super) done: Done,
}

pub(super) enum Op {
    Put(Vec<TurnRecord>),
    Delete { id: [u8; 16], keys_of: KeysOf },
    ForgetDoomed(Vec<ChunkKey>),
    Expire { before: u64, limit: usize, keys_of: KeysOf },
}

pub(super) struct Writer {
    database: Arc<Database>,
    requests: Receiver<Request>,
    has_removed: bool,
    last_compaction: Instant,
    last_tick: Instant,
}

impl Writer {
    pub(super) fn new(database: Arc<Database>, requests: Receiver<Request>) -> Self {
        Self { database, requests, has_removed: true, last_compaction: Instant::now(), last_tick: Instant::now() }
    }

    /// Until every sender is gone and the queue is empty.
    pub(super) fn run(mut self) {
        loop {
            match self.requests.recv_timeout(TICK) {
                Ok(first) => {
                    let more = self.requests.try_iter().take(GROUP_REQUESTS - 1);
                    let group: Vec<Request> = std::iter::once(first).chain(more).collect();
                    self.serve(group);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.last_tick.elapsed() >= TICK {
                self.tick();
                self.last_tick = Instant::now();
            }
        }
    }

    fn serve(&mut self, group: Vec<Request>) {
        let mut answers: Vec<(Done, Result<Removed>)> = Vec::with_capacity(group.len());
        match self.database.get_writable() {
            Ok(engine) => {
                for Request { op, done } in group {
                    answers.push((done, self.apply(&engine, op)));
                }
                if answers.iter().any(|(_, answer)| answer.is_ok()) {
                    if let Err(error) = engine.flush_wal(true) {
                        self.database.set_read_only(error.as_ref());
                        for (_, answer) in answers.iter_mut().filter(|(_, answer)| answer.is_ok()) {
                            *answer = Err(storage_error(self.database.name(), "sync", error.clone()));
                        }
                    }
                }
            }
            Err(_) => answers.extend(group.into_iter().map(|request| (request.done, Err(self.refusal())))),
        }
        for (done, answer) in answers {
            done(answer);
        }
    }

    /// Why nothing is written now; busy if it would work again already.
    fn refusal(&self) -> TierError {
        let tier = Arc::clone(self.database.name());
        self.database.get_writable().err().unwrap_or(TierError::Busy { tier })
    }

    fn apply(&mut self, engine: &DB, op: Op) -> Result<Removed> {
        match op {
            Op::Put(turns) => self.put(engine, &turns).map(|()| Removed::default()),
            Op::Delete { id, keys_of } => self.delete(engine, id, &keys_of),
            Op::ForgetDoomed(keys) => self.forget_doomed(engine, &keys).map(|()| Removed::default()),
            Op::Expire { before, limit, keys_of } => self.expire(engine, before, limit, &keys_of),
        }
    }

    fn put(&mut self, engine: &DB, turns: &[TurnRecord]) -> Result<()> {
        let usage = self.database.usage();
        let new_bytes: usize = turns.iter().map(|turn| turn.tokens.len() * 4 + turn.items.len() + 256).sum();
        if usage.used_bytes + new_bytes as u64 > usage.full_at_bytes {
            return Err(TierError::Full {
                tier: Arc::clone(self.database.name()),
                used_bytes: usage.used_bytes,
                capacity_bytes: usage.capacity_bytes,
            });
        }
        let tables = Tables::new(engine, self.database.name());
        let mut batch = WriteBatch::default();
        for (index, turn) in turns.iter().enumerate() {
            if let Some(parent) = turn.parent {
                let is_earlier = turns[..index].iter().any(|other| other.id == parent);
                if !is_earlier && !tables.has_turn(&parent)? {
                    let reason = "the parent of the turn is not stored";
                    return Err(TierError::invalid(self.database.name(), reason));
                }
            }
            tables.add(&mut batch, turn)?;
        }
        self.write(engine, batch)
    }

    fn delete(&mut self, engine: &DB, id: [u8; 16], keys_of: &KeysOf) -> Result<Removed> {
        let tables = Tables::new(engine, self.database.name());
        let mut batch = WriteBatch::default();
        let removal = tables.remove(&mut batch, &id)?;
        if !removal.was_visible {
            return Ok(Removed::default());
        }
        for key in removal.log.iter().flat_map(|log| keys_of(log)) {
            tables.doom(&mut batch, &key);
        }
        self.has_removed = true;
        self.write(engine, batch)?;
        Ok(Removed { ids: vec![id], logs: removal.log.into_iter().collect() })
    }

    fn forget_doomed(&mut self, engine: &DB, keys: &[ChunkKey]) -> Result<()> {
        let tables = Tables::new(engine, self.database.name());
        let mut batch = WriteBatch::default();
        for key in keys {
            tables.forget_doomed(&mut batch, key);
        }
        self.write(engine, batch)
    }

    /// Each turn is a batch of its own, since each decision must see the one before. Gives every turn looked at.
    fn expire(&mut self, engine: &DB, before: u64, limit: usize, keys_of: &KeysOf) -> Result<Removed> {
        let tables = Tables::new(engine, self.database.name());
        let mut removed = Removed::default();
        for (created_at, id) in tables.expired(before, limit)? {
            let mut batch = WriteBatch::default();
            let turn = tables.turn(&id)?;
            if turn.is_some_and(|turn| turn.created_at == created_at) {
                let log = tables.remove(&mut batch, &id)?.log;
                for key in log.iter().flat_map(|log| keys_of(log)) {
                    tables.doom(&mut batch, &key);
                }
                removed.logs.extend(log);
            }
            tables.drop_expiry(&mut batch, created_at, &id);
            self.has_removed = true;
            self.write(engine, batch)?;
            removed.ids.push(id);
        }
        Ok(removed)
    }

    /// Into the log, not synced yet.
    fn write(&self, engine: &DB, batch: WriteBatch) -> Result<()> {
        self.database.write(engine, true, &|| WriteBatch::from_data(batch.data()))
    }

    fn tick(&mut self) {
        if let Ok(engine) = self.database.get_writable() {
            // A failure sets the health, which is what the next line looks at.
            let _ = self.database.check_background(&engine);
        }
        self.database.try_recover(|_| Ok(()));
        self.database.measure(0);
        let usage = self.database.usage();
        let is_nearly_full = usage.used_bytes >= usage.capacity_bytes / 10 * 9;
        if is_nearly_full && self.has_removed && self.last_compaction.elapsed() >= COMPACT_EVERY {
            self.has_removed = false;
            self.last_compaction = Instant::now();
            self.database.compact();
            self.database.measure(0);
        }
    }
}
