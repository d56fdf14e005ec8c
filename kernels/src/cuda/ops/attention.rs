//! Causal attention over paged K/V: a decode kernel for entries of one row, a prefill kernel for the rest.

use std::sync::Arc;

use cudarc::driver::sys;
use half::bf16;

use super::tiles::{Cut, TILE_WORDS};
use super::{check_len, check_rows};
use crate::cuda::call::check;
use crate::cuda::context::Context;
use crate::cuda::kv::CudaKvPool;
use crate::cuda::memory::{DeviceBuffer, View};
use crate::cuda::module::{Function, Module};
use crate::cuda::sources::{Source, ATTENTION_DECODE, ATTENTION_PREFILL, ATTENTION_PREFILL_HOPPER};
use crate::cuda::stream::{Launch, Param, Stream};
use crate::error::{ensure, KernelError, Result};
use crate::kv::{Entry, KvLayout};

/// Words of an entry on the device.
const ENTRY_WORDS: usize = 5;
/// What the kernels were written for.
const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
const CHUNK_TOKENS: [usize; 3] = [16, 32, 64];
/// Heads that one counter of the decode kernel stands for.
const COUNTER_HEADS: usize = 16;
/// Parts of split prefill tiles, times K/V heads, for each multiprocessor: more are never worth their merging.
const PARTS_PER_MULTIPROCESSOR: usize = 4;

/// Attention of one model's shape over one pool, on one stream: it owns scratch memory that launches share.
pub struct Attention {
    pool_layout: KvLayout,
    num_heads: usize,
    max_decode_entries: usize,
    decode: Kernel,
    decode_blocks: u32,
    prefill: Kernel,
    cut: Cut,
    /// Hopper's copy engine reads K/V through these, one a layer; empty elsewhere.
    maps: Vec<TensorMap>,
    decode_scratch: Scratch,
    prefill_scratch: Scratch,
}

/// What blocks that share an output leave for the last of them.
struct Scratch {
    partials: DeviceBuffer<f32>,
    /// Zero between launches.
    counters: DeviceBuffer<u32>,
}

struct Kernel {
    function: Function,
    threads: u32,
    shared_bytes: u32,
    /// Keeps the function's code.
    _module: Arc<Module>,
}

/// A step's entries as the kernels want them, on the host. Upload the parts and hand their views over as
/// [`AttentionInputs`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttentionPlan {
    /// Entries of one row, flat.
    pub decode: Vec<u32>,
    /// Tiles of the entries of more rows, the longest first, flat.
    pub tiles: Vec<u32>,
}

/// What a layer's attention reads besides q. The entries and blocks are the caller's word: kernels do not check them.
#[derive(Clone, Copy)]
pub struct AttentionInputs<'a> {
    pub block_table: View<'a, u32>,
    pub decode: View<'a, u32>,
    pub tiles: View<'a, u32>,
}

