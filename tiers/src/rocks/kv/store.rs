//! The kv store's records and what is known about them: the tier without its face and its thread.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use rocksdb::{ErrorKind, IteratorMode, WriteBatch, DB};

use super::config::{database_config, KvStoreConfig, BLOB, INDEX};
use crate::rocks::database::{storage_error, Database};
use crate::{codec, ChunkKey, ChunkMeta, Result, TierError, Usage};

pub(crate) struct KvStore {
    pub(crate) database: Database,
    pub(crate) config: KvStoreConfig,
    state: Mutex<State>,
    /// A key stopped being busy.
    settled: Condvar,
    /// Something was written or removed since the last flush.
    pub(crate) is_dirty: AtomicBool,
    /// Disk space that a running garbage collection may take for a while.
    pub(crate) collecting_bytes: AtomicU64,
    /// `reserve` was refused for garbage: collect soon.
    pub(crate) wants_space: AtomicBool,
}

#[derive(Default)]
struct State {
    num_chunks: u64,
    num_reserved: u64,
    pins: HashMap<ChunkKey, u32>,
    /// Keys whose records are being written or deleted.
    busy: HashSet<ChunkKey>,
    /// Keys that are gone for everybody although their records may still be there: damaged ones that are pinned, and
    /// removals that could not be written.
    condemned: HashSet<ChunkKey>,
}

impl KvStore {
    pub(super) fn open(config: KvStoreConfig) -> Result<Self> {
        let store = Self {
            database: Database::open(database_config(&config))?,
            config,
            state: Mutex::default(),
            settled: Condvar::new(),
            is_dirty: false.into(),
            collecting_bytes: AtomicU64::new(0),
            wants_space: false.into(),
        };
        if let Ok(engine) = store.database.get() {
            store.take_stock(&engine)?;
        }
        Ok(store)
    }

    /// Counts what is there, and lets go of what is condemned or foreign. Runs before anyone else uses the engine.
    pub(crate) fn take_stock(&self, engine: &DB) -> Result<()> {
        let mut num_chunks = 0;
        let mut unusable: Vec<ChunkKey> = self.state.lock().condemned.drain().collect();
        let condemned: HashSet<ChunkKey> = unusable.iter().copied().collect();
        self.for_each_entry(engine, |key, meta| match meta {
            _ if condemned.contains(&key) => {}
            Some(_) => num_chunks += 1,
            None => unusable.push(key),
        })?;
        for key in unusable {
            self.write(engine, &|| self.deletion(engine, &key))?;
        }
        self.state.lock().num_chunks = num_chunks;
        Ok(())
    }

    pub(super) fn usage(&self) -> Usage {
        let state = self.state.lock();
        let stored_bytes = self.config.stored_bytes();
        Usage {
            used_bytes: (state.num_chunks + state.num_reserved) * stored_bytes,
            reserved_bytes: state.num_reserved * stored_bytes,
            num_chunks: state.num_chunks,
            ..self.database.usage()
        }
    }

    /// What the folder holds beyond the chunks.
    pub(crate) fn garbage_bytes(&self) -> u64 {
        let used_bytes = self.state.lock().num_chunks * self.config.stored_bytes();
        self.database.physical_bytes().saturating_sub(used_bytes)
    }

    /// Counts a place's room in, if there is any; [`KvStore::give_room_back`] counts it out.
    pub(super) fn take_room(&self) -> bool {
        if !self.database.health().is_ok() {
            return false;
        }
        let limits = self.database.usage();
        let stored_bytes = self.config.stored_bytes();
        let collecting_bytes = self.collecting_bytes.load(Ordering::Acquire);
        let mut state = self.state.lock();
        let reserved_bytes = (state.num_reserved + 1) * stored_bytes;
        let logical_bytes = state.num_chunks * stored_bytes + reserved_bytes;
        let physical_bytes = limits.physical_bytes + reserved_bytes + collecting_bytes;
        if logical_bytes.max(physical_bytes) > limits.full_at_bytes {
            return false;
        }
        state.num_reserved += 1;
        true
    }

