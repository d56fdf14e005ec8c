//! The AVX2 form: codes widened to 16 bits, multiplied in pairs with 16-bit activations (`vpmaddwd`), f64 sums of groups.
//! Rows of activations hold each four elements in the order 0, 2, 1, 3, as the even and odd bytes of a 32-bit lane do.

use std::arch::x86_64::*;

use super::Task;
use crate::activations::TILE_K;
use crate::cpu::panels::{code_block_bytes, BLOCK, PANEL};

/// Outputs in one vector: half a panel.
const HALF: usize = PANEL / 2;

/// # Safety
/// The machine has AVX2 and FMA; the task is within its matrix and activations.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run(task: &Task) {
    // SAFETY: by the caller's word; each arm matches the panels' format.
    unsafe {
        match (task.panels.format.bits, task.panels.format.bias) {
            (4, None) => rows::<4, 0>(task),
            (4, Some(_)) => rows::<4, 8>(task),
            (5, None) => rows::<5, 0>(task),
            (5, Some(_)) => rows::<5, 16>(task),
            (6, _) => rows::<6, 32>(task),
            _ => rows::<8, 128>(task),
        }
    }
}

/// `BIAS`: the format's bias; 0 for a format with mins.
///
/// # Safety
/// As `run`.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows<const BITS: u32, const BIAS: i32>(task: &Task) {
    let rows = task.x.rows();
    for panel in task.first_panel..task.first_panel + task.num_panels {
        for half in 0..2 {
            let mut row = 0;
            // SAFETY: by the caller's word; the rows exist.
            unsafe {
                while row + 4 <= rows {
                    tile::<BITS, BIAS, 4>(task, panel, half, row);
                    row += 4;
                }
                while row < rows {
                    tile::<BITS, BIAS, 1>(task, panel, half, row);
                    row += 1;
                }
            }
        }
    }
}

/// `R` rows by half a panel.
///
/// # Safety
/// As `run`; panel and rows exist.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const BITS: u32, const BIAS: i32, const R: usize>(
    task: &Task,
    panel_index: usize,
    half: usize,
    first_row: usize,
) {
    let k = task.panels.k;
    let panel = task.panels.panel(panel_index);
    let groups = if BITS == 6 { 2 } else { 1 };
    let group_len = BLOCK / groups;
    let padded_k = k.next_multiple_of(TILE_K);
    // SAFETY: blocks, groups and rows stay below the panel's and the activations' shapes.
    unsafe {
        let mut totals = [[_mm256_setzero_pd(); 2]; R];
        let x: [*const i16; R] =
            std::array::from_fn(|r| task.x.integers::<i16>().add((first_row + r) * padded_k).cast_const());
        let sums: [*const i32; R] =
            std::array::from_fn(|r| task.x.sums(group_len).add((first_row + r) * (k / group_len)).cast_const());
        for block in 0..k / BLOCK {
            let codes = panel.codes.add(block * code_block_bytes(BITS) + half * 4 * HALF);
            for part in 0..groups {
                let group = block * groups + part;
                let mut dots = [_mm256_setzero_si256(); R];
                for g in part * 8 / groups..(part + 1) * 8 / groups {
                    let codes = unpack::<BITS>(codes, g);
                    let even = _mm256_and_si256(codes, _mm256_set1_epi16(0xff));
                    let odd = _mm256_srli_epi16::<8>(codes);
                    for r in 0..R {
                        let pairs: *const i32 = x[r].add(block * BLOCK + 4 * g).cast();
                        let first = _mm256_madd_epi16(even, _mm256_set1_epi32(pairs.read_unaligned()));
                        let second = _mm256_madd_epi16(odd, _mm256_set1_epi32(pairs.add(1).read_unaligned()));
                        dots[r] = _mm256_add_epi32(dots[r], _mm256_add_epi32(first, second));
                    }
                }
                let scales = widen(panel.scales.add(group * PANEL + half * HALF));
                for r in 0..R {
                    let sum = *sums[r].add(group);
                    let mut dot = dots[r];
                    if BIAS > 0 {
                        dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(BIAS * sum));
                    }
                    let dot = to_f64(dot);
                    totals[r][0] = _mm256_fmadd_pd(scales[0], dot[0], totals[r][0]);
                    totals[r][1] = _mm256_fmadd_pd(scales[1], dot[1], totals[r][1]);
                    if BIAS == 0 {
                        let mins = widen(panel.mins.add(group * PANEL + half * HALF));
                        let sum = _mm256_set1_pd(f64::from(sum));
                        totals[r][0] = _mm256_fmadd_pd(mins[0], sum, totals[r][0]);
                        totals[r][1] = _mm256_fmadd_pd(mins[1], sum, totals[r][1]);
                    }
                }
            }
        }
        for (r, total) in totals.iter().enumerate() {
            let rounded = round_totals(total[0], total[1]);
            let value = _mm256_mul_ps(rounded, _mm256_loadu_ps(panel.steps.add(half * HALF)));
            let value = _mm256_mul_ps(value, _mm256_set1_ps(*task.x.scales().add(first_row + r)));
            let mut lanes = [0.0; HALF];
            _mm256_storeu_ps(lanes.as_mut_ptr(), value);
            let count = task.num_outputs(panel_index).saturating_sub(half * HALF).min(HALF);
            let out = task.out.add((first_row + r) * task.panels.n + panel_index * PANEL + half * HALF);
            for (i, &value) in lanes.iter().enumerate().take(count) {
                *out.add(i) = if task.add { *out.add(i) + value } else { value };
            }
        }
    }
}