impl Attention {
    /// Compiles (or finds) the kernels of a shape. `max_decode_entries` bounds a step's entries of one row.
    pub fn new(pool: &CudaKvPool, num_heads: usize, max_decode_entries: usize) -> Result<Attention> {
        let op = "cuda::Attention";
        let layout = *pool.layout();
        let context = pool.context();
        let grouped = num_heads > 0 && num_heads.is_multiple_of(layout.num_kv_heads);
        ensure!(op, grouped, "{num_heads} heads on {} K/V heads", layout.num_kv_heads);
        ensure!(op, HEAD_DIMS.contains(&layout.head_dim), "head_dim {} is none of {HEAD_DIMS:?}", layout.head_dim);
        let is_known = CHUNK_TOKENS.contains(&layout.chunk_tokens);
        ensure!(op, is_known, "chunk_tokens {} is none of {CHUNK_TOKENS:?}", layout.chunk_tokens);
        let group = num_heads / layout.num_kv_heads;
        ensure!(op, group <= 64, "{group} heads on one K/V head");
        let defines = [("HEAD_DIM", layout.head_dim), ("GROUP", group), ("CHUNK_TOKENS", layout.chunk_tokens)];
        let (decode, [_, _, partial_floats, blocks]) =
            kernel(context, &ATTENTION_DECODE, "attention_decode", &defines)?;
        let decode_blocks = context.num_multiprocessors() * blocks;
        let is_hopper = context.capability() == (9, 0);
        let (prefill, [_, _, tile_rows, _]) = match is_hopper {
            true => kernel(context, &ATTENTION_PREFILL_HOPPER, "attention_prefill_wgmma", &defines)?,
            false => kernel(context, &ATTENTION_PREFILL, "attention_prefill_mma", &defines)?,
        };
        let layers = 0..if is_hopper { layout.num_layers } else { 0 };
        let decode_counters = max_decode_entries * layout.num_kv_heads * group.div_ceil(COUNTER_HEADS);
        let num_multiprocessors = context.num_multiprocessors() as usize;
        let max_parts = if is_hopper { num_multiprocessors * PARTS_PER_MULTIPROCESSOR } else { 0 };
        let cut = Cut {
            group,
            num_kv_heads: layout.num_kv_heads,
            tile_rows: tile_rows as usize,
            max_slots: max_parts / layout.num_kv_heads,
            num_multiprocessors,
        };
        let prefill_slots = cut.max_slots * layout.num_kv_heads;
        Ok(Attention {
            pool_layout: layout,
            num_heads,
            max_decode_entries,
            decode,
            decode_blocks,
            prefill,
            maps: layers.map(|layer| TensorMap::new(pool, layer)).collect::<Result<_>>()?,
            decode_scratch: Scratch::new(context, decode_blocks as usize * partial_floats as usize, decode_counters)?,
            prefill_scratch: Scratch::new(
                context,
                prefill_slots * cut.tile_rows * (layout.head_dim + 2),
                prefill_slots + 2,
            )?,
            cut,
        })
    }

    /// Sorts a step's entries into the two kernels and cuts tiles.
    pub fn plan(&self, entries: &[Entry]) -> AttentionPlan {
        let decode = entries.iter().filter(|entry| entry.num_rows == 1);
        let prefill = entries.iter().filter(|entry| entry.num_rows > 1);
        AttentionPlan { decode: decode.flat_map(entry_words).collect(), tiles: self.cut.tiles(prefill) }
    }

    /// `out[row][head] = softmax(scale * q . K) V` for the rows of all entries; others are left alone. `q` and `out` are
    /// `rows x num_heads x head_dim`, different memory.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        stream: &Stream,
        pool: &CudaKvPool,
        layer: usize,
        q: View<bf16>,
        inputs: &AttentionInputs,
        rows: usize,
        scale: f32,
        out: View<bf16>,
    ) -> Result<()> {
        let op = "cuda::attention";
        ensure!(op, *pool.layout() == self.pool_layout, "made for {:?}", self.pool_layout);
        let width = self.num_heads * self.pool_layout.head_dim;
        check_rows(op, "q", q, rows, width)?;
        check_rows(op, "out", out, rows, width)?;
        let num_decode = inputs.decode.len() / ENTRY_WORDS;
        let num_tiles = inputs.tiles.len() / TILE_WORDS;
        check_len(op, "decode", inputs.decode, num_decode * ENTRY_WORDS)?;
        ensure!(op, num_decode <= self.max_decode_entries, "{num_decode} entries of {}", self.max_decode_entries);
        let kv = pool.layer(layer)?;
        let num_kv_heads = self.pool_layout.num_kv_heads as u32;
        let table = inputs.block_table;
        if num_decode > 0 {
            let (entries, num_entries) = (inputs.decode, num_decode as u32);
            let (partials, counters) = self.decode_scratch.views();
            // SAFETY: the kernel's parameters; scratch memory is as long as it asks for; the rest is the caller's word.
            unsafe {
                self.decode.launch(
                    stream,
                    [self.decode_blocks, 1, 1],
                    &[&q, &kv, &table, &entries, &num_entries, &num_kv_heads, &scale, &out, &partials, &counters],
                )?;
            }
        }
        if num_tiles > 0 {
            let (tiles, count) = (inputs.tiles, num_tiles as u32);
            let (partials, counters) = self.prefill_scratch.views();
            // SAFETY: as above, for either form's parameters; tiles were cut for the scratch memory.
            unsafe {
                match self.maps.get(layer) {
                    // Blocks take tiles from a queue.
                    Some(map) => self.prefill.launch(
                        stream,
                        [(count * num_kv_heads).min(self.cut.num_multiprocessors as u32), 1, 1],
                        &[map, &q, &table, &tiles, &count, &num_kv_heads, &scale, &out, &partials, &counters],
                    ),
                    None => self.prefill.launch(
                        stream,
                        [count, num_kv_heads, 1],
                        &[&kv, &q, &table, &tiles, &count, &num_kv_heads, &scale, &out],
                    ),
                }?;
            }
        }
        Ok(())
    }
}

