//! The device tier: chunks in the blocks of a [`KvPool`], where attention reads them.
//!
//! Two ways to use it. As any tier (`reserve`, `pin`, ...), it indexes chunks by key and takes blocks from the
//! [`BlockPool`]. In the server the runtime's core owns blocks and directory, so it only *adopts* a block of its own as
//! the destination of a swap-in and *lends* one as the source of a swap-out: neither touches index or free list.
//!
//! Invariants: a block is on the free list or in use, never both; a lent or adopted block is never freed here.
//! Deliberately absent: a copy stream of its own (a CUDA mover brings it).

mod block_pool;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use keepsake_kernels::{BlockId, KernelError, KvLayout, KvPool};

pub use block_pool::BlockPool;

use crate::ledger::{Ledger, Storage};
use crate::{
    Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, TierError, Usage,
};

/// Chunks in device memory.
pub struct DeviceTier {
    blocks: Arc<Blocks>,
    ledger: Arc<Ledger<Blocks>>,
}

/// The device's memory and its free list.
struct Blocks {
    name: Arc<str>,
    pool: Arc<KvPool>,
    free_list: Arc<BlockPool>,
    layout: KvLayout,
}

impl DeviceTier {
    /// `free_list` must cover exactly the blocks of `pool`; the caller may take blocks from it too.
    pub fn new(name: &str, pool: Arc<KvPool>, free_list: Arc<BlockPool>) -> Result<Self> {
        let name: Arc<str> = Arc::from(name);
        if pool.num_blocks() != free_list.num_total() {
            let reason =
                format!("a free list of {} blocks over a pool of {}", free_list.num_total(), pool.num_blocks());
            return Err(TierError::invalid(&name, reason));
        }
        let blocks = Arc::new(Blocks { name, layout: *pool.layout(), pool, free_list });
        Ok(Self { ledger: Arc::new(Ledger::new(Arc::clone(&blocks))), blocks })
    }

    /// A block that the caller owns, as the destination of a copy. Commit does not index it; abort does not free it.
    pub fn adopt(&self, block: BlockId, key: ChunkKey, meta: ChunkMeta) -> Place {
        let writer = Adopted { blocks: Arc::clone(&self.blocks), block };
        let name = Arc::clone(&self.blocks.name);
        Place::new(name, self.capability(), key, meta, Box::new(writer))
    }

    /// A block that the caller owns and keeps unchanged meanwhile, as the source of a copy.
    pub fn lend(&self, block: BlockId, key: ChunkKey, meta: ChunkMeta) -> Pinned {
        let reader = Adopted { blocks: Arc::clone(&self.blocks), block };
        let name = Arc::clone(&self.blocks.name);
        Pinned::new(name, self.capability(), key, meta, Box::new(reader))
    }

    pub fn layout(&self) -> &KvLayout {
        &self.blocks.layout
    }
}

impl Tier for DeviceTier {
    fn name(&self) -> &str {
        &self.blocks.name
    }

    fn capability(&self) -> Capability {
        Capability { device_addressable: true, ..Capability::default() }
    }

