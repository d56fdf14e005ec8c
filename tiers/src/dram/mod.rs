//! The DRAM tier: a slab of chunks in host memory.
//!
//! Memory is allocated once, in segments of at most 1 GiB, exactly as many chunks as the capacity holds. The operating
//! system maps a page when it is first written and the last slot freed is the first one reused, so resident memory
//! follows use and never passes the capacity. Without CUDA it is plain heap memory.
//!
//! Copies here carry no checksum: damage in RAM would hit weights just as well, and at bus speed (tens of GB/s to a
//! GPU) a checksum by the CPU would be the slowest part of a swap-in. Disk copies carry one.

mod slab;

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use keepsake_kernels::KvLayout;

use crate::ledger::{Ledger, Storage};
use crate::{Capability, ChunkKey, ChunkMeta, Health, Pinned, Place, Result, Tier, TierError, Usage};
use slab::Slab;

/// Chunks in host memory.
pub struct DramTier {
    slots: Arc<Slots>,
    ledger: Arc<Ledger<Slots>>,
    capacity_bytes: u64,
}

struct Slots {
    name: Arc<str>,
    slab: Slab,
}

impl DramTier {
    /// Refuses a capacity under one chunk, and memory that the system does not give.
    pub fn new(name: &str, capacity_bytes: u64, layout: KvLayout) -> Result<Self> {
        let name: Arc<str> = Arc::from(name);
        let chunk_bytes = layout.chunk_bytes();
        let num_chunks = usize::try_from(capacity_bytes / chunk_bytes.max(1) as u64).unwrap_or(usize::MAX);
        if num_chunks == 0 {
            let reason = format!("capacity of {capacity_bytes} bytes, less than one chunk ({chunk_bytes})");
            return Err(TierError::invalid(&name, reason));
        }
        let Some(slab) = Slab::new(chunk_bytes, num_chunks) else {
            let reason = format!("the system gives no {capacity_bytes} bytes of memory");
            return Err(TierError::invalid(&name, reason));
        };
        let slots = Arc::new(Slots { name, slab });
        Ok(Self { ledger: Arc::new(Ledger::new(Arc::clone(&slots))), slots, capacity_bytes })
    }
}

impl Tier for DramTier {
    fn name(&self) -> &str {
        &self.slots.name
    }

    fn capability(&self) -> Capability {
        Capability { host_addressable: true, ..Capability::default() }
    }

    fn usage(&self) -> Usage {
        let count = self.ledger.count();
        let chunk_bytes = self.slots.slab.chunk_bytes() as u64;
        let used_bytes = (count.num_chunks + count.num_reserved) * chunk_bytes;
        Usage {
            capacity_bytes: self.capacity_bytes,
            used_bytes,
            reserved_bytes: count.num_reserved * chunk_bytes,
            physical_bytes: used_bytes,
            num_chunks: count.num_chunks,
            evict_from_bytes: self.capacity_bytes,
            full_at_bytes: self.capacity_bytes,
        }
    }

    fn reserve(&self, key: &ChunkKey, meta: &ChunkMeta) -> Result<Option<Place>> {
        Ledger::reserve(&self.ledger, self.capability(), key, meta)
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        Ok(Ledger::pin(&self.ledger, self.capability(), key))
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
        Ok(self.ledger.remove(key))
    }

    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        Ok(Vec::new())
    }

    fn health(&self) -> Health {
        Health::Ok
    }

    fn close(&self, _deadline: Instant) -> Result<()> {
        self.ledger.close();
        Ok(())
    }
}

impl Storage for Slots {
    type Slot = u32;

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn chunk_bytes(&self) -> usize {
        self.slab.chunk_bytes()
    }

    fn take(&self) -> Option<u32> {
        self.slab.take()
    }

    fn give_back(&self, slot: u32) {
        self.slab.give_back(slot);
    }

    fn write(&self, slot: u32, offset: usize, bytes: &[u8]) -> Result<()> {
        assert!(offset + bytes.len() <= self.chunk_bytes());
        // SAFETY: in bounds of the slot by the assertion; the caller owns the slot, so nobody else reaches it.
        unsafe {
            let target = self.slab.memory(slot).as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
        Ok(())
    }

    fn read(&self, slot: u32, offset: usize, out: &mut [u8]) -> Result<()> {
        assert!(offset + out.len() <= self.chunk_bytes());
        // SAFETY: in bounds of the slot by the assertion; the caller holds the slot and nobody writes it meanwhile.
        unsafe {
            let source = self.slab.memory(slot).as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(source, out.as_mut_ptr(), out.len());
        }
        Ok(())
    }

    fn memory(&self, slot: u32) -> Option<NonNull<u8>> {
        Some(self.slab.memory(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{key, layout, meta, payload};

    #[test]
    fn capacity_under_one_chunk_is_refused() {
        let bytes = layout().chunk_bytes() as u64;
        assert!(DramTier::new("dram", bytes - 1, layout()).is_err());
        assert!(DramTier::new("dram", bytes, layout()).is_ok());
    }

    #[test]
    fn pinned_bytes_are_read_in_place() {
        let bytes = layout().chunk_bytes();
        let tier = DramTier::new("dram", 2 * bytes as u64, layout()).unwrap();
        let mut place = tier.reserve(&key(1), &meta(bytes)).unwrap().unwrap();
        place.host_slice().unwrap().copy_from_slice(&payload(1, bytes));
        place.commit().unwrap();
        let pinned = tier.pin(&key(1)).unwrap().unwrap();
        assert_eq!(pinned.host_slice().unwrap(), payload(1, bytes));
    }

    #[test]
    fn resident_memory_follows_use() {
        let layout = KvLayout { num_layers: 8, num_kv_heads: 8, head_dim: 64, chunk_tokens: 32 };
        let bytes = layout.chunk_bytes();
        let before = resident_bytes();
        let tier = DramTier::new("dram", 2 << 30, layout).unwrap();
        assert!(resident_bytes() - before < 64 << 20, "capacity is touched at start");
        // Many more writes than slots in use: a freed slot is the next one taken.
        for index in 0..200 {
            let mut place = tier.reserve(&key(index), &meta(bytes)).unwrap().unwrap();
            place.write(0, &payload(1, bytes)).unwrap();
            place.commit().unwrap();
            if index >= 10 {
                assert!(tier.remove(&key(index - 10)).unwrap());
            }
        }
        let grown = resident_bytes() - before;
        assert!(grown < (11 * bytes + (64 << 20)) as i64, "grew by {grown} bytes");
    }

    fn resident_bytes() -> i64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: i64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
        pages * 4096
    }
}
