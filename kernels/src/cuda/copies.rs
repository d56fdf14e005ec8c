//! Chunks between the device's pool and pinned host memory, layer by layer.
//!
//! Off the device a chunk is contiguous, `[layer][K|V][token][kv_head][head_dim]`; on the device each layer is an allocation
//! of its own. So a chunk is as many pages as the model has layers (llama3-8b: 32 of 128 KiB), too small for one copy each:
//! a single `cuMemcpyAsync` of 64 KiB reaches 7.5 GB/s of the 55 that large ones do. Pages are enqueued in batches.

use std::ops::Range;

use cudarc::driver::sys;

use super::call::check;
use super::kv::CudaKvPool;
use super::pinned::PinnedBuffer;
use super::stream::{Event, Launch, Param, Stream};
use crate::error::{ensure, Result};
use crate::kv::BlockId;

/// A chunk on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPage {
    pub block: BlockId,
    /// Where the chunk begins in the slab, in bytes; a multiple of 16.
    pub offset: usize,
}

/// Who moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The copy engines, through `cuMemcpyBatchAsync`: takes nothing from a step that runs meanwhile but bandwidth.
    Batch,
    /// A kernel that reads or writes mapped host memory: occupies multiprocessors, starts faster.
    Kernel,
}

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

/// Layers go together until a batch has this many bytes: a batch costs some 10 us, as much as 0.5 MB.
const MIN_BATCH_BYTES: usize = 4 << 20;
/// Matches copy.cu.
const MAX_KERNEL_PAGES: usize = 120;
const KERNEL_THREADS: u32 = 256;
/// Blocks of a kernel's launch. PCIe is full long before the device is.
const KERNEL_BLOCKS: usize = 64;

/// Copies on one stream, other than the one that computes.
pub struct Copies {
    stream: Stream,
    method: Method,
}

impl Copies {
    pub fn new(stream: Stream, method: Method) -> Copies {
        Copies { stream, method }
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Enqueues host to device. `layer_done[l]` is recorded when layer l of every page has arrived. Nobody reads or writes the
    /// blocks or changes the host's pages until then.
    pub fn swap_in(
        &self,
        pool: &CudaKvPool,
        slab: &PinnedBuffer<u8>,
        pages: &[HostPage],
        layer_done: &[Event],
    ) -> Result<()> {
        self.run(Direction::In, pool, slab, pages, layer_done)
    }

    /// Enqueues device to host; as [`Copies::swap_in`]. The stream has to wait for the step that wrote the blocks first.
    pub fn swap_out(
        &self,
        pool: &CudaKvPool,
        slab: &PinnedBuffer<u8>,
        pages: &[HostPage],
        layer_done: &[Event],
    ) -> Result<()> {
        self.run(Direction::Out, pool, slab, pages, layer_done)
    }

    fn run(
        &self,
        direction: Direction,
        pool: &CudaKvPool,
        slab: &PinnedBuffer<u8>,
        pages: &[HostPage],
        layer_done: &[Event],
    ) -> Result<()> {
        let op = "cuda::Copies";
        let layout = pool.layout();
        let num_layers = layout.num_layers;
        ensure!(op, layer_done.is_empty() || layer_done.len() == num_layers, "{} events", layer_done.len());
        for page in pages {
            slab.range_ptr(page.offset, layout.chunk_bytes())?;
            ensure!(op, page.offset.is_multiple_of(16), "offset {} is not a multiple of 16", page.offset);
            pool.block(page.block, 0)?;
        }
        let layer_bytes = pages.len() * layout.layer_chunk_bytes();
        let layers_together = (MIN_BATCH_BYTES / layer_bytes.max(1)).clamp(1, num_layers);
        for first in (0..num_layers).step_by(layers_together) {
            let layers = first..(first + layers_together).min(num_layers);
            if !pages.is_empty() {
                self.copy_layers(direction, pool, slab, pages, layers.clone())?;
            }
            for event in layer_done.get(layers).unwrap_or_default() {
                self.stream.record(event)?;
            }
        }
        Ok(())
    }

    fn copy_layers(
        &self,
        direction: Direction,
        pool: &CudaKvPool,
        slab: &PinnedBuffer<u8>,
        pages: &[HostPage],
        layers: Range<usize>,
    ) -> Result<()> {
        let layout = pool.layout();
        let mut from = Vec::with_capacity(pages.len() * layers.len());
        let mut to = Vec::with_capacity(pages.len() * layers.len());
        for layer in layers {
            for page in pages {
                let device = pool.block(page.block, layer)?.address();
                let offset = page.offset + layout.layer_range_in_chunk(layer).start;
                let host = match self.method {
                    Method::Batch => slab.range_ptr(offset, layout.layer_chunk_bytes())? as sys::CUdeviceptr,
                    Method::Kernel => slab.device_address(offset),
                };
                let (source, target) = match direction {
                    Direction::In => (host, device),
                    Direction::Out => (device, host),
                };
                from.push(source);
                to.push(target);
            }
        }
        match self.method {
            Method::Batch => self.batch(&mut from, &mut to, layout.layer_chunk_bytes()),
            Method::Kernel => self.kernel(&from, &to, layout.layer_chunk_bytes()),
        }
    }

    fn batch(&self, from: &mut [sys::CUdeviceptr], to: &mut [sys::CUdeviceptr], bytes: usize) -> Result<()> {
        self.stream.context().bind()?;
        let nowhere = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: sys::CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as u32,
        };
        let mut sizes = vec![bytes; from.len()];
        let mut first = 0;
        // SAFETY: arrays of one length; both ends of each copy were checked to have `bytes` bytes; the attributes hold for all
        // copies from index 0 on.
        let copied = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                sizes.len(),
                &mut attributes,
                &mut first,
                1,
                self.stream.raw(),
            )
        };
        check("cuMemcpyBatchAsync", copied)
    }

    fn kernel(&self, from: &[sys::CUdeviceptr], to: &[sys::CUdeviceptr], bytes: usize) -> Result<()> {
        let function = self.stream.context().function("copy_pages")?;
        ensure!("cuda::Copies", bytes.is_multiple_of(16), "pages of {bytes} bytes are not whole 16-byte vectors");
        let vectors = (bytes / 16) as u32;
        for (from, to) in from.chunks(MAX_KERNEL_PAGES).zip(to.chunks(MAX_KERNEL_PAGES)) {
            let mut pages = Pages { from: [0; MAX_KERNEL_PAGES], to: [0; MAX_KERNEL_PAGES] };
            pages.from[..from.len()].copy_from_slice(from);
            pages.to[..to.len()].copy_from_slice(to);
            let parts = (KERNEL_BLOCKS / from.len()).max(1);
            let launch =
                Launch { grid: [parts as u32, from.len() as u32, 1], threads: KERNEL_THREADS, shared_bytes: 0 };
            // SAFETY: the kernel's parameters; every page has `bytes` bytes on both sides.
            unsafe { self.stream.launch(function, launch, &[&pages, &vectors])? };
        }
        Ok(())
    }
}

#[repr(C)]
struct Pages {
    from: [u64; MAX_KERNEL_PAGES],
    to: [u64; MAX_KERNEL_PAGES],
}

// SAFETY: laid out as `Pages` of copy.cu.
unsafe impl Param for Pages {}
