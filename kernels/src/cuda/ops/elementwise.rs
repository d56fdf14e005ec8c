//! Element by element.

use half::bf16;

use super::{check_dim, check_rows};
use crate::cuda::memory::View;
use crate::cuda::stream::{Launch, Stream};
use crate::error::Result;

const THREADS: u32 = 256;
/// Blocks a multiprocessor holds at once; kernels stride over the rest.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;

/// What [`bias_activate`] applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Identity,
    Relu,
    /// By the error function.
    GeluErf,
    /// By the hyperbolic tangent.
    GeluTanh,
}

/// `out = silu(gate) * up`, where a row of `x` is gate and up side by side, `dim` each.
pub fn silu_mul(stream: &Stream, x: View<bf16>, rows: usize, dim: usize, out: View<bf16>) -> Result<()> {
    let op = "cuda::silu_mul";
    check_dim(op, rows, dim)?;
    check_rows(op, "x", x, rows, dim.saturating_mul(2))?;
    check_rows(op, "out", out, rows, dim)?;
    let function = stream.context().function("silu_mul")?;
    let launch = launch(stream, rows * dim / 8);
    let (rows, dim) = (rows as u32, dim as u32);
    // SAFETY: the kernel's parameters; lengths were checked.
    unsafe { stream.launch(function, launch, &[&x, &rows, &dim, &out]) }
}

/// `x = activation(x + bias)`, in place; `bias` may be [`View::none`].
pub fn bias_activate(
    stream: &Stream,
    x: View<bf16>,
    bias: View<f32>,
    activation: Activation,
    rows: usize,
    dim: usize,
) -> Result<()> {
    let op = "cuda::bias_activate";
    check_dim(op, rows, dim)?;
    check_rows(op, "x", x, rows, dim)?;
    if !bias.is_empty() {
        check_rows(op, "bias", bias, 1, dim)?;
    }
    // As in elementwise.cu.
    let activation: u32 = match activation {
        Activation::Identity => 0,
        Activation::Relu => 1,
        Activation::GeluErf => 2,
        Activation::GeluTanh => 3,
    };
    let function = stream.context().function("bias_activate")?;
    let launch = launch(stream, rows * dim / 8);
    let (rows, dim) = (rows as u32, dim as u32);
    // SAFETY: as above.
    unsafe { stream.launch(function, launch, &[&x, &bias, &activation, &rows, &dim]) }
}

/// `x[row] += bias`, in the residual stream.
pub fn add_bias(stream: &Stream, x: View<f32>, bias: View<f32>, rows: usize, dim: usize) -> Result<()> {
    let op = "cuda::add_bias";
    check_dim(op, rows, dim)?;
    check_rows(op, "x", x, rows, dim)?;
    check_rows(op, "bias", bias, 1, dim)?;
    let function = stream.context().function("add_bias")?;
    let launch = launch(stream, rows * dim / 4);
    let (rows, dim) = (rows as u32, dim as u32);
    // SAFETY: as above.
    unsafe { stream.launch(function, launch, &[&x, &bias, &rows, &dim]) }
}

/// Uniform values in (-half_width, half_width): element i depends on the seed and i alone, so generated weights need no
/// host memory and no upload. The stream of numbers is SplitMix64's, as the model crate's generator draws it.
pub fn fill_uniform(stream: &Stream, seed: u64, half_width: f32, out: View<bf16>) -> Result<()> {
    let function = stream.context().function("fill_uniform")?;
    let len = out.len() as u64;
    // SAFETY: as above.
    unsafe { stream.launch(function, launch(stream, out.len()), &[&seed, &half_width, &len, &out]) }
}

fn launch(stream: &Stream, tasks: usize) -> Launch {
    let at_once = stream.context().num_multiprocessors() as usize * BLOCKS_PER_MULTIPROCESSOR;
    Launch::new(tasks.div_ceil(THREADS as usize).min(at_once), THREADS)
}
