//! The AMX form for many rows: weights become byte planes of their integers `W`, panel by panel into scratch that stays in
//! the caches, and int8 tile products of planes run over all of k.
//!
//! With `a = 256 ah + al` and `W = 256 Wh + Wl` (high bytes signed, Wl unsigned): `total = 65536 ah.Wh + 256 (ah.Wl +
//! al.Wh) + al.Wl`; three accumulators, four products for 64 elements of 16 x 16 outputs: 256 multiply-adds a cycle at
//! most. Three planes of W take four accumulators and six products. Sums stay below 2^31 for k up to `MAX_K`.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;

use super::avx512::{put, unpack};
use super::Task;
use crate::activations::{TILE_BYTES, TILE_K, TILE_ROWS};
use crate::cpu::panels::{code_block_bytes, Panel, BLOCK, PANEL};

/// Beyond it an accumulator could overflow.
pub(super) const MAX_K: usize = 1 << 15;

/// A tile's bytes in memory, read and written through pointers.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Tile(#[allow(dead_code)] [u8; TILE_BYTES]);

thread_local! {
    /// The planes of the panels at hand, `[k tile][plane]`; kept between tasks.
    static PLANES: RefCell<Vec<Tile>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL, VNNI and AMX int8, and the process may use tiles; the task is within its
/// matrix and activations, and k <= `MAX_K`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn run(task: &Task) {
    let rows = task.x.rows();
    let k_tiles = task.panels.k.div_ceil(TILE_K);
    let planes = task.panels.planes();
    PLANES.with_borrow_mut(|scratch| {
        let per_panel = k_tiles * planes;
        if scratch.len() < per_panel * task.num_panels {
            scratch.resize(per_panel * task.num_panels, Tile([0; TILE_BYTES]));
        }
        // SAFETY: by the caller's word; scratch holds the task's panels.
        unsafe {
            for p in 0..task.num_panels {
                let to = scratch[p * per_panel..].as_mut_ptr().cast();
                expand(task, &task.panels.panel(task.first_panel + p), to);
            }
            configure(rows.min(TILE_ROWS) as u8);
            for row in (0..rows).step_by(TILE_ROWS) {
                for p in 0..task.num_panels {
                    let weights = scratch[p * per_panel..].as_ptr().cast();
                    multiply(task, task.first_panel + p, row, weights);
                }
            }
            asm!("tilerelease", options(nostack, nomem));
        }
    });
}

/// Tiles 0..=3 accumulators and 4, 5 activations (`rows` rows), 6, 7 weights (16 rows); all 64 bytes wide.
///
/// # Safety
/// AMX is there and allowed.
unsafe fn configure(rows: u8) {
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        column_bytes: [u16; 16],
        rows: [u8; 16],
    }
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], column_bytes: [0; 16], rows: [0; 16] };
    for tile in 0..8 {
        config.column_bytes[tile] = 64;
        config.rows[tile] = if tile < 6 { rows } else { 16 };
    }
    // SAFETY: a valid configuration of palette 1; tile registers are this code's alone.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}

/// One tile of rows by one panel.
///
/// # Safety
/// As `run`, tiles configured; `weights` holds the panel's planes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply(task: &Task, panel_index: usize, first_row: usize, weights: *const u8) {
    let k_tiles = task.panels.k.div_ceil(TILE_K);
    let rows = (task.x.rows() - first_row).min(TILE_ROWS);
    let panel = task.panels.panel(panel_index);
    let mut sums = [const { std::mem::MaybeUninit::<Tile>::uninit() }; 4];
    let to: *mut u8 = sums.as_mut_ptr().cast();
    // SAFETY: by the caller's word. The sums' first `rows` rows are written before they are read.
    unsafe {
        let x = task.x.integers::<u8>().add(first_row / TILE_ROWS * k_tiles * 2 * TILE_BYTES).cast_const();
        if task.panels.planes() == 2 {
            two_planes(x, weights, k_tiles, to);
        } else {
            three_planes(x, weights, k_tiles, to);
        }
        for r in 0..rows {
            let sum = |i: usize| _mm512_load_si512(to.add(i * TILE_BYTES + r * 64).cast());
            let rounded = if task.panels.planes() == 2 {
                round_two(sum(0), sum(1), sum(2))
            } else {
                round_three(sum(0), sum(1), sum(2), sum(3))
            };
            put(task, &panel, panel_index, first_row + r, rounded);
        }
    }
}

