//! Root-mean-square norm of rows.

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
