//! Chunks in RocksDB: column families `index` (key -> meta) and `blob` (key -> header and payload, in blob files).
//!
//! Both are written in one batch without a log and flushed atomically, so after a kill a chunk is whole or absent. Of the
//! index only what is being read or written is in memory.
//!
//! Space: `used_bytes` counts chunks and falls when they are removed; `physical_bytes` is what lies in the folder and
//! follows when the maintenance thread has collected garbage. `reserve` answers `None` when either would pass 95% of the
//! cap, so the folder stays within it.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use keepsake_config::{RocksOptions, TierConfig};
use keepsake_kernels::KvLayout;
use parking_lot::{Condvar, Mutex};
use rocksdb::{ColumnFamilyDescriptor, ErrorKind, FlushOptions, IteratorMode, Options, WriteBatch, WriteOptions, DB};

use super::database::{base_options, storage_error, Database, DatabaseConfig};
use super::maintenance::Maintenance;
use crate::codec::{self, CHUNK_HEADER_BYTES};
use crate::ledger::check_size;
use crate::registry::{under, TierContext};
use crate::{
    Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, TierError, Usage,
};

pub(super) const INDEX: &str = "index";
pub(super) const BLOB: &str = "blob";
/// What a chunk costs on disk beside its bytes: entries in both column families, headers of record and file.
const ENTRY_BYTES: u64 = 256;
/// Files are allocated in blocks.
const BLOCK_BYTES: u64 = 4096;
/// A blob file is dropped once nothing in it is alive, so at best it holds one chunk. Not too many files, though, and not
/// smaller ones than are worth their block.
const MAX_BLOB_FILES: u64 = 65_536;
const MIN_BLOB_FILE_BYTES: u64 = 64 << 10;

/// Where, how large and for which chunks.
#[derive(Clone, Debug)]
pub struct KvStoreConfig {
    pub name: String,
    /// The folder `kv`.
    pub path: PathBuf,
    /// Cap on every byte in the folder.
    pub capacity_bytes: u64,
    /// Memory of RocksDB's write buffers; a 64th of the capacity (2 to 128 MiB) when absent.
    pub write_buffer_bytes: Option<u64>,
    /// How long a committed chunk may wait for a flush; a kill loses at most that much.
    pub flush_interval: Duration,
    pub layout: KvLayout,
    pub layout_id: [u8; 16],
}

impl KvStoreConfig {
    pub const FLUSH_INTERVAL: Duration = Duration::from_secs(5);

    pub fn from_tier(config: &TierConfig, context: &TierContext) -> Result<Self> {
        let options = RocksOptions::of(config).map_err(|error| under(&context.toml_path, error))?;
        let kv = Self {
            name: config.name().to_owned(),
            path: config.folder().join("kv"),
            capacity_bytes: config.capacity.as_u64(),
            write_buffer_bytes: options.write_buffer.map(|size| size.as_u64()),
            flush_interval: Self::FLUSH_INTERVAL,
            layout: context.layout,
            layout_id: context.layout_id,
        };
        let least = 4 * kv.stored_bytes();
        if kv.capacity_bytes < least {
            let reason = format!("less than four chunks ({least} bytes)");
            return Err(context.refuse("capacity", config.capacity.to_string(), reason));
        }
        Ok(kv)
    }

    /// Memory that write buffers may take, for the sum of configured memory.
    pub fn write_buffers(&self) -> u64 {
        let scaled = (self.capacity_bytes / 64).clamp(2 << 20, 128 << 20);
        self.write_buffer_bytes.unwrap_or(scaled)
    }

    /// One chunk on disk.
    fn stored_bytes(&self) -> u64 {
        let bytes = self.layout.chunk_bytes() as u64 + CHUNK_HEADER_BYTES as u64 + ENTRY_BYTES;
        bytes.next_multiple_of(BLOCK_BYTES)
    }
}

/// Chunks on disk.
pub struct RocksTier {
    store: Arc<KvStore>,
    maintenance: Maintenance,
}

/// The store without its thread.
pub(super) struct KvStore {
    pub(super) database: Database,
    pub(super) config: KvStoreConfig,
    state: Mutex<State>,
    /// A key stopped being busy.
    settled: Condvar,
    /// Something was written or removed since the last flush.
    pub(super) is_dirty: AtomicBool,
    /// Disk space that a running garbage collection may take for a while.
    pub(super) collecting_bytes: AtomicU64,
    /// `reserve` was refused for garbage: collect soon.
    pub(super) wants_space: AtomicBool,
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

impl RocksTier {
    pub fn open(config: KvStoreConfig) -> Result<Self> {
        let store = Arc::new(KvStore::open(config)?);
        Ok(Self { maintenance: Maintenance::start(&store)?, store })
    }
}

impl Tier for RocksTier {
    fn name(&self) -> &str {
        self.store.database.name()
    }

    fn capability(&self) -> Capability {
        capability()
    }

