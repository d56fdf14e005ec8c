//! K and V of past tokens: the layout (the only place that knows offsets), and the device's pool of blocks.

use half::f16;

use crate::cpu::memory::Memory;
#[cfg(feature = "cuda")]
use crate::cuda::CudaKvPool;
use crate::device::Device;
use crate::error::{ensure, Result};

/// One chunk's place in a device's pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Shape of the K/V of a model, stored as f16 (on a GPU: bf16). On the device a layer is `[block][K|V][token][kv_head][head_dim]`; off the
/// device a chunk is `[layer][K|V][token][kv_head][head_dim]`, contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayout {
    pub num_layers: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub chunk_tokens: usize,
}

impl KvLayout {
    /// Elements of one token's K (or V) in a layer.
    pub fn token_len(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Bytes of one chunk's K and V in one layer.
    pub fn layer_chunk_bytes(&self) -> usize {
        2 * self.chunk_tokens * self.token_len() * size_of::<f16>()
    }

    /// Bytes of one chunk, all layers.
    pub fn chunk_bytes(&self) -> usize {
        self.num_layers * self.layer_chunk_bytes()
    }

    /// Where a layer's K and V lie in a chunk off the device.
    pub fn layer_range_in_chunk(&self, layer: usize) -> std::ops::Range<usize> {
        let bytes = self.layer_chunk_bytes();
        layer * bytes..(layer + 1) * bytes
    }

    /// First element of a token's K for one head, in a layer of the pool. V lies [`KvLayout::v_offset`] further.
    pub(crate) fn k_element(&self, block: usize, token: usize, kv_head: usize) -> usize {
        block * 2 * self.v_offset() + (token * self.num_kv_heads + kv_head) * self.head_dim
    }

    /// Elements from a token's K to its V.
    pub(crate) fn v_offset(&self) -> usize {
        self.chunk_tokens * self.token_len()
    }

    pub(crate) fn check(&self) -> Result<()> {
        let all = [self.num_layers, self.num_kv_heads, self.head_dim, self.chunk_tokens];
        ensure!("KvLayout", all.iter().all(|&n| n > 0), "a zero in {self:?}");
        let bytes = all.iter().try_fold(2 * size_of::<f16>(), |bytes, &n| bytes.checked_mul(n));
        ensure!("KvLayout", bytes.is_some_and(|b| b < isize::MAX as usize), "{self:?} is too large");
        Ok(())
    }
}

/// A step's work for attention: rows `first_row..` hold consecutive positions `first_position..`, and the row at position
/// p attends keys `[0, p]` through `block_table[first_block..][..num_blocks]`. A hole that is recomputed is one more entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Entry {
    pub first_row: u32,
    pub num_rows: u32,
    pub first_position: u32,
    /// Index into the step's block table, of the block that holds position 0.
    pub first_block: u32,
    pub num_blocks: u32,
}

/// The device's K/V memory: `num_blocks` blocks, one allocation a layer.
pub struct KvPool {
    store: Store,
    layout: KvLayout,
    num_blocks: usize,
}

enum Store {
    /// One allocation a layer, touched lazily.
    Host(Vec<Memory>),
    #[cfg(feature = "cuda")]
    Cuda(CudaKvPool),
}

