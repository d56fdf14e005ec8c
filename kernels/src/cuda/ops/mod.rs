//! Operations on a stream: each checks shapes and enqueues. Named as the CPU's where they mean the same.

mod attention;
mod elementwise;
mod norm;
mod rope;
mod rows;
mod sampling;
mod tiles;

pub use attention::{Attention, AttentionInputs, AttentionPlan};
pub use elementwise::{add_bias, bias_activate, fill_uniform, silu_mul, Activation};
pub use norm::{layer_norm, rms_norm, Addends};
pub use rope::{rope_and_write, CudaRopeTable, HeadNorms, RopeInputs};
pub use rows::{embedding, gather_rows, take_tokens, PositionEmbedding};
pub use sampling::{sample, SamplingRow, NO_TOKEN};

use super::memory::View;
use crate::error::{ensure, Result};

/// Threads of a block that takes a row.
const ROW_THREADS: u32 = 256;

/// `rows * dim` elements lie in the view, from an address that vectors of 16 bytes can be read from.
fn check_rows<T>(op: &'static str, name: &str, view: View<T>, rows: usize, dim: usize) -> Result<()> {
    let fits = rows.checked_mul(dim).is_some_and(|len| len <= view.len());
    ensure!(op, fits, "{name} holds {} elements, not {rows} x {dim}", view.len());
    ensure!(op, view.is_aligned(), "{name} is not aligned to 16 bytes");
    Ok(())
}

/// As [`check_rows`], for arrays of single numbers.
fn check_len<T>(op: &'static str, name: &str, view: View<T>, len: usize) -> Result<()> {
    ensure!(op, len <= view.len(), "{name} holds {} elements, not {len}", view.len());
    Ok(())
}

/// Rows are whole vectors of 16 bytes, and counts fit the kernels' u32.
fn check_dim(op: &'static str, rows: usize, dim: usize) -> Result<()> {
    ensure!(op, dim > 0 && dim.is_multiple_of(8), "dim {dim} is not a multiple of 8");
    let fits = rows <= i32::MAX as usize && dim <= i32::MAX as usize;
    ensure!(op, fits, "{rows} x {dim} exceed 2^31");
    Ok(())
}
