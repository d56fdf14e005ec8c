//! K/V on the device: one allocation a layer, `[block][K|V][token][kv_head][head_dim]` in bf16.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::context::Context;
use super::memory::{DeviceBuffer, View};
use super::stream::Stream;
use crate::error::{ensure, Result};
use crate::kv::{BlockId, KvLayout};

/// The device's pool of blocks.
pub struct CudaKvPool {
    context: Arc<Context>,
    layers: Vec<DeviceBuffer<bf16>>,
    layout: KvLayout,
    num_blocks: usize,
    /// For copies that the host waits for.
    stream: Stream,
}

impl CudaKvPool {
    /// Memory of unknown content: what was not written is never read.
    pub fn new(context: &Arc<Context>, layout: KvLayout, num_blocks: usize) -> Result<CudaKvPool> {
        layout.check()?;
        ensure!("CudaKvPool", num_blocks > 0 && num_blocks <= u32::MAX as usize, "{num_blocks} blocks");
        let slots = num_blocks.checked_mul(layout.chunk_tokens);
        ensure!(
            "CudaKvPool",
            slots.is_some_and(|slots| slots <= u32::MAX as usize),
            "{num_blocks} blocks have too many slots"
        );
        let len = num_blocks.saturating_mul(layout.layer_chunk_bytes() / size_of::<bf16>());
        let layers = (0..layout.num_layers).map(|_| DeviceBuffer::new(context, "a layer of K/V", len));
        Ok(CudaKvPool {
            layers: layers.collect::<Result<_>>()?,
            context: context.clone(),
            layout,
            num_blocks,
            stream: Stream::new(context)?,
        })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub fn bytes(&self) -> usize {
        self.layers.iter().map(DeviceBuffer::bytes).sum()
    }

    /// A layer's elements.
    pub fn layer(&self, layer: usize) -> Result<View<'_, bf16>> {
        ensure!("CudaKvPool", layer < self.layers.len(), "layer {layer} of {}", self.layers.len());
        Ok(self.layers[layer].view())
    }

    /// A block's K and V in one layer.
    pub fn block(&self, block: BlockId, layer: usize) -> Result<View<'_, bf16>> {
        ensure!("CudaKvPool", (block.0 as usize) < self.num_blocks, "block {} of {}", block.0, self.num_blocks);
        let len = self.layout.layer_chunk_bytes() / size_of::<bf16>();
        self.layer(layer)?.slice(block.0 as usize * len..(block.0 as usize + 1) * len)
    }

    /// Debugging: the blocks hold NaN in every layer, so that whoever reads what nobody wrote shows it.
    pub fn poison(&self, stream: &Stream, blocks: &[BlockId]) -> Result<()> {
        for layer in 0..self.layout.num_layers {
            for &block in blocks {
                stream.fill_bytes(self.block(block, layer)?, 0xff)?;
            }
        }
        Ok(())
    }

    /// Copies a block's K and V of some layers, one after the other, to the host and waits: at full speed if that memory is
    /// pinned. Steps that wrote the block have been waited for.
    pub fn read_layers(&self, block: BlockId, layers: Range<usize>, to: &mut [u8]) -> Result<()> {
        let bytes = self.layout.layer_chunk_bytes();
        self.check_copy("CudaKvPool::read_layers", block, &layers, to.len())?;
        for (layer, to) in layers.zip(to.chunks_exact_mut(bytes)) {
            let from = self.block(block, layer)?;
            // SAFETY: waited for before this returns, while `to` is borrowed. A failed call ends the process (`KernelError::Cuda`).
            unsafe { self.stream.download_bytes(from, to) }?;
        }
        self.stream.synchronize()
    }

    /// Copies K and V of some layers from the host and waits; as [`CudaKvPool::read_layers`].
    pub fn write_layers(&self, block: BlockId, layers: Range<usize>, from: &[u8]) -> Result<()> {
        let bytes = self.layout.layer_chunk_bytes();
        self.check_copy("CudaKvPool::write_layers", block, &layers, from.len())?;
        for (layer, from) in layers.zip(from.chunks_exact(bytes)) {
            let to = self.block(block, layer)?;
            // SAFETY: as in `read_layers`.
            unsafe { self.stream.upload_bytes(from, to) }?;
        }
        self.stream.synchronize()
    }

    fn check_copy(&self, op: &'static str, block: BlockId, layers: &Range<usize>, len: usize) -> Result<()> {
        let in_range = layers.start < layers.end && layers.end <= self.layout.num_layers;
        ensure!(op, in_range, "layers {layers:?} of {}", self.layout.num_layers);
        let wanted = layers.len() * self.layout.layer_chunk_bytes();
        ensure!(op, len == wanted, "{len} bytes for {wanted}");
        self.block(block, layers.start).map(|_| ())
    }
}

impl std::fmt::Debug for CudaKvPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaKvPool({} blocks, {:?})", self.num_blocks, self.layout)
    }
}