    fn usage(&self) -> Usage {
        self.store.usage()
    }

    fn reserve(&self, key: &ChunkKey, meta: &ChunkMeta) -> Result<Option<Place>> {
        let store = &self.store;
        check_size(store.database.name(), meta, store.config.layout.chunk_bytes())?;
        if meta.layout_id != store.config.layout_id {
            let reason = format!("chunk {key} belongs to another model or layout");
            return Err(TierError::invalid(store.database.name(), reason));
        }
        if !store.take_room() {
            if store.garbage_bytes() > store.config.stored_bytes() {
                store.wants_space.store(true, Ordering::Release);
                self.maintenance.wake();
            }
            return Ok(None);
        }
        let writer =
            BlobWriter { store: Arc::clone(store), key: *key, meta: *meta, stored: Vec::new(), is_reserved: true };
        let name = Arc::clone(store.database.name());
        Ok(Some(Place::new(name, capability(), *key, *meta, Box::new(writer))))
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        let store = &self.store;
        let Ok(engine) = store.database.get() else {
            return Ok(None);
        };
        {
            let mut state = store.state.lock();
            if state.busy.contains(key) || state.condemned.contains(key) {
                return Ok(None);
            }
            *state.pins.entry(*key).or_default() += 1;
        }
        // From here on the pin comes back by itself.
        let mut reader = BlobReader { store: Arc::clone(store), key: *key, meta: None };
        let Some(meta) = store.meta(&engine, key)? else {
            return Ok(None);
        };
        reader.meta = Some(meta);
        let name = Arc::clone(store.database.name());
        Ok(Some(Pinned::new(name, capability(), *key, meta, Box::new(reader))))
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.store.remove(key)
    }

    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        let Ok(engine) = self.store.database.get() else {
            return Ok(Vec::new());
        };
        let condemned = self.store.state.lock().condemned.clone();
        let mut chunks = Vec::new();
        self.store.for_each_entry(&engine, |key, meta| {
            if let Some(meta) = meta.filter(|_| !condemned.contains(&key)) {
                chunks.push((key, meta));
            }
        })?;
        Ok(chunks)
    }

    fn health(&self) -> Health {
        self.store.database.health()
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        if self.store.database.is_closed() {
            return Ok(());
        }
        let flushed = match self.store.database.get_writable() {
            Ok(engine) => self.store.flush(&engine),
            Err(_) => Ok(()),
        };
        self.maintenance.stop();
        let closed = self.store.database.close(deadline);
        flushed.and(closed)
    }

    fn flush(&self) -> Result<()> {
        let engine = self.store.database.get_writable()?;
        self.store.flush(&engine)
    }

