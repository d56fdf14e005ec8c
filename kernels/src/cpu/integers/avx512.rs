//! The AVX-512 form: byte dot products (`vpdpbusd`) of codes and activation planes, group by group, f64 sums of groups.

use std::arch::x86_64::*;

use super::Task;
use crate::activations::{TILE_BYTES, TILE_K, TILE_ROWS};
use crate::cpu::panels::{code_block_bytes, Panel, BLOCK, PANEL};

/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and VNNI; the task is within its matrix and activations.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn run(task: &Task) {
    // SAFETY: by the caller's word; each arm matches the panels' format.
    unsafe {
        match (task.panels.format.bits, task.panels.format.bias) {
            (4, None) => rows::<4, 0>(task),
            (4, Some(_)) => rows::<4, 3>(task),
            (5, None) => rows::<5, 0>(task),
            (5, Some(_)) => rows::<5, 4>(task),
            (6, _) => rows::<6, 5>(task),
            _ => rows::<8, 7>(task),
        }
    }
}

/// `SHIFT`: log2 of the format's bias; 0 for a format with mins.
///
/// # Safety
/// As `run`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn rows<const BITS: u32, const SHIFT: u32>(task: &Task) {
    let rows = task.x.rows();
    for panel in task.first_panel..task.first_panel + task.num_panels {
        let mut row = 0;
        // SAFETY: by the caller's word; the rows exist.
        unsafe {
            while row + 4 <= rows {
                tile::<BITS, SHIFT, 4>(task, panel, row);
                row += 4;
            }
            match rows - row {
                1 => tile::<BITS, SHIFT, 1>(task, panel, row),
                2 => tile::<BITS, SHIFT, 2>(task, panel, row),
                3 => tile::<BITS, SHIFT, 3>(task, panel, row),
                _ => {}
            }
        }
    }
}

/// `R` rows by one panel.
///
/// # Safety
/// As `run`; panel and rows exist.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<const BITS: u32, const SHIFT: u32, const R: usize>(task: &Task, panel_index: usize, first_row: usize) {
    let k = task.panels.k;
    let panel: Panel = task.panels.panel(panel_index);
    let groups = if BITS == 6 { 2 } else { 1 };
    let k_tiles = k.div_ceil(TILE_K);
    // SAFETY: blocks, groups and rows stay below the panel's and the activations' shapes.
    unsafe {
        let mut totals = [[_mm512_setzero_pd(); 2]; R];
        let x: [*const i8; R] = std::array::from_fn(|r| {
            let row = first_row + r;
            task.x
                .integers::<i8>()
                .add(row / TILE_ROWS * k_tiles * 2 * TILE_BYTES + row % TILE_ROWS * TILE_K)
                .cast_const()
        });
        let group_len = BLOCK / groups;
        let sums: [*const i32; R] =
            std::array::from_fn(|r| task.x.sums(group_len).add((first_row + r) * (k / group_len)).cast_const());
        for block in 0..k / BLOCK {
            let codes = unpack::<BITS>(panel.codes.add(block * code_block_bytes(BITS)));
            let at = block / 2 * 2 * TILE_BYTES + block % 2 * BLOCK;
            for part in 0..groups {
                let group = block * groups + part;
                let scales = widen(panel.scales.add(group * PANEL));
                let mins = if SHIFT == 0 { widen(panel.mins.add(group * PANEL)) } else { scales };
                for r in 0..R {
                    let high: *const i32 = x[r].add(at).cast();
                    let low: *const i32 = x[r].add(at + TILE_BYTES).cast();
                    let (mut highs, mut lows) = (_mm512_setzero_si512(), _mm512_setzero_si512());
                    #[allow(clippy::needless_range_loop)] // iterators keep the codes in memory, indices in registers
                    for g in part * 8 / groups..(part + 1) * 8 / groups {
                        highs = _mm512_dpbusd_epi32(highs, codes[g], _mm512_set1_epi32(high.add(g).read_unaligned()));
                        lows = _mm512_dpbusd_epi32(lows, codes[g], _mm512_set1_epi32(low.add(g).read_unaligned()));
                    }
                    let mut sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(highs), lows);
                    if SHIFT > 0 {
                        let biased = _mm512_set1_epi32(*sums[r].add(group) << SHIFT);
                        sum = _mm512_sub_epi32(sum, biased);
                    }
                    let (sum_a, sum_b) = to_f64(sum);
                    totals[r][0] = _mm512_fmadd_pd(scales.0, sum_a, totals[r][0]);
                    totals[r][1] = _mm512_fmadd_pd(scales.1, sum_b, totals[r][1]);
                    if SHIFT == 0 {
                        let own = _mm512_cvtepi32_pd(_mm256_set1_epi32(*sums[r].add(group)));
                        totals[r][0] = _mm512_fmadd_pd(mins.0, own, totals[r][0]);
                        totals[r][1] = _mm512_fmadd_pd(mins.1, own, totals[r][1]);
                    }
                }
            }
        }
        for (r, total) in totals.iter().enumerate() {
            put(task, &panel, panel_index, first_row + r, round_totals(total[0], total[1]));
        }
    }
}