impl KvPool {
    pub fn new(device: &Device, layout: KvLayout, num_blocks: usize) -> Result<KvPool> {
        layout.check()?;
        ensure!("KvPool::new", num_blocks <= u32::MAX as usize, "{num_blocks} blocks exceed a BlockId");
        let store = match device {
            Device::Cpu(_) => {
                let bytes = layout.layer_chunk_bytes().saturating_mul(num_blocks);
                let layers = (0..layout.num_layers).map(|_| Memory::zeroed("a layer of K/V", bytes));
                Store::Host(layers.collect::<Result<_>>()?)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Store::Cuda(CudaKvPool::new(cuda.context(), layout, num_blocks)?),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(cuda) => cuda.never(),
        };
        Ok(KvPool { store, layout, num_blocks })
    }

    /// The pool on a GPU, if it is there.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Option<&CudaKvPool> {
        match &self.store {
            Store::Host(_) => None,
            Store::Cuda(pool) => Some(pool),
        }
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Host(layers) => layers.iter().map(Memory::bytes).sum(),
            #[cfg(feature = "cuda")]
            Store::Cuda(pool) => pool.bytes(),
        }
    }

    /// Copies a block's K and V of one layer out. Sound beside any use of other blocks; the caller sees to it that
    /// nobody writes this one meanwhile.
    pub fn read_layer(&self, block: BlockId, layer: usize, to: &mut [u8]) -> Result<()> {
        match &self.store {
            Store::Host(layers) => {
                let from = self.place("KvPool::read_layer", layers, block, layer, to.len())?;
                // SAFETY: `place` checked block, layer and length; the block is not written meanwhile (contract).
                unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Store::Cuda(pool) => pool.read_layers(block, layer..layer + 1, to),
        }
    }

    /// Copies K and V of one layer into a block. The caller is the block's only user meanwhile.
    pub fn write_layer(&self, block: BlockId, layer: usize, from: &[u8]) -> Result<()> {
        match &self.store {
            Store::Host(layers) => {
                let to = self.place("KvPool::write_layer", layers, block, layer, from.len())?;
                // SAFETY: as in `read_layer`; exclusive by the contract.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Store::Cuda(pool) => pool.write_layers(block, layer..layer + 1, from),
        }
    }

    /// Copies a whole chunk out, in the layout of a chunk off the device.
    pub fn read_chunk(&self, block: BlockId, to: &mut [u8]) -> Result<()> {
        let bytes = self.layout.chunk_bytes();
        ensure!("KvPool::read_chunk", to.len() == bytes, "{} bytes for a chunk of {bytes}", to.len());
        #[cfg(feature = "cuda")]
        if let Store::Cuda(pool) = &self.store {
            return pool.read_layers(block, 0..self.layout.num_layers, to);
        }
        for layer in 0..self.layout.num_layers {
            self.read_layer(block, layer, &mut to[self.layout.layer_range_in_chunk(layer)])?;
        }
        Ok(())
    }

    /// Copies a whole chunk in.
    pub fn write_chunk(&self, block: BlockId, from: &[u8]) -> Result<()> {
        let bytes = self.layout.chunk_bytes();
        ensure!("KvPool::write_chunk", from.len() == bytes, "{} bytes for a chunk of {bytes}", from.len());
        #[cfg(feature = "cuda")]
        if let Store::Cuda(pool) = &self.store {
            return pool.write_layers(block, 0..self.layout.num_layers, from);
        }
        for layer in 0..self.layout.num_layers {
            self.write_layer(block, layer, &from[self.layout.layer_range_in_chunk(layer)])?;
        }
        Ok(())
    }

    /// A layer's elements, `[block][K|V][token][kv_head][head_dim]`, of a pool that [`KvPool::check_host`] let pass.
    pub(crate) fn layer_ptr(&self, layer: usize) -> *mut f16 {
        match &self.store {
            Store::Host(layers) => layers[layer].as_ptr(),
            #[cfg(feature = "cuda")]
            Store::Cuda(_) => unreachable!("operations of the CPU refuse other pools"),
        }
    }

    /// The CPU's operations work on the host's memory only.
    pub(crate) fn check_host(&self, op: &'static str) -> Result<()> {
        ensure!(op, matches!(self.store, Store::Host(_)), "the K/V pool is not in host memory");
        Ok(())
    }

    fn place(&self, op: &'static str, layers: &[Memory], block: BlockId, layer: usize, len: usize) -> Result<*mut u8> {
        let bytes = self.layout.layer_chunk_bytes();
        ensure!(op, (block.0 as usize) < self.num_blocks, "block {} of {}", block.0, self.num_blocks);
        ensure!(op, layer < self.layout.num_layers, "layer {layer} of {}", self.layout.num_layers);
        ensure!(op, len == bytes, "{len} bytes for a layer's chunk of {bytes}");
        // SAFETY: block and layer are in range, so the offset stays inside the layer's allocation.
        Ok(unsafe { layers[layer].as_ptr::<u8>().add(block.0 as usize * bytes) })
    }
}

impl std::fmt::Debug for KvPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvPool({} blocks, {:?})", self.num_blocks, self.layout)
    }
}
