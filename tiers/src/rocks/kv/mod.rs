//! Chunks in RocksDB: column families `index` (key -> meta) and `blob` (key -> header and payload, in blob files).
//!
//! Both are written in one batch without a log and flushed atomically, so after a kill a chunk is whole or absent. Of the
//! index only what is being read or written is in memory.
//!
//! Space: `used_bytes` counts chunks and falls when they are removed; `physical_bytes` is what lies in the folder and
//! follows when the maintenance thread has collected garbage. `reserve` answers `None` when either would pass 95% of the
//! cap, so the folder stays within it.

mod config;
mod store;

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocksdb::WriteBatch;

pub use config::KvStoreConfig;
pub(super) use config::{BLOB, INDEX};
pub(super) use store::KvStore;

use super::database::storage_error;
use super::maintenance::Maintenance;
use crate::codec::{self, CHUNK_HEADER_BYTES};
use crate::ledger::check_size;
use crate::{
    Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, TierError, Usage,
};

/// Chunks on disk.
pub struct RocksTier {
    store: Arc<KvStore>,
    maintenance: Maintenance,
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
        let writer = BlobWriter { store: Arc::clone(store), key: *key, meta: *meta, stored: Vec::new() };
        let name = Arc::clone(store.database.name());
        Ok(Some(Place::new(name, capability(), *key, *meta, Box::new(writer))))
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        let store = &self.store;
        let Ok(engine) = store.database.get() else {
            return Ok(None);
        };
        if !store.begin_pin(key) {
            return Ok(None);
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
        self.store.chunks(&engine)
    }

    fn health(&self) -> Health {
        self.store.database.health()
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        if self.store.database.is_closed() {
            return Ok(());
        }
        let mut flushed = Ok(());
        if let Ok(engine) = self.store.database.get_writable() {
            flushed = self.store.flush(&engine);
            // The maintenance thread may be in the middle of a long compaction.
            self.maintenance.begin_stop();
            engine.cancel_all_background_work(false);
        }
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
        let make = || {
            let mut batch = WriteBatch::default();
            batch.put_cf(store.family(&engine, BLOB), key.0, &stored);
            batch
        };
        store.write(&engine, &make)?;
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

struct BlobWriter {
    store: Arc<KvStore>,
    key: ChunkKey,
    meta: ChunkMeta,
    /// Header and payload; made at the first write, so that waiting places take no memory.
    stored: Vec<u8>,
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
        self.store.give_room_back();
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