    pub(super) fn give_room_back(&self) {
        self.state.lock().num_reserved -= 1;
    }

    /// Holds a key against removal. `false`: it is not there for anybody at the moment.
    pub(super) fn begin_pin(&self, key: &ChunkKey) -> bool {
        let mut state = self.state.lock();
        if state.busy.contains(key) || state.condemned.contains(key) {
            return false;
        }
        *state.pins.entry(*key).or_default() += 1;
        true
    }

    /// All chunks that are there for somebody.
    pub(super) fn chunks(&self, engine: &DB) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        let condemned = self.state.lock().condemned.clone();
        let mut chunks = Vec::new();
        self.for_each_entry(engine, |key, meta| {
            if let Some(meta) = meta.filter(|_| !condemned.contains(&key)) {
                chunks.push((key, meta));
            }
        })?;
        Ok(chunks)
    }

    /// A new chunk's records. Waits for another writer of the same key, so that "the first stays" is decided.
    pub(super) fn commit(&self, key: &ChunkKey, meta: &ChunkMeta, stored: &[u8]) -> Result<()> {
        // Held to the end: a reopening counts chunks only when no commit is under way.
        let engine = self.database.get_writable()?;
        let mut state = self.state.lock();
        while state.busy.contains(key) {
            self.settled.wait(&mut state);
        }
        let is_condemned = state.condemned.contains(key);
        state.busy.insert(*key);
        drop(state);

        let written = self.write_chunk(&engine, key, meta, stored, is_condemned);
        let mut state = self.state.lock();
        state.busy.remove(key);
        if let Ok(true) = written {
            state.num_chunks += 1;
            state.condemned.remove(key);
        }
        drop(state);
        self.settled.notify_all();
        written.map(|_| ())
    }

    /// `false`: the key is there already.
    fn write_chunk(
        &self,
        engine: &DB,
        key: &ChunkKey,
        meta: &ChunkMeta,
        stored: &[u8],
        overwrite: bool,
    ) -> Result<bool> {
        if !overwrite && self.meta(engine, key)?.is_some() {
            return Ok(false);
        }
        let make = || {
            let mut batch = WriteBatch::default();
            batch.put_cf(self.family(engine, INDEX), key.0, codec::encode_meta(meta));
            batch.put_cf(self.family(engine, BLOB), key.0, stored);
            batch
        };
        self.write(engine, &make)?;
        Ok(true)
    }

    pub(super) fn remove(&self, key: &ChunkKey) -> Result<bool> {
        let engine = self.database.get();
        let mut state = self.state.lock();
        let is_held = state.pins.contains_key(key) || state.busy.contains(key);
        if is_held || state.condemned.contains(key) || self.database.is_closed() {
            return Ok(false);
        }
        let Ok(engine) = engine else {
            // Nothing can be asked now; it is gone when the database comes back.
            return Ok(state.condemned.insert(*key));
        };
        state.busy.insert(*key);
        drop(state);

        let found = self.meta(&engine, key);
        let deleted = match found {
            Ok(Some(_)) => Some(self.write(&engine, &|| self.deletion(&engine, key))),
            _ => None,
        };
        let mut state = self.state.lock();
        state.busy.remove(key);
        if let Some(deleted) = &deleted {
            state.num_chunks -= 1;
            if deleted.is_err() {
                state.condemned.insert(*key);
            }
        }
        drop(state);
        self.settled.notify_all();
        found.map(|meta| meta.is_some())
    }

    /// Fills `out` with a range of the payload, after checking the whole.
    pub(super) fn read(&self, key: &ChunkKey, meta: &ChunkMeta, offset: usize, out: &mut [u8]) -> Result<()> {
        let engine = self.database.get()?;
        let read = self.read_checked(&engine, key, meta, offset, out);
        if read.is_err() {
            // One failed load, then a miss: whatever is wrong with it, recomputing is cheaper than trying again.
            let mut state = self.state.lock();
            if state.condemned.insert(*key) {
                state.num_chunks -= 1;
            }
        }
        read
    }

    fn read_checked(&self, engine: &DB, key: &ChunkKey, meta: &ChunkMeta, offset: usize, out: &mut [u8]) -> Result<()> {
        let tier = self.database.name();
        let corrupt = |reason: String| TierError::Corrupt { tier: Arc::clone(tier), key: *key, reason };
        let stored = engine.get_pinned_cf(self.family(engine, BLOB), key.0);
        let stored = stored.map_err(|error| match error.kind() {
            ErrorKind::Corruption => corrupt(error.to_string()),
            _ => storage_error(tier, "read", error),
        })?;
        let Some(stored) = stored else {
            let tier = Arc::clone(tier);
            return Err(TierError::Gone { tier, key: *key });
        };
        let payload = codec::decode_chunk(key, meta, &stored);
        let payload = payload.map_err(|damage| corrupt(damage.0))?;
        out.copy_from_slice(&payload[offset..offset + out.len()]);
        Ok(())
    }

    pub(super) fn unpin(&self, key: &ChunkKey) {
        let engine = self.database.get();
        let mut state = self.state.lock();
        let pins = state.pins.get_mut(key).expect("a pin is counted until it is dropped");
        *pins -= 1;
        if *pins > 0 {
            return;
        }
        state.pins.remove(key);
        let Ok(engine) = engine else {
            return;
        };
        if !state.condemned.contains(key) || !state.busy.insert(*key) {
            return;
        }
        drop(state);
        let deleted = self.write(&engine, &|| self.deletion(&engine, key));
        let mut state = self.state.lock();
        state.busy.remove(key);
        if deleted.is_ok() {
            state.condemned.remove(key);
        }
        drop(state);
        self.settled.notify_all();
    }

    pub(super) fn meta(&self, engine: &DB, key: &ChunkKey) -> Result<Option<ChunkMeta>> {
        let tier = self.database.name();
        let stored = engine.get_pinned_cf(self.family(engine, INDEX), key.0);
        let stored = stored.map_err(|e| storage_error(tier, "read its index", e))?;
        Ok(stored.and_then(|stored| self.usable(&stored)))
    }

    /// `None`: damaged, or of another model or layout.
    fn usable(&self, stored: &[u8]) -> Option<ChunkMeta> {
        let meta = codec::decode_meta(stored).ok()?;
        let is_ours = meta.layout_id == self.config.layout_id && meta.bytes == self.config.layout.chunk_bytes() as u64;
        is_ours.then_some(meta)
    }

    fn for_each_entry(&self, engine: &DB, mut visit: impl FnMut(ChunkKey, Option<ChunkMeta>)) -> Result<()> {
        let index = self.family(engine, INDEX);
        for entry in engine.iterator_cf(index, IteratorMode::Start) {
            let tier = self.database.name();
            let (key, stored) = entry.map_err(|e| storage_error(tier, "read its index", e))?;
            if let Ok(key) = <[u8; 16]>::try_from(&key[..]) {
                visit(ChunkKey(key), self.usable(&stored));
            }
        }
        Ok(())
    }

    fn deletion(&self, engine: &DB, key: &ChunkKey) -> WriteBatch {
        let mut batch = WriteBatch::default();
        batch.delete_cf(self.family(engine, INDEX), key.0);
        batch.delete_cf(self.family(engine, BLOB), key.0);
        batch
    }

    pub(super) fn write(&self, engine: &DB, make: &dyn Fn() -> WriteBatch) -> Result<()> {
        self.is_dirty.store(true, Ordering::Release);
        self.database.write(engine, false, make)
    }

    /// Both column families to one moment in time.
    pub(crate) fn flush(&self, engine: &DB) -> Result<()> {
        if !self.is_dirty.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let flushed = self.database.flush(engine, &[INDEX, BLOB]);
        if flushed.is_err() {
            self.is_dirty.store(true, Ordering::Release);
        }
        flushed
    }

    pub(crate) fn family<'a>(&self, engine: &'a DB, name: &str) -> &'a rocksdb::ColumnFamily {
        let family = engine.cf_handle(name);
        family.expect("the database was opened with all its column families")
    }
}
