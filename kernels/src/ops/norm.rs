//! Root-mean-square norm.

use super::check_rows;
use crate::buffer::Buffer;
use crate::cpu::norm;
use crate::device::Worker;
use crate::error::{ensure, Result};

/// `out = x / sqrt(mean(x^2) + eps) * weight`, row by row. `out` may be `x`.
pub fn rms_norm(
    w: &Worker,
    x: &Buffer,
    weight: &Buffer,
    eps: f32,
    rows: usize,
    dim: usize,
    out: &Buffer,
) -> Result<()> {
    check_norm("rms_norm", x, weight, rows, dim)?;
    check_rows("rms_norm", "out", out, rows, dim)?;
    norm::rms_norm(w, x.as_mut_ptr(), weight.as_mut_ptr(), eps, rows, dim, out.as_mut_ptr());
    w.barrier();
    Ok(())
}

pub(super) fn check_norm(op: &'static str, x: &Buffer, weight: &Buffer, rows: usize, dim: usize) -> Result<()> {
    ensure!(op, dim > 0, "dim is 0");
    ensure!(op, weight.len() == dim, "{} weights for dim {dim}", weight.len());
    check_rows(op, "x", x, rows, dim)
}
