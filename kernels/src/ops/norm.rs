//! Root-mean-square norm and layer norm.

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

/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + shift`, row by row, summed in f64 in order. `out` is not `x`.
#[allow(clippy::too_many_arguments)]
pub fn layer_norm(
    w: &Worker,
    x: &Buffer,
    weight: &Buffer,
    shift: &Buffer,
    eps: f32,
    rows: usize,
    dim: usize,
    out: &Buffer,
) -> Result<()> {
    let op = "layer_norm";
    check_norm(op, x, weight, rows, dim)?;
    check_rows(op, "out", out, rows, dim)?;
    ensure!(op, shift.len() == dim, "{} shifts for dim {dim}", shift.len());
    ensure!(op, [x, weight, shift].iter().all(|input| !std::ptr::eq(*input, out)), "out is also an input");
    for row in w.share(rows) {
        // SAFETY: the row was checked and is this worker's; the inputs are other buffers and only read.
        let out = unsafe { out.slice_mut(row * dim..(row + 1) * dim) };
        norm::layer_norm(&x.as_slice()[row * dim..(row + 1) * dim], weight.as_slice(), shift.as_slice(), eps, out);
    }
    w.barrier();
    Ok(())
}

pub(super) fn check_norm(op: &'static str, x: &Buffer, weight: &Buffer, rows: usize, dim: usize) -> Result<()> {
    ensure!(op, dim > 0, "dim is 0");
    ensure!(op, weight.len() == dim, "{} weights for dim {dim}", weight.len());
    check_rows(op, "x", x, rows, dim)
}