/// Elements 4g..4g+3 of eight outputs, a byte each.
///
/// # Safety
/// `codes` points at a block of this format, at the first of the eight outputs.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack<const BITS: u32>(codes: *const u8, g: usize) -> __m256i {
    // SAFETY: the block has 8 parts (8 bits), or 4 and those of the higher bits.
    let part = |i: usize| unsafe { _mm256_loadu_si256(codes.add(64 * i).cast()) };
    if BITS == 8 {
        return part(g);
    }
    let shift = |v: __m256i, by: usize| _mm256_srl_epi16(v, _mm_cvtsi32_si128(by as i32));
    let nibble = _mm256_and_si256(shift(part(g % 4), g / 4 * 4), _mm256_set1_epi8(15));
    let high = match BITS {
        4 => return nibble,
        5 => _mm256_and_si256(shift(part(4), g), _mm256_set1_epi8(1)),
        _ => _mm256_and_si256(shift(part(4 + g / 4), 2 * (g % 4)), _mm256_set1_epi8(3)),
    };
    _mm256_or_si256(nibble, _mm256_slli_epi16::<4>(high))
}

/// # Safety
/// Eight elements are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen(from: *const i16) -> [__m256d; 2] {
    // SAFETY: by the caller's word.
    to_f64(_mm256_cvtepi16_epi32(unsafe { _mm_loadu_si128(from.cast()) }))
}

#[inline]
#[target_feature(enable = "avx2")]
fn to_f64(v: __m256i) -> [__m256d; 2] {
    [_mm256_cvtepi32_pd(_mm256_castsi256_si128(v)), _mm256_cvtepi32_pd(_mm256_extracti128_si256::<1>(v))]
}

/// `super::round_total` in eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn round_totals(a: __m256d, b: __m256d) -> __m256 {
    let split = |total: __m256d| {
        let high = _mm256_floor_pd(_mm256_mul_pd(total, _mm256_set1_pd(1.0 / 65536.0)));
        (_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(_mm256_fnmadd_pd(high, _mm256_set1_pd(65536.0), total)))
    };
    let join = |low: __m128, high: __m128| _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(low), high);
    let ((high_a, low_a), (high_b, low_b)) = (split(a), split(b));
    _mm256_fmadd_ps(join(high_a, high_b), _mm256_set1_ps(65536.0), join(low_a, low_b))
}