/// Sums to `to`: al.Wl, ah.Wl + al.Wh, ah.Wh, a tile each.
///
/// # Safety
/// Tiles configured; `x` and `weights` hold two planes of `k_tiles` tiles, `to` three tiles.
unsafe fn two_planes(x: *const u8, weights: *const u8, k_tiles: usize, to: *mut u8) {
    // SAFETY: reads and writes what the contract names; tile registers are this code's alone.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
            "2:",
            "tileloadd tmm6, [{w} + {stride}]",
            "tileloadd tmm4, [{x} + {stride}]",
            "tdpbssd tmm2, tmm4, tmm6",
            "tileloadd tmm5, [{x} + {stride} + 1024]",
            "tdpbssd tmm1, tmm5, tmm6",
            "tileloadd tmm7, [{w} + {stride} + 1024]",
            "tdpbsud tmm0, tmm5, tmm7",
            "tdpbsud tmm1, tmm4, tmm7",
            "add {x}, 2048",
            "add {w}, 2048",
            "dec {count}",
            "jnz 2b",
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + 1024], tmm1",
            "tilestored [{to} + {stride} + 2048], tmm2",
            x = inout(reg) x => _,
            w = inout(reg) weights => _,
            count = inout(reg) k_tiles => _,
            to = in(reg) to,
            stride = in(reg) 64usize,
            options(nostack),
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
        );
    }
}

/// Sums to `to`: al.W0, ah.W0 + al.W1, ah.W1 + al.W2, ah.W2, a tile each. Planes of weights: W2 (signed), W1, W0.
///
/// # Safety
/// Tiles configured; `x` holds two and `weights` three planes of `k_tiles` tiles, `to` four tiles.
unsafe fn three_planes(x: *const u8, weights: *const u8, k_tiles: usize, to: *mut u8) {
    // SAFETY: reads and writes what the contract names; tile registers are this code's alone.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x} + {stride}]",
            "tileloadd tmm5, [{x} + {stride} + 1024]",
            "tileloadd tmm6, [{w} + {stride}]",
            "tdpbssd tmm3, tmm4, tmm6",
            "tdpbssd tmm2, tmm5, tmm6",
            "tileloadd tmm7, [{w} + {stride} + 1024]",
            "tdpbsud tmm1, tmm5, tmm7",
            "tdpbsud tmm2, tmm4, tmm7",
            "tileloadd tmm6, [{w} + {stride} + 2048]",
            "tdpbsud tmm0, tmm5, tmm6",
            "tdpbsud tmm1, tmm4, tmm6",
            "add {x}, 2048",
            "add {w}, 3072",
            "dec {count}",
            "jnz 2b",
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + 1024], tmm1",
            "tilestored [{to} + {stride} + 2048], tmm2",
            "tilestored [{to} + {stride} + 3072], tmm3",
            x = inout(reg) x => _,
            w = inout(reg) weights => _,
            count = inout(reg) k_tiles => _,
            to = in(reg) to,
            stride = in(reg) 64usize,
            options(nostack),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
        );
    }
}

/// `super::round_total` of `low + 256 middle + 65536 high`, in integers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn round_two(low: __m512i, middle: __m512i, high: __m512i) -> __m512 {
    let low_byte = _mm512_and_si512(middle, _mm512_set1_epi32(0xff));
    let low = _mm512_add_epi32(low, _mm512_slli_epi32::<8>(low_byte));
    let high = _mm512_add_epi32(high, _mm512_srai_epi32::<8>(middle));
    let high = _mm512_add_epi32(high, _mm512_srai_epi32::<16>(low));
    let low = _mm512_and_si512(low, _mm512_set1_epi32(0xffff));
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536.0), _mm512_cvtepi32_ps(low))
}

/// `super::round_total` of four levels, each 256 times the one before, in f64 (exact).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn round_three(l0: __m512i, l1: __m512i, l2: __m512i, l3: __m512i) -> __m512 {
    let total = |pick: fn(__m512i) -> __m256i| {
        let base = _mm512_set1_pd(256.0);
        let mut total = _mm512_cvtepi32_pd(pick(l3));
        for level in [l2, l1, l0] {
            total = _mm512_fmadd_pd(total, base, _mm512_cvtepi32_pd(pick(level)));
        }
        total
    };
    let (a, b) = (total(|v| _mm512_castsi512_si256(v)), total(|v| _mm512_extracti64x4_epi64::<1>(v)));
    super::avx512::round_totals(a, b)
}

/// Writes the planes of a panel's integers, `[k tile][plane][k / 4][output][k % 4]`.
///
/// # Safety
/// As `run`; `to` has room for the panel's planes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand(task: &Task, panel: &Panel, to: *mut u8) {
    let format = task.panels.format;
    // SAFETY: by the caller's word.
    unsafe {
        match (format.bits, format.bias) {
            (4, None) => expand_two::<4>(task.panels.k, panel, None, to),
            (4, bias) => expand_two::<4>(task.panels.k, panel, bias, to),
            (5, bias) => expand_two::<5>(task.panels.k, panel, bias, to),
            (6, _) => expand_three::<6>(task.panels.k, panel, to),
            _ => expand_three::<8>(task.panels.k, panel, to),
        }
    }
}