impl Scratch {
    fn new(context: &Arc<Context>, num_partials: usize, num_counters: usize) -> Result<Scratch> {
        Ok(Scratch {
            partials: DeviceBuffer::new(context, "partial sums of attention", num_partials)?,
            counters: DeviceBuffer::zeros(context, "counters of attention", num_counters.max(1))?,
        })
    }

    fn views(&self) -> (View<'_, f32>, View<'_, u32>) {
        (self.partials.view(), self.counters.view())
    }
}

impl Kernel {
    /// # Safety
    /// As [`Stream::launch`].
    unsafe fn launch(&self, stream: &Stream, grid: [u32; 3], params: &[&dyn Param]) -> Result<()> {
        let launch = Launch { grid, threads: self.threads, shared_bytes: self.shared_bytes };
        // SAFETY: the caller's word.
        unsafe { stream.launch(self.function, launch, params) }
    }
}

/// A kernel and its module's `<name>_launch`: threads, shared bytes, and two numbers of its own.
fn kernel(
    context: &Arc<Context>,
    source: &Source,
    name: &str,
    defines: &[(&str, usize)],
) -> Result<(Kernel, [u32; 4])> {
    let module = context.special_module(source, defines)?;
    let launch: [u32; 4] = module.constants(&format!("{name}_launch"))?;
    let function = module.function(name).ok_or_else(|| KernelError::Cuda {
        call: "cuModuleGetFunction",
        reason: format!("no kernel is called {name}"),
    })?;
    Ok((Kernel { function, threads: launch[0], shared_bytes: launch[1], _module: module }, launch))
}

fn entry_words(entry: &Entry) -> [u32; ENTRY_WORDS] {
    [entry.first_row, entry.num_rows, entry.first_position, entry.first_block, entry.num_blocks]
}

/// A layer as the copy engine sees it: `[block and K|V][token][kv_head][head_dim]`, boxes of one chunk's K or V of one head,
/// 64 elements wide.
#[repr(C, align(128))]
struct TensorMap(sys::CUtensorMap);

// SAFETY: 128 bytes that the kernel takes by value.
unsafe impl Param for TensorMap {}

impl TensorMap {
    fn new(pool: &CudaKvPool, layer: usize) -> Result<TensorMap> {
        let layout = pool.layout();
        let element = size_of::<bf16>() as u64;
        let extents = [
            layout.head_dim as u64,
            layout.num_kv_heads as u64,
            layout.chunk_tokens as u64,
            2 * pool.num_blocks() as u64,
        ];
        let head = extents[0] * element;
        let token = head * extents[1];
        let strides = [head, token, token * extents[2]];
        let box_extents = [64u32, 1, layout.chunk_tokens as u32, 1];
        let steps = [1u32; 4];
        let mut map = TensorMap(sys::CUtensorMap { opaque: [0; 16] });
        // SAFETY: arrays of the rank's length; the address and extents are those of the layer's allocation.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                extents.len() as u32,
                pool.layer(layer)?.address() as *mut std::ffi::c_void,
                extents.as_ptr(),
                strides.as_ptr(),
                box_extents.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", encoded)?;
        Ok(map)
    }
}
