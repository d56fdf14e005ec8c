//! The oracle: the simplest tier that keeps the contract, one map behind one lock. Every backend is compared with it, so
//! it shares no code with them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::{
    Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, TierError, Usage,
};

/// Chunks in a map.
#[derive(Clone)]
pub struct MemoryTier {
    name: Arc<str>,
    capacity_bytes: u64,
    chunk_bytes: usize,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    chunks: HashMap<ChunkKey, (ChunkMeta, Arc<Vec<u8>>)>,
    reserved_bytes: u64,
    closed: bool,
}

impl MemoryTier {
    pub fn new(name: &str, capacity_bytes: u64, chunk_bytes: usize) -> Self {
        Self { name: Arc::from(name), capacity_bytes, chunk_bytes, state: Arc::default() }
    }
}

impl Tier for MemoryTier {
    fn name(&self) -> &str {
        &self.name
    }

    fn capability(&self) -> Capability {
        Capability::default()
    }

    fn usage(&self) -> Usage {
        let state = self.state.lock();
        let num_chunks = state.chunks.len() as u64;
        let used_bytes = num_chunks * self.chunk_bytes as u64 + state.reserved_bytes;
        Usage {
            capacity_bytes: self.capacity_bytes,
            used_bytes,
            reserved_bytes: state.reserved_bytes,
            physical_bytes: used_bytes,
            num_chunks,
            evict_from_bytes: self.capacity_bytes,
            full_at_bytes: self.capacity_bytes,
        }
    }

    fn reserve(&self, key: &ChunkKey, meta: &ChunkMeta) -> Result<Option<Place>> {
        if meta.bytes != self.chunk_bytes as u64 {
            let reason = format!("a chunk of {} bytes", meta.bytes);
            return Err(TierError::invalid(&self.name, reason));
        }
        let mut state = self.state.lock();
        let used_bytes = state.chunks.len() as u64 * meta.bytes + state.reserved_bytes;
        if state.closed || used_bytes + meta.bytes > self.capacity_bytes {
            return Ok(None);
        }
        state.reserved_bytes += meta.bytes;
        drop(state);
        let writer =
            Draft { tier: self.clone(), key: *key, meta: *meta, bytes: vec![0; self.chunk_bytes], is_reserved: true };
        let name = Arc::clone(&self.name);
        Ok(Some(Place::new(name, self.capability(), *key, *meta, Box::new(writer))))
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        let state = self.state.lock();
        let Some((meta, bytes)) = state.chunks.get(key).filter(|_| !state.closed) else {
            return Ok(None);
        };
        let reader = Held(Arc::clone(bytes));
        let name = Arc::clone(&self.name);
        Ok(Some(Pinned::new(name, self.capability(), *key, *meta, Box::new(reader))))
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
        let mut state = self.state.lock();
        let is_pinned = |bytes: &Arc<Vec<u8>>| Arc::strong_count(bytes) > 1;
        match state.chunks.get(key) {
            Some((_, bytes)) if !is_pinned(bytes) => Ok(state.chunks.remove(key).is_some()),
            _ => Ok(false),
        }
    }

    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        Ok(Vec::new())
    }

    fn health(&self) -> Health {
        Health::Ok
    }

    fn close(&self, _deadline: Instant) -> Result<()> {
        self.state.lock().closed = true;
        Ok(())
    }
}

struct Draft {
    tier: MemoryTier,
    key: ChunkKey,
    meta: ChunkMeta,
    bytes: Vec<u8>,
    is_reserved: bool,
}

impl PlaceWriter for Draft {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        let bytes = Arc::new(std::mem::take(&mut self.bytes));
        let mut state = self.tier.state.lock();
        if state.closed {
            let tier = Arc::clone(&self.tier.name);
            return Err(TierError::Closed { tier });
        }
        let chunk = (self.meta, bytes);
        state.chunks.entry(self.key).or_insert(chunk);
        state.reserved_bytes -= self.meta.bytes;
        self.is_reserved = false;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.is_reserved {
            self.tier.state.lock().reserved_bytes -= self.meta.bytes;
        }
    }
}

struct Held(Arc<Vec<u8>>);

impl PinReader for Held {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.0[offset..offset + out.len()]);
        Ok(())
    }
}
