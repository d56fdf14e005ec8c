//! Which chunks a tier of equal slots holds: the bookkeeping that the device and DRAM tiers share.
//!
//! A slot is free, in a place, or committed; a committed one may be pinned. Free slots belong to the [`Storage`].

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::{Capability, ChunkKey, ChunkMeta, PinReader, Pinned, Place, PlaceWriter, Result, TierError};

/// Memory in slots of one chunk each, with its free list.
pub(crate) trait Storage: Send + Sync + 'static {
    type Slot: Copy + Send + Sync;

    fn name(&self) -> &Arc<str>;
    fn chunk_bytes(&self) -> usize;
    fn take(&self) -> Option<Self::Slot>;
    fn give_back(&self, slot: Self::Slot);
    /// The caller owns the slot.
    fn write(&self, slot: Self::Slot, offset: usize, bytes: &[u8]) -> Result<()>;
    /// The caller holds the slot, and nobody writes it.
    fn read(&self, slot: Self::Slot, offset: usize, out: &mut [u8]) -> Result<()>;
    /// A slot's own memory, `chunk_bytes` long and valid as long as the storage.
    fn memory(&self, _slot: Self::Slot) -> Option<NonNull<u8>> {
        None
    }
}

pub(crate) struct Ledger<S: Storage> {
    storage: Arc<S>,
    state: Mutex<State<S::Slot>>,
}

struct State<T> {
    chunks: HashMap<ChunkKey, Held<T>>,
    num_reserved: u64,
    closed: bool,
}

struct Held<T> {
    meta: ChunkMeta,
    slot: T,
    num_pins: u32,
}

#[derive(Clone, Copy)]
pub(crate) struct Count {
    pub(crate) num_chunks: u64,
    pub(crate) num_reserved: u64,
}

impl<S: Storage> Ledger<S> {
    pub(crate) fn new(storage: Arc<S>) -> Self {
        let state = State { chunks: HashMap::new(), num_reserved: 0, closed: false };
        Self { storage, state: Mutex::new(state) }
    }

    pub(crate) fn count(&self) -> Count {
        let state = self.state.lock();
        Count { num_chunks: state.chunks.len() as u64, num_reserved: state.num_reserved }
    }

    pub(crate) fn reserve(
        this: &Arc<Self>,
        capability: Capability,
        key: &ChunkKey,
        meta: &ChunkMeta,
    ) -> Result<Option<Place>> {
        let storage = &this.storage;
        check_size(storage.name(), meta, storage.chunk_bytes())?;
        let mut state = this.state.lock();
        if state.closed {
            return Ok(None);
        }
        let Some(slot) = storage.take() else {
            return Ok(None);
        };
        state.num_reserved += 1;
        let writer = SlotWriter { ledger: Arc::clone(this), key: *key, meta: *meta, slot: Some(slot) };
        let name = Arc::clone(storage.name());
        Ok(Some(Place::new(name, capability, *key, *meta, Box::new(writer))))
    }

    pub(crate) fn pin(this: &Arc<Self>, capability: Capability, key: &ChunkKey) -> Option<Pinned> {
        let mut state = this.state.lock();
        if state.closed {
            return None;
        }
        let held = state.chunks.get_mut(key)?;
        held.num_pins += 1;
        let reader = SlotReader { ledger: Arc::clone(this), key: *key, slot: held.slot };
        let name = Arc::clone(this.storage.name());
        Some(Pinned::new(name, capability, *key, held.meta, Box::new(reader)))
    }

    pub(crate) fn remove(&self, key: &ChunkKey) -> bool {
        let mut state = self.state.lock();
        let Entry::Occupied(entry) = state.chunks.entry(*key) else {
            return false;
        };
        if entry.get().num_pins > 0 {
            return false;
        }
        self.storage.give_back(entry.remove().slot);
        true
    }

    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
    }
}

/// Refuses chunks of another layout before they are written over one of this layout.
pub(crate) fn check_size(tier: &Arc<str>, meta: &ChunkMeta, chunk_bytes: usize) -> Result<()> {
    if meta.bytes == chunk_bytes as u64 {
        return Ok(());
    }
    let reason = format!("a chunk of {} bytes, where {chunk_bytes} is the size", meta.bytes);
    Err(TierError::invalid(tier, reason))
}

struct SlotWriter<S: Storage> {
    ledger: Arc<Ledger<S>>,
    key: ChunkKey,
    meta: ChunkMeta,
    /// `None` once committed.
    slot: Option<S::Slot>,
}

impl<S: Storage> SlotWriter<S> {
    fn slot(&self) -> S::Slot {
        self.slot.expect("only commit takes the slot, and it consumes the writer")
    }
}

impl<S: Storage> PlaceWriter for SlotWriter<S> {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.ledger.storage.write(self.slot(), offset, bytes)
    }

    fn host_slice(&mut self) -> Option<&mut [u8]> {
        let memory = self.ledger.storage.memory(self.slot())?;
        let len = self.ledger.storage.chunk_bytes();
        // SAFETY: the memory is `len` bytes and lives as long as the storage, which this writer holds. The slot is neither
        // free nor committed, so this writer alone reaches it, and `&mut self` makes the slice the only one.
        Some(unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), len) })
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        let ledger = Arc::clone(&self.ledger);
        let mut state = ledger.state.lock();
        if state.closed {
            drop(state);
            let tier = Arc::clone(ledger.storage.name());
            return Err(TierError::Closed { tier });
        }
        if let Entry::Vacant(entry) = state.chunks.entry(self.key) {
            let slot = self.slot.take().expect("a writer commits once");
            entry.insert(Held { meta: self.meta, slot, num_pins: 0 });
            state.num_reserved -= 1;
        }
        // Dropping `self` with a second copy takes the lock again.
        drop(state);
        Ok(())
    }
}

impl<S: Storage> Drop for SlotWriter<S> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            let mut state = self.ledger.state.lock();
            state.num_reserved -= 1;
            self.ledger.storage.give_back(slot);
        }
    }
}

struct SlotReader<S: Storage> {
    ledger: Arc<Ledger<S>>,
    key: ChunkKey,
    slot: S::Slot,
}

impl<S: Storage> PinReader for SlotReader<S> {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.ledger.storage.read(self.slot, offset, out)
    }

    fn host_slice(&self) -> Option<&[u8]> {
        let memory = self.ledger.storage.memory(self.slot)?;
        let len = self.ledger.storage.chunk_bytes();
        // SAFETY: the memory is `len` bytes and lives as long as the storage, which this reader holds. A committed slot is
        // written by nobody, and the pin keeps it from being given back.
        Some(unsafe { std::slice::from_raw_parts(memory.as_ptr(), len) })
    }
}

impl<S: Storage> Drop for SlotReader<S> {
    fn drop(&mut self) {
        let mut state = self.ledger.state.lock();
        let held = state.chunks.get_mut(&self.key);
        held.expect("a pinned chunk is not removed").num_pins -= 1;
    }
}
