//! RMS norm and layer norm of the residual stream.

use half::bf16;

use super::{check_dim, check_rows};
use crate::cuda::memory::View;
use crate::cuda::stream::{Launch, Stream};
use crate::error::{ensure, Result};

const MAX_THREADS: usize = 1024;
/// Matches norm.cu: two and eight vectors of four a thread.
const MAX_NARROW_DIM: usize = 4 * 2 * MAX_THREADS;
const MAX_DIM: usize = 4 * 8 * MAX_THREADS;

/// What is added to the stream on the way: both may be [`View::none`].
#[derive(Clone, Copy)]
pub struct Addends<'a> {
    /// `rows x dim`
    pub delta: View<'a, bf16>,
    /// `dim`
    pub bias: View<'a, f32>,
}

impl Addends<'static> {
    pub fn none() -> Self {
        Addends { delta: View::none(), bias: View::none() }
    }
}

/// `x += addends; out = x / sqrt(mean(x^2) + eps) * weight`, row by row.
#[allow(clippy::too_many_arguments)]
pub fn rms_norm(
    stream: &Stream,
    x: View<f32>,
    addends: Addends,
    weight: View<f32>,
    eps: f32,
    rows: usize,
    dim: usize,
    out: View<bf16>,
) -> Result<()> {
    check("cuda::rms_norm", x, addends, weight, rows, dim, out)?;
    let function = stream.context().function(if dim <= MAX_NARROW_DIM { "rms_norm" } else { "rms_norm_wide" })?;
    let params = (dim as u32, eps);
    let launch = launch(rows, dim);
    // SAFETY: the kernel's parameters; lengths were checked.
    unsafe {
        stream.launch(function, launch, &[&x, &addends.delta, &addends.bias, &weight, &params.1, &params.0, &out])
    }
}

/// `x += addends; out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + shift`, row by row.
#[allow(clippy::too_many_arguments)]
pub fn layer_norm(
    stream: &Stream,
    x: View<f32>,
    addends: Addends,
    weight: View<f32>,
    shift: View<f32>,
    eps: f32,
    rows: usize,
    dim: usize,
    out: View<bf16>,
) -> Result<()> {
    check("cuda::layer_norm", x, addends, weight, rows, dim, out)?;
    check_rows("cuda::layer_norm", "shift", shift, 1, dim)?;
    let function = stream.context().function(if dim <= MAX_NARROW_DIM { "layer_norm" } else { "layer_norm_wide" })?;
    let launch = launch(rows, dim);
    let dim = dim as u32;
    // SAFETY: as above.
    unsafe { stream.launch(function, launch, &[&x, &addends.delta, &addends.bias, &weight, &shift, &eps, &dim, &out]) }
}

/// One block a row: two vectors of four a thread while the block allows it.
fn launch(rows: usize, dim: usize) -> Launch {
    Launch::new(rows, dim.div_ceil(8).next_multiple_of(32).min(MAX_THREADS) as u32)
}

fn check(
    op: &'static str,
    x: View<f32>,
    addends: Addends,
    weight: View<f32>,
    rows: usize,
    dim: usize,
    out: View<bf16>,
) -> Result<()> {
    check_dim(op, rows, dim)?;
    ensure!(op, dim <= MAX_DIM, "dim {dim} exceeds {MAX_DIM}");
    check_rows(op, "x", x, rows, dim)?;
    check_rows(op, "weight", weight, 1, dim)?;
    check_rows(op, "out", out, rows, dim)?;
    if !addends.delta.is_empty() {
        check_rows(op, "delta", addends.delta, rows, dim)?;
    }
    if !addends.bias.is_empty() {
        check_rows(op, "bias", addends.bias, 1, dim)?;
    }
    Ok(())
}