    fn tamper(&self, key: &ChunkKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> Result<bool> {
        let store = &self.store;
        let engine = store.database.get_writable()?;
        let stored = engine.get_cf(store.family(&engine, BLOB), key.0);
        let Some(mut stored) = stored.map_err(|e| storage_error(store.database.name(), "read", e))? else {
            return Ok(false);
        };
        change(&mut stored);
        let mut batch = WriteBatch::default();
        batch.put_cf(store.family(&engine, BLOB), key.0, stored);
        store.write(&engine, batch)?;
        Ok(true)
    }
}

impl Drop for RocksTier {
    fn drop(&mut self) {
        if let Err(error) = self.close(Instant::now() + Duration::from_secs(5)) {
            tracing::warn!(tier = self.name(), %error, "not closed cleanly");
        }
    }
}

fn capability() -> Capability {
    Capability { durable: true, ..Capability::default() }
}

impl KvStore {
    fn open(config: KvStoreConfig) -> Result<Self> {
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
    pub(super) fn take_stock(&self, engine: &DB) -> Result<()> {
        let mut num_chunks = 0;
        let mut unusable: Vec<ChunkKey> = self.state.lock().condemned.drain().collect();
        let condemned: HashSet<ChunkKey> = unusable.iter().copied().collect();
        self.for_each_entry(engine, |key, meta| match meta {
            _ if condemned.contains(&key) => {}
            Some(_) => num_chunks += 1,
            None => unusable.push(key),
        })?;
        for key in unusable {
            self.write(engine, self.deletion(engine, &key))?;
        }
        self.state.lock().num_chunks = num_chunks;
        Ok(())
    }

    fn usage(&self) -> Usage {
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
    pub(super) fn garbage_bytes(&self) -> u64 {
        let used_bytes = self.state.lock().num_chunks * self.config.stored_bytes();
        self.database.physical_bytes().saturating_sub(used_bytes)
    }

    fn take_room(&self) -> bool {
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

    /// A new chunk's records. Waits for another writer of the same key, so that "the first stays" is decided.
    fn commit(&self, key: &ChunkKey, meta: &ChunkMeta, stored: &[u8]) -> Result<()> {
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
        let mut batch = WriteBatch::default();
        batch.put_cf(self.family(engine, INDEX), key.0, codec::encode_meta(meta));
        batch.put_cf(self.family(engine, BLOB), key.0, stored);
        self.write(engine, batch)?;
        Ok(true)
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
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
            Ok(Some(_)) => Some(self.write(&engine, self.deletion(&engine, key))),
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
    fn read(&self, key: &ChunkKey, meta: &ChunkMeta, offset: usize, out: &mut [u8]) -> Result<()> {
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

    fn unpin(&self, key: &ChunkKey) {
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
        let deleted = self.write(&engine, self.deletion(&engine, key));
        let mut state = self.state.lock();
        state.busy.remove(key);
        if deleted.is_ok() {
            state.condemned.remove(key);
        }
        drop(state);
        self.settled.notify_all();
    }

    fn meta(&self, engine: &DB, key: &ChunkKey) -> Result<Option<ChunkMeta>> {
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

    fn write(&self, engine: &DB, batch: WriteBatch) -> Result<()> {
        let mut options = WriteOptions::default();
        options.disable_wal(true);
        self.database.add_written(batch.size_in_bytes() as u64);
        self.is_dirty.store(true, Ordering::Release);
        engine.write_opt(batch, &options).map_err(|error| {
            self.database.set_read_only(&error);
            storage_error(self.database.name(), "write", error)
        })
    }

    /// Both column families to one moment in time.
    pub(super) fn flush(&self, engine: &DB) -> Result<()> {
        let is_dirty = self.is_dirty.swap(false, Ordering::AcqRel);
        if !is_dirty {
            return Ok(());
        }
        let families = [self.family(engine, INDEX), self.family(engine, BLOB)];
        let flushed = engine.flush_cfs_opt(&families, &FlushOptions::default());
        flushed.map_err(|error| {
            self.is_dirty.store(true, Ordering::Release);
            self.database.set_read_only(&error);
            storage_error(self.database.name(), "flush", error)
        })
    }

    pub(super) fn family<'a>(&self, engine: &'a DB, name: &str) -> &'a rocksdb::ColumnFamily {
        let family = engine.cf_handle(name);
        family.expect("the database was opened with all its column families")
    }
}

fn database_config(config: &KvStoreConfig) -> DatabaseConfig {
    let write_buffers = config.write_buffers();
    let blob_file_bytes = (config.capacity_bytes / MAX_BLOB_FILES).max(MIN_BLOB_FILE_BYTES);
    let mut options = base_options();
    options.set_atomic_flush(true);
    options.set_db_write_buffer_size(write_buffers as usize);
    let families = move || {
        let mut index = Options::default();
        index.set_write_buffer_size((write_buffers / 2) as usize);
        let mut blob = Options::default();
        blob.set_write_buffer_size((write_buffers / 2) as usize);
        blob.set_max_write_buffer_number(2);
        blob.set_enable_blob_files(true);
        blob.set_min_blob_size(0);
        blob.set_blob_file_size(blob_file_bytes);
        blob.set_enable_blob_gc(true);
        // Only the maintenance thread relocates, within the space that it has set aside.
        blob.set_blob_gc_age_cutoff(0.0);
        vec![ColumnFamilyDescriptor::new(INDEX, index), ColumnFamilyDescriptor::new(BLOB, blob)]
    };
    DatabaseConfig {
        name: Arc::from(config.name.as_str()),
        path: config.path.clone(),
        capacity_bytes: config.capacity_bytes,
        options,
        families: Box::new(families),
        families_to_compact: &[INDEX, BLOB],
        probe_bytes: 2 * write_buffers + (1 << 20),
        is_recomputable: true,
    }
}

struct BlobWriter {
    store: Arc<KvStore>,
    key: ChunkKey,
    meta: ChunkMeta,
    /// Header and payload; made at the first write, so that waiting places take no memory.
    stored: Vec<u8>,
    is_reserved: bool,
}

impl PlaceWriter for BlobWriter {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        if self.stored.is_empty() {
            self.stored = codec::new_chunk(self.meta.bytes as usize);
        }
        let start = CHUNK_HEADER_BYTES + offset;
        self.stored[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        if self.stored.is_empty() {
            self.stored = codec::new_chunk(self.meta.bytes as usize);
        }
        codec::seal_chunk(&self.key, &self.meta, &mut self.stored);
        self.store.commit(&self.key, &self.meta, &self.stored)
    }
}

impl Drop for BlobWriter {
    fn drop(&mut self) {
        if self.is_reserved {
            self.store.state.lock().num_reserved -= 1;
        }
    }
}

struct BlobReader {
    store: Arc<KvStore>,
    key: ChunkKey,
    /// `None` while the index is being asked.
    meta: Option<ChunkMeta>,
}

impl PinReader for BlobReader {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let meta = self.meta.as_ref().expect("a pin is handed out with its meta");
        self.store.read(&self.key, meta, offset, out)
    }
}

impl Drop for BlobReader {
    fn drop(&mut self) {
        self.store.unpin(&self.key);
    }
}
