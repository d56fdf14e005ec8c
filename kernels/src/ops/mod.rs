//! Operations: each checks shapes and matches on the device, the kernels are elsewhere.
//!
//! Every worker of a region calls an operation with the same arguments; it splits the work and ends in a barrier. On an
//! error nothing was done, on any worker.

mod attention;
mod elementwise;
mod embedding;
mod matmul;
mod norm;
mod prepare;
mod rope;

pub use attention::attention;
pub use elementwise::{add, add_bias, gather_rows, relu, silu_mul};
pub use embedding::embedding;
pub use matmul::{matmul, matmul_many, Accumulate, Product};
pub use norm::{layer_norm, rms_norm};
pub use prepare::{prepare, rms_norm_prepare, silu_mul_prepare};
pub use rope::rope_and_write;

use crate::buffer::Buffer;
use crate::error::{ensure, Result};

/// `rows * dim` elements lie in the buffer.
fn check_rows(op: &'static str, name: &str, buffer: &Buffer, rows: usize, dim: usize) -> Result<()> {
    let fits = rows.checked_mul(dim).is_some_and(|len| len <= buffer.len());
    ensure!(op, fits, "{name} holds {} elements, not {rows} x {dim}", buffer.len());
    Ok(())
}
