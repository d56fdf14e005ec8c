//! SiLU gate and sum.

use super::isa::Isa;
use super::reference;
use super::simd::{dispatch, Kernel, Simd, LANES};
use super::team::Worker;

pub(crate) fn silu_mul(w: &Worker, gate: *const f32, up: *const f32, len: usize, out: *mut f32) {
    let share = vector_share(w, len);
    if w.isa() == Isa::Reference {
        reference::silu_mul(gate, up, share, out);
    } else {
        dispatch(w.isa(), SiluMul { gate, up, share, out });
    }
}

pub(crate) fn add(w: &Worker, x: *const f32, len: usize, out: *mut f32) {
    for i in vector_share(w, len) {
        // SAFETY: `i` is below the length that was checked, and this worker's.
        unsafe { *out.add(i) += *x.add(i) };
    }
}

/// silu(gate) * up in every lane.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(crate) unsafe fn silu_times<S: Simd>(gate: S, up: S) -> S {
    // SAFETY: the caller's word about the instruction set.
    unsafe {
        let one = S::splat(1.0);
        let e = S::splat(0.0).sub(gate).exp();
        gate.div(one.add(e)).mul(up)
    }
}

struct SiluMul {
    gate: *const f32,
    up: *const f32,
    share: std::ops::Range<usize>,
    out: *mut f32,
}

impl Kernel for SiluMul {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut i = self.share.start;
        // SAFETY: `share` lies inside the checked lengths and is this worker's.
        unsafe {
            while i < self.share.end {
                let len = LANES.min(self.share.end - i);
                if len == LANES {
                    silu_times(S::load(self.gate.add(i)), S::load(self.up.add(i))).store(self.out.add(i));
                } else {
                    let gate = S::load_part(self.gate.add(i), len);
                    silu_times(gate, S::load_part(self.up.add(i), len)).store_part(self.out.add(i), len);
                }
                i += len;
            }
        }
    }
}

/// A worker's share of elements, in whole vectors.
fn vector_share(w: &Worker, len: usize) -> std::ops::Range<usize> {
    let vectors = w.share(len.div_ceil(LANES));
    (vectors.start * LANES).min(len)..(vectors.end * LANES).min(len)
}