/// # Safety
/// As `expand`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_two<const BITS: u32>(k: usize, panel: &Panel, bias: Option<i32>, to: *mut u8) {
    let low_bytes = _mm512_set1_epi16(0xff);
    // SAFETY: blocks and groups stay below the panel's; two blocks fill a tile of each plane.
    unsafe {
        for block in 0..k / BLOCK {
            let codes = unpack::<BITS>(panel.codes.add(block * code_block_bytes(BITS)));
            // Each 16-bit number twice in its output's 32-bit lane.
            let twice = |from: *const i16| {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_or_si512(wide, _mm512_slli_epi32::<16>(wide))
            };
            let scales = twice(panel.scales.add(block * PANEL));
            let mins = match bias {
                None => twice(panel.mins.add(block * PANEL)),
                Some(bias) => _mm512_mullo_epi16(scales, _mm512_set1_epi16(-bias as i16)),
            };
            let high = to.add(block / 2 * 2 * TILE_BYTES + block % 2 * TILE_BYTES / 2);
            for (g, codes) in codes.into_iter().enumerate() {
                let weight = |codes| _mm512_add_epi16(_mm512_mullo_epi16(codes, scales), mins);
                let even = weight(_mm512_and_si512(codes, low_bytes));
                let odd = weight(_mm512_srli_epi16::<8>(codes));
                // The low byte of even words and the high byte of odd ones: a where the mask is set, else b.
                let highs = _mm512_ternarylogic_epi32::<0xca>(low_bytes, _mm512_srli_epi16::<8>(even), odd);
                let lows = _mm512_ternarylogic_epi32::<0xca>(low_bytes, even, _mm512_slli_epi16::<8>(odd));
                _mm512_store_si512(high.add(g * 64).cast(), highs);
                _mm512_store_si512(high.add(TILE_BYTES + g * 64).cast(), lows);
            }
        }
        if k % TILE_K != 0 {
            // The last tile's other half meets zeros of the activations: any bytes will do, and scratch is initialised.
            debug_assert!(k % BLOCK == 0);
        }
    }
}

/// # Safety
/// As `expand`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_three<const BITS: u32>(k: usize, panel: &Panel, to: *mut u8) {
    let bias = _mm512_set1_epi32(1 << (BITS - 1));
    let byte = _mm512_set1_epi32(0xff);
    // SAFETY: blocks and groups stay below the panel's; two blocks fill a tile of each plane.
    unsafe {
        for block in 0..k / BLOCK {
            let codes = unpack::<BITS>(panel.codes.add(block * code_block_bytes(BITS)));
            let base = to.add(block / 2 * 3 * TILE_BYTES + block % 2 * TILE_BYTES / 2);
            for (g, codes) in codes.into_iter().enumerate() {
                let group = if BITS == 6 { 2 * block + g / 4 } else { block };
                let scales = _mm512_cvtepi16_epi32(_mm256_loadu_si256(panel.scales.add(group * PANEL).cast()));
                let weight = |code| _mm512_mullo_epi32(_mm512_sub_epi32(_mm512_and_si512(code, byte), bias), scales);
                let w0 = weight(codes);
                let w1 = weight(_mm512_srli_epi32::<8>(codes));
                let w2 = weight(_mm512_srli_epi32::<16>(codes));
                let w3 = weight(_mm512_srli_epi32::<24>(codes));
                let join = |w0, w1, w2, w3| {
                    let low = _mm512_or_si512(_mm512_and_si512(w0, byte), _mm512_slli_epi32::<8>(_mm512_and_si512(w1, byte)));
                    let high = _mm512_or_si512(_mm512_and_si512(w2, byte), _mm512_slli_epi32::<8>(_mm512_and_si512(w3, byte)));
                    _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
                };
                _mm512_store_si512(base.add(2 * TILE_BYTES + g * 64).cast(), join(w0, w1, w2, w3));
                let down = |w| _mm512_srai_epi32::<8>(w);
                let (w0, w1, w2, w3) = (down(w0), down(w1), down(w2), down(w3));
                _mm512_store_si512(base.add(TILE_BYTES + g * 64).cast(), join(w0, w1, w2, w3));
                _mm512_store_si512(base.add(g * 64).cast(), join(down(w0), down(w1), down(w2), down(w3)));
            }
        }
    }
}