/// Scales and stores the rounded totals of one row and panel.
///
/// # Safety
/// As `run`; row and panel exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn put(task: &Task, panel: &Panel, panel_index: usize, row: usize, rounded: __m512) {
    let n = task.panels.n;
    let mask = output_mask(task, panel_index);
    // SAFETY: the mask keeps to outputs below n.
    unsafe {
        let value = _mm512_mul_ps(rounded, _mm512_loadu_ps(panel.steps));
        let value = _mm512_mul_ps(value, _mm512_set1_ps(*task.x.scales().add(row)));
        let out = task.out.add(row * n + panel_index * PANEL);
        let value = if task.add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), value) } else { value };
        _mm512_mask_storeu_ps(out, mask, value);
    }
}

/// The lanes of a panel's outputs that exist.
pub(super) fn output_mask(task: &Task, panel_index: usize) -> __mmask16 {
    (0xffff_u32 >> (PANEL - task.num_outputs(panel_index))) as __mmask16
}

/// `super::round_total` in sixteen lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn round_totals(a: __m512d, b: __m512d) -> __m512 {
    let split = |total: __m512d| {
        let high = _mm512_roundscale_pd::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(_mm512_mul_pd(
            total,
            _mm512_set1_pd(1.0 / 65536.0),
        ));
        (_mm512_cvtpd_ps(high), _mm512_cvtpd_ps(_mm512_fnmadd_pd(high, _mm512_set1_pd(65536.0), total)))
    };
    let join = |low: __m256, high: __m256| _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high);
    let ((high_a, low_a), (high_b, low_b)) = (split(a), split(b));
    _mm512_fmadd_ps(join(high_a, high_b), _mm512_set1_ps(65536.0), join(low_a, low_b))
}

/// Sixteen i16 as two vectors of f64.
///
/// # Safety
/// Sixteen elements are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn widen(from: *const i16) -> (__m512d, __m512d) {
    // SAFETY: by the caller's word.
    to_f64(_mm512_cvtepi16_epi32(unsafe { _mm256_loadu_si256(from.cast()) }))
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn to_f64(v: __m512i) -> (__m512d, __m512d) {
    (_mm512_cvtepi32_pd(_mm512_castsi512_si256(v)), _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64::<1>(v)))
}

/// The codes of a block, a byte each: vector g holds elements 4g..4g+3 of sixteen outputs.
///
/// # Safety
/// `codes` points at a block of this format.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn unpack<const BITS: u32>(codes: *const u8) -> [__m512i; 8] {
    // SAFETY: the block holds 8 * BITS bytes an output, 64 a part.
    let part = |i: usize| unsafe { _mm512_loadu_si512(codes.add(64 * i).cast()) };
    if BITS == 8 {
        return std::array::from_fn(part);
    }
    let nibble = _mm512_set1_epi8(15);
    let mut out = [nibble; 8];
    for g in 0..4 {
        let both = part(g);
        out[g] = _mm512_and_si512(both, nibble);
        out[g + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble);
    }
    if BITS == 5 {
        let high = part(4);
        let bit = _mm512_set1_epi8(16);
        let shifted = [
            _mm512_slli_epi16::<4>(high),
            _mm512_slli_epi16::<3>(high),
            _mm512_slli_epi16::<2>(high),
            _mm512_slli_epi16::<1>(high),
            high,
            _mm512_srli_epi16::<1>(high),
            _mm512_srli_epi16::<2>(high),
            _mm512_srli_epi16::<3>(high),
        ];
        for g in 0..8 {
            out[g] = _mm512_or_si512(out[g], _mm512_and_si512(shifted[g], bit));
        }
    }
    if BITS == 6 {
        let bits = _mm512_set1_epi8(48);
        for half in 0..2 {
            let high = part(4 + half);
            let shifted =
                [_mm512_slli_epi16::<4>(high), _mm512_slli_epi16::<2>(high), high, _mm512_srli_epi16::<2>(high)];
            for g in 0..4 {
                out[4 * half + g] = _mm512_or_si512(out[4 * half + g], _mm512_and_si512(shifted[g], bits));
            }
        }
    }
    out
}
