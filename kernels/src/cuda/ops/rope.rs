//! Rotation, and the write of new K and V to their slots.

use std::sync::Arc;

use half::bf16;

use super::{check_len, check_rows};
use crate::cuda::context::Context;
use crate::cuda::kv::CudaKvPool;
use crate::cuda::memory::{DeviceBuffer, View};
use crate::cuda::stream::{Launch, Param, Stream};
use crate::error::{ensure, Result};
use crate::rope::{RopeStyle, RopeTable};

const WARPS: usize = 8;
/// Elements of a head that a lane takes.
const LANE_ELEMENTS: usize = 16;
const MAX_HEAD_DIM: usize = 256;

/// cos and sin of every position, `[position][cos.. sin..]` in f32, from the same table that the CPU reads.
pub struct CudaRopeTable {
    angles: DeviceBuffer<f32>,
    half: usize,
    max_positions: usize,
}

impl CudaRopeTable {
    pub fn new(context: &Arc<Context>, table: &RopeTable) -> Result<CudaRopeTable> {
        let op = "CudaRopeTable";
        ensure!(op, table.style() == RopeStyle::HalfSplit, "weights are brought to half-split order first");
        let half = table.rotary_dim() / 2;
        ensure!(op, half.is_multiple_of(8), "half the rotary extent, {half}, is not a multiple of 8");
        let mut angles = vec![0.0f32; table.max_positions() * 2 * half];
        for (position, row) in angles.chunks_exact_mut(2 * half).enumerate() {
            let (cos, sin) = row.split_at_mut(half);
            table.angles(position, cos, sin);
        }
        let angles = DeviceBuffer::from_slice(context, "rotary angles", &angles)?;
        Ok(CudaRopeTable { angles, half, max_positions: table.max_positions() })
    }
}

/// RMS norms over each head of q and k before the rotation; weights of `head_dim`, or [`View::none`].
#[derive(Clone, Copy)]
pub struct HeadNorms<'a> {
    pub q: View<'a, f32>,
    pub k: View<'a, f32>,
    pub eps: f32,
}

impl HeadNorms<'static> {
    pub fn none() -> Self {
        HeadNorms { q: View::none(), k: View::none(), eps: 0.0 }
    }
}

/// What a layer rotates and writes.
#[derive(Clone, Copy)]
pub struct RopeInputs<'a> {
    /// `[row][num_heads + 2 num_kv_heads][head_dim]`: q, k and v as one product writes them.
    pub qkv: View<'a, bf16>,
    /// One a column of `qkv`, added first; or [`View::none`].
    pub bias: View<'a, f32>,
    pub norms: HeadNorms<'a>,
    pub positions: View<'a, u32>,
    /// block * chunk_tokens + offset, no slot twice.
    pub slots: View<'a, u32>,
    /// `None`: nothing rotates (learned positions).
    pub table: Option<&'a CudaRopeTable>,
}

/// Writes rotated q to `q` (`[row][num_heads][head_dim]`), rotated k and v to their slots in `layer`. A row whose slot or
/// position is out of range gives a q of NaN and writes no K/V.
pub fn rope_and_write(
    stream: &Stream,
    inputs: &RopeInputs,
    rows: usize,
    num_heads: usize,
    pool: &CudaKvPool,
    layer: usize,
    q: View<bf16>,
) -> Result<()> {
    let op = "cuda::rope_and_write";
    let layout = pool.layout();
    let head_dim = layout.head_dim;
    let fits = head_dim.is_multiple_of(LANE_ELEMENTS) && head_dim <= MAX_HEAD_DIM;
    ensure!(op, fits, "head_dim {head_dim} is not a multiple of {LANE_ELEMENTS} up to {MAX_HEAD_DIM}");
    ensure!(op, num_heads > 0, "no heads");
    let half = inputs.table.map_or(0, |table| table.half);
    ensure!(op, 2 * half <= head_dim, "{} rotated of {head_dim}", 2 * half);
    let row_heads = num_heads + 2 * layout.num_kv_heads;
    let tasks = rows.saturating_mul(row_heads);
    ensure!(op, tasks <= i32::MAX as usize, "{rows} rows of {row_heads} heads");
    check_rows(op, "qkv", inputs.qkv, rows, row_heads * head_dim)?;
    check_rows(op, "q", q, rows, num_heads * head_dim)?;
    check_len(op, "positions", inputs.positions, rows)?;
    check_len(op, "slots", inputs.slots, rows)?;
    let optional = [("bias", inputs.bias, row_heads), ("q norm", inputs.norms.q, 1), ("k norm", inputs.norms.k, 1)];
    for (name, view, heads) in optional {
        if !view.is_empty() {
            check_rows(op, name, view, heads, head_dim)?;
        }
    }
    let shape = Shape {
        rows: rows as u32,
        num_heads: num_heads as u32,
        num_kv_heads: layout.num_kv_heads as u32,
        head_dim: head_dim as u32,
        half: half as u32,
        chunk_tokens: layout.chunk_tokens as u32,
        num_slots: (pool.num_blocks() * layout.chunk_tokens) as u32,
        max_positions: inputs.table.map_or(u32::MAX, |table| table.max_positions as u32),
        norm_eps: inputs.norms.eps,
    };
    let angles = inputs.table.map_or(View::none(), |table| table.angles.view());
    let function = stream.context().function("rope_and_write")?;
    let heads_per_warp = 32 / (head_dim / LANE_ELEMENTS);
    let launch = Launch::new(tasks.div_ceil(heads_per_warp * WARPS), WARPS as u32 * 32);
    let kv = pool.layer(layer)?;
    let RopeInputs { qkv, bias, norms, positions, slots, .. } = inputs;
    // SAFETY: the kernel's parameters; lengths were checked, and the kernel checks slots and positions.
    unsafe {
        stream.launch(function, launch, &[qkv, bias, &norms.q, &norms.k, positions, slots, &angles, &q, &kv, &shape])
    }
}

#[repr(C)]
struct Shape {
    rows: u32,
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    half: u32,
    chunk_tokens: u32,
    num_slots: u32,
    max_positions: u32,
    norm_eps: f32,
}

// SAFETY: laid out as `RopeShape` of rope.cu.
unsafe impl Param for Shape {}
