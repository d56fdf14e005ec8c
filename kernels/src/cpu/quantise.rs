//! Rows of f32 into [`Activations`]: 16-bit integers with one scale a row, their group sums, and floats where wanted.

use super::elementwise::silu_times;
use super::isa::Isa;
use super::norm::rms_norm_row;
use super::reference;
use super::simd::{dispatch, Kernel, Simd, LANES};
use super::team::Worker;
use crate::activations::{Activations, MAX_INTEGER, TILE_BYTES, TILE_K, TILE_ROWS};

/// Where rows come from.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    Rows { x: *const f32 },
    RmsNorm { x: *const f32, weight: *const f32, eps: f32 },
    SiluMul { gate: *const f32, up: *const f32 },
}

/// Whether an instruction set's products read byte tiles (else: rows of i16).
pub(crate) fn reads_tiles(isa: Isa) -> bool {
    matches!(isa, Isa::Avx512 | Isa::Amx)
}

pub(crate) fn fill(w: &Worker, source: Source, rows: usize, k: usize, into: &Activations) {
    let share = w.share(rows);
    if w.isa() == Isa::Reference {
        for row in share {
            reference_row(source, row, k, into);
        }
    } else {
        dispatch(w.isa(), Fill { source, share, k, into, tiles: reads_tiles(w.isa()) });
    }
}

struct Fill<'a> {
    source: Source,
    share: std::ops::Range<usize>,
    k: usize,
    into: &'a Activations,
    tiles: bool,
}

impl Kernel for Fill<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let k = self.k;
        let forms = self.into.forms();
        let mut scratch = vec![0.0f32; k.next_multiple_of(TILE_K)];
        for row in self.share {
            // SAFETY: the operation checked rows x k against the sources and the activations; rows are this worker's.
            unsafe {
                load_row::<S>(self.source, row, k, scratch.as_mut_ptr());
                if forms.floats {
                    std::ptr::copy_nonoverlapping(scratch.as_ptr(), self.into.floats().add(row * k), k);
                }
                if forms.integers {
                    quantise_row::<S>(&scratch, row, k, self.into, self.tiles);
                }
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; the source has this row of `k`, `to` holds `k` elements.
#[inline(always)]
unsafe fn load_row<S: Simd>(source: Source, row: usize, k: usize, to: *mut f32) {
    let at = row * k;
    // SAFETY: by the caller's word.
    unsafe {
        match source {
            Source::Rows { x } => std::ptr::copy_nonoverlapping(x.add(at), to, k),
            Source::RmsNorm { x, weight, eps } => rms_norm_row::<S>(x.add(at), weight, eps, k, to),
            Source::SiluMul { gate, up } => {
                for i in (0..k).step_by(LANES) {
                    let len = LANES.min(k - i);
                    let (gate, up) = if len == LANES {
                        (S::load(gate.add(at + i)), S::load(up.add(at + i)))
                    } else {
                        (S::load_part(gate.add(at + i), len), S::load_part(up.add(at + i), len))
                    };
                    let product = silu_times(gate, up);
                    if len == LANES {
                        product.store(to.add(i));
                    } else {
                        product.store_part(to.add(i), len);
                    }
                }
            }
        }
    }
}

/// `x` is `k` long and padded with zeros to whole tiles; `k` is a multiple of 32.
///
/// # Safety
/// As [`Simd`]; the activations have this row, which is the caller's alone.
#[inline(always)]
unsafe fn quantise_row<S: Simd>(x: &[f32], row: usize, k: usize, into: &Activations, tiles: bool) {
    // SAFETY: indices stay below k padded to tiles, which `x` and the row's place in the activations hold.
    unsafe {
        let mut max = S::splat(0.0);
        let mut not_finite = S::splat(0.0);
        for i in (0..k).step_by(LANES) {
            let v = S::load(x.as_ptr().add(i));
            max = v.abs().max(max);
            not_finite = v.fma(S::splat(0.0), not_finite);
        }
        let max = max.reduce_max();
        let finite = not_finite.reduce_add() == 0.0;
        // A row of zeros has scale 0; a row that is not finite gives products that are not.
        let usable = finite && max > 1e-30;
        let scale = if usable { max / MAX_INTEGER } else { max * 0.0 + not_finite.reduce_add() };
        *into.scales().add(row) = scale;
        let inverse = S::splat(if usable { MAX_INTEGER / max } else { 0.0 });
        let k_tiles = k.div_ceil(TILE_K);
        for tile in 0..k_tiles {
            let mut integers = [0i16; TILE_K];
            if usable {
                for i in (0..TILE_K).step_by(LANES) {
                    let v = S::load(x.as_ptr().add(tile * TILE_K + i));
                    v.mul(inverse).store_i16(integers.as_mut_ptr().add(i));
                }
            }
            if tiles {
                let base = (row / TILE_ROWS * k_tiles + tile) * 2 * TILE_BYTES + row % TILE_ROWS * TILE_K;
                let high = into.integers::<i8>().add(base);
                S::split_bytes(&integers, high, high.add(TILE_BYTES));
            } else {
                let mut ordered = [0i16; TILE_K];
                for i in 0..TILE_K {
                    ordered[i] = integers[i / 4 * 4 + [0, 2, 1, 3][i % 4]];
                }
                let to = into.integers::<i16>().add(row * k_tiles * TILE_K + tile * TILE_K);
                to.cast::<[i16; TILE_K]>().write_unaligned(ordered);
            }
            let sums = S::sums_of_16(&integers);
            let count = ((k - tile * TILE_K) / 16).min(sums.len());
            let (sixteens, blocks) = (into.sums(16).add(row * (k / 16)), into.sums(32).add(row * (k / 32)));
            for (i, &sum) in sums.iter().enumerate().take(count) {
                *sixteens.add(tile * 4 + i) = sum;
            }
            for i in 0..count / 2 {
                *blocks.add(tile * 2 + i) = sums[2 * i] + sums[2 * i + 1];
            }
        }
    }
}

fn reference_row(source: Source, row: usize, k: usize, into: &Activations) {
    let at = row * k;
    // SAFETY: the operation checked rows x k against the sources and the activations; rows are this worker's.
    unsafe {
        let to = into.floats().add(at);
        match source {
            Source::Rows { x } => std::ptr::copy_nonoverlapping(x.add(at), to, k),
            Source::RmsNorm { x, weight, eps } => reference::rms_norm(x.add(at), weight, eps, k, to),
            Source::SiluMul { gate, up } => reference::silu_mul(gate.add(at), up.add(at), 0..k, to),
        }
    }
}
