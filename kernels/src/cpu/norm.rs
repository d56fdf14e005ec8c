//! Norms of rows.

use super::isa::Isa;
use super::reference;
use super::simd::{dispatch, Kernel, Simd, LANES};
use super::team::Worker;

pub(crate) fn rms_norm(
    w: &Worker,
    x: *const f32,
    weight: *const f32,
    eps: f32,
    rows: usize,
    dim: usize,
    out: *mut f32,
) {
    for row in w.share(rows) {
        // SAFETY: the operation checked rows x dim against both buffers; rows are this worker's.
        let (x, out) = unsafe { (x.add(row * dim), out.add(row * dim)) };
        if w.isa() == Isa::Reference {
            reference::rms_norm(x, weight, eps, dim, out);
        } else {
            dispatch(w.isa(), RmsNorm { x, weight, eps, dim, out });
        }
    }
}

/// One form for every instruction set: it is a small part of the architectures that have it.
pub(crate) fn layer_norm(x: &[f32], weight: &[f32], shift: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f64;
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    for (i, out) in out.iter_mut().enumerate() {
        let normed = (f64::from(x[i]) - mean) * factor;
        *out = (normed * f64::from(weight[i]) + f64::from(shift[i])) as f32;
    }
}

struct RmsNorm {
    x: *const f32,
    weight: *const f32,
    eps: f32,
    dim: usize,
    out: *mut f32,
}

impl Kernel for RmsNorm {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: pointers hold `dim` elements.
        unsafe { rms_norm_row::<S>(self.x, self.weight, self.eps, self.dim, self.out) }
    }
}

/// # Safety
/// As [`Simd`]; `x`, `weight` and `out` hold `dim` elements; `out` may be `x`.
#[inline(always)]
pub(crate) unsafe fn rms_norm_row<S: Simd>(x: *const f32, weight: *const f32, eps: f32, dim: usize, out: *mut f32) {
    // SAFETY: by the caller's word.
    unsafe {
        let whole = dim / LANES * LANES;
        let mut squares = S::splat(0.0);
        for i in (0..whole).step_by(LANES) {
            let v = S::load(x.add(i));
            squares = v.fma(v, squares);
        }
        if whole < dim {
            let v = S::load_part(x.add(whole), dim - whole);
            squares = v.fma(v, squares);
        }
        let factor = S::splat(1.0 / (squares.reduce_add() / dim as f32 + eps).sqrt());
        for i in (0..whole).step_by(LANES) {
            S::load(x.add(i)).mul(factor).mul(S::load(weight.add(i))).store(out.add(i));
        }
        if whole < dim {
            let v = S::load_part(x.add(whole), dim - whole).mul(factor);
            v.mul(S::load_part(weight.add(whole), dim - whole)).store_part(out.add(whole), dim - whole);
        }
    }
}
