//! Filling [`Activations`]: rows of f32 become what matrix products read, alone or fused with what made them.

use super::check_rows;
use super::norm::check_norm;
use crate::activations::Activations;
use crate::buffer::Buffer;
use crate::cpu::quantise::{self, Source};
use crate::device::Worker;
use crate::error::Result;

/// Takes `rows` of `dim` from `x`.
pub fn prepare(w: &Worker, x: &Buffer, rows: usize, dim: usize, into: &Activations) -> Result<()> {
    check_rows("prepare", "x", x, rows, dim)?;
    fill("prepare", w, Source::Rows { x: x.as_mut_ptr() }, rows, dim, into)
}

/// Takes the RMS norm of `rows` of `dim` from `x`: [`super::rms_norm`] and [`prepare`] in one.
pub fn rms_norm_prepare(
    w: &Worker,
    x: &Buffer,
    weight: &Buffer,
    eps: f32,
    rows: usize,
    dim: usize,
    into: &Activations,
) -> Result<()> {
    check_norm("rms_norm_prepare", x, weight, rows, dim)?;
    let source = Source::RmsNorm { x: x.as_mut_ptr(), weight: weight.as_mut_ptr(), eps };
    fill("rms_norm_prepare", w, source, rows, dim, into)
}

/// Takes `silu(gate) * up`: [`super::silu_mul`] and [`prepare`] in one.
pub fn silu_mul_prepare(
    w: &Worker,
    gate: &Buffer,
    up: &Buffer,
    rows: usize,
    dim: usize,
    into: &Activations,
) -> Result<()> {
    check_rows("silu_mul_prepare", "gate", gate, rows, dim)?;
    check_rows("silu_mul_prepare", "up", up, rows, dim)?;
    let source = Source::SiluMul { gate: gate.as_mut_ptr(), up: up.as_mut_ptr() };
    fill("silu_mul_prepare", w, source, rows, dim, into)
}

fn fill(op: &'static str, w: &Worker, source: Source, rows: usize, dim: usize, into: &Activations) -> Result<()> {
    into.check_fits(op, rows, dim)?;
    quantise::fill(w, source, rows, dim, into);
    if w.index() == 0 {
        into.set_shape(rows, dim);
    }
    w.barrier();
    Ok(())
}