    fn usage(&self) -> Usage {
        let chunk_bytes = self.blocks.layout.chunk_bytes() as u64;
        let free_list = &self.blocks.free_list;
        let used_bytes = (free_list.num_total() - free_list.num_free()) as u64 * chunk_bytes;
        let capacity_bytes = free_list.num_total() as u64 * chunk_bytes;
        let count = self.ledger.count();
        Usage {
            capacity_bytes,
            used_bytes,
            reserved_bytes: count.num_reserved * chunk_bytes,
            physical_bytes: used_bytes,
            num_chunks: count.num_chunks,
            evict_from_bytes: capacity_bytes,
            full_at_bytes: capacity_bytes,
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

impl Storage for Blocks {
    type Slot = BlockId;

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn chunk_bytes(&self) -> usize {
        self.layout.chunk_bytes()
    }

    fn take(&self) -> Option<BlockId> {
        self.free_list.alloc()
    }

    fn give_back(&self, block: BlockId) {
        self.free_list.free(block);
    }

    fn write(&self, block: BlockId, offset: usize, bytes: &[u8]) -> Result<()> {
        self.for_each_layer(offset, bytes.len(), |layer, in_layer, in_buffer| {
            let layer_bytes = self.layout.layer_chunk_bytes();
            if in_layer.len() == layer_bytes {
                return self.pool.write_layer(block, layer, &bytes[in_buffer]);
            }
            let mut whole = vec![0; layer_bytes];
            self.pool.read_layer(block, layer, &mut whole)?;
            whole[in_layer].copy_from_slice(&bytes[in_buffer]);
            self.pool.write_layer(block, layer, &whole)
        })
    }

    fn read(&self, block: BlockId, offset: usize, out: &mut [u8]) -> Result<()> {
        self.for_each_layer(offset, out.len(), |layer, in_layer, in_buffer| {
            let layer_bytes = self.layout.layer_chunk_bytes();
            if in_layer.len() == layer_bytes {
                return self.pool.read_layer(block, layer, &mut out[in_buffer]);
            }
            let mut whole = vec![0; layer_bytes];
            self.pool.read_layer(block, layer, &mut whole)?;
            out[in_buffer].copy_from_slice(&whole[in_layer]);
            Ok(())
        })
    }
}

impl Blocks {
    /// Splits a byte range of a chunk at layer borders: layer, range in the layer, range in the caller's buffer.
    fn for_each_layer(
        &self,
        offset: usize,
        len: usize,
        mut visit: impl FnMut(usize, Range<usize>, Range<usize>) -> Result<(), KernelError>,
    ) -> Result<()> {
        let end = offset + len;
        for layer in 0..self.layout.num_layers {
            let range = self.layout.layer_range_in_chunk(layer);
            let (from, to) = (range.start.max(offset), range.end.min(end));
            if from < to {
                let in_layer = from - range.start..to - range.start;
                let visited = visit(layer, in_layer, from - offset..to - offset);
                visited.map_err(|source| TierError::Storage {
                    tier: Arc::clone(&self.name),
                    action: "copy a layer",
                    source: Box::new(source),
                })?;
            }
        }
        Ok(())
    }
}

/// A block that belongs to the caller.
struct Adopted {
    blocks: Arc<Blocks>,
    block: BlockId,
}

impl PlaceWriter for Adopted {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.blocks.write(self.block, offset, bytes)
    }

    fn commit(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl PinReader for Adopted {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.blocks.read(self.block, offset, out)
    }
}

#[cfg(test)]
mod tests {
    use keepsake_kernels::{Device, DeviceKind};

    use super::*;
    use crate::conformance::{key, layout, meta, payload};

    fn tier(num_blocks: usize) -> (DeviceTier, Arc<BlockPool>) {
        let device = Device::open(DeviceKind::Cpu, 1).unwrap();
        let pool = Arc::new(KvPool::new(&device, layout(), num_blocks).unwrap());
        let blocks = Arc::new(BlockPool::new(num_blocks));
        (DeviceTier::new("device", pool, Arc::clone(&blocks)).unwrap(), blocks)
    }

    #[test]
    fn adopted_and_lent_blocks_stay_their_owners() {
        let (tier, blocks) = tier(2);
        let block = blocks.alloc().unwrap();
        let bytes = layout().chunk_bytes();
        drop(tier.adopt(block, key(1), meta(bytes)));
        assert_eq!(blocks.num_free(), 1);
        let mut place = tier.adopt(block, key(1), meta(bytes));
        place.write(0, &payload(1, bytes)).unwrap();
        tier.commit(place).unwrap();
        assert!(tier.pin(&key(1)).unwrap().is_none());
        let mut out = vec![0; bytes];
        let lent = tier.lend(block, key(1), meta(bytes));
        lent.read(0, &mut out).unwrap();
        drop(lent);
        assert_eq!(out, payload(1, bytes));
        assert_eq!(blocks.num_free(), 1);
        blocks.free(block);
    }

    #[test]
    fn ranges_that_cut_layers_are_exact() {
        let (tier, blocks) = tier(1);
        let block = blocks.alloc().unwrap();
        let bytes = layout().chunk_bytes();
        let mut place = tier.adopt(block, key(1), meta(bytes));
        for start in (0..bytes).step_by(37) {
            let end = (start + 37).min(bytes);
            place.write(start, &payload(1, bytes)[start..end]).unwrap();
        }
        place.commit().unwrap();
        let lent = tier.lend(block, key(1), meta(bytes));
        let middle = layout().layer_chunk_bytes() - 5;
        let mut out = [0; 11];
        lent.read(middle, &mut out).unwrap();
        assert_eq!(out, payload(1, bytes)[middle..middle + 11]);
    }

    #[test]
    fn a_block_outside_the_pool_is_an_error() {
        let (tier, _) = tier(1);
        let bytes = layout().chunk_bytes();
        let lent = tier.lend(BlockId(7), key(1), meta(bytes));
        assert!(lent.read(0, &mut vec![0; bytes]).is_err());
    }
}
