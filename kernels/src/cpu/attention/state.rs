//! Softmax states of finished parts, and their merge.

use super::super::simd::{Simd, LANES};

/// Merges the state of the next part into what came before it, for one row and head. Scalars keep the lanes' operations.
///
/// # Safety
/// As [`Simd`]; `total` and `part` hold `dim` elements, a multiple of [`LANES`].
#[inline(always)]
pub(super) unsafe fn merge<S: Simd>(
    total: *mut f32,
    (total_max, total_sum): (&mut f32, &mut f32),
    part: *const f32,
    (part_max, part_sum): (f32, f32),
    dim: usize,
) {
    let max = if part_max > *total_max { part_max } else { *total_max };
    // SAFETY: by the caller's word.
    unsafe {
        let total_factor = S::splat(*total_max - max).exp();
        let part_factor = S::splat(part_max - max).exp();
        for i in (0..dim).step_by(LANES) {
            let sum = S::load(total.add(i)).mul(total_factor);
            S::load(part.add(i)).fma(part_factor, sum).store(total.add(i));
        }
        let sum = S::splat(*total_sum).mul(total_factor);
        *total_sum = S::splat(part_sum).fma(part_factor, sum).first();
    }
    *total_max = max;
}

/// Writes `total / sum` for one row and head. The sum with 0 turns -0 into 0, so that masked keys (which add 0) leave
/// no trace.
///
/// # Safety
/// As [`Simd`]; `total` holds `dim` elements padded to lanes, `out` holds `dim`.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd>(total: *const f32, sum: f32, dim: usize, out: *mut f32) {
    // SAFETY: by the caller's word.
    unsafe {
        let (sum, zero) = (S::splat(sum), S::splat(0.0));
        for i in (0..dim).step_by(LANES) {
            let value = S::load(total.add(i)).div(sum).add(zero);
            if i + LANES <= dim {
                value.store(out.add(i));
            } else {
                value.store_part(out.add(i), dim - i);
            }
        }
    }
}
