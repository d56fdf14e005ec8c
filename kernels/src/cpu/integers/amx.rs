//! The AMX form for many rows: weights become byte planes of their integers `W`, panel by panel into scratch that stays in
//! the caches, and int8 tile products of planes run over all of k.
//!
//! With `a = 256 ah + al` and `W = 256 Wh + Wl` (high bytes signed, Wl unsigned): `total = 65536 ah.Wh + 256 (ah.Wl +
//! al.Wh) + al.Wl`; four products for 64 elements of 16 x 16 outputs: 256 multiply-adds a cycle at most. Three planes of W
//! take six products. Sums stay below 2^31 for k up to `MAX_K`.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::{RefCell, UnsafeCell};
use std::mem::MaybeUninit;

use super::avx512::{output_mask, unpack};
use super::Task;
use crate::activations::{TILE_BYTES, TILE_K, TILE_ROWS};
use crate::cpu::memory::Memory;
use crate::cpu::panels::{code_block_bytes, Panel, BLOCK, PANEL};

/// Tiles of weights in flight where one tile of rows is multiplied: their loads need not wait for stores on top of them.
const RING: usize = 4;
/// Beyond it an accumulator could overflow.
pub(super) const MAX_K: usize = 1 << 15;

/// Sums of one tile of rows by one panel: up to four accumulators.
#[repr(align(64))]
struct Sums(UnsafeCell<MaybeUninit<[u8; 4 * TILE_BYTES]>>);

thread_local! {
    /// The planes of the panels at hand, `[panel][k tile][plane]`; kept between tasks.
    static PLANES: RefCell<Option<Memory>> = const { RefCell::new(None) };
}

/// Room for planes: what the last tasks used, or a new piece where that is too small.
fn planes_scratch(bytes: usize) -> Memory {
    match PLANES.take() {
        Some(memory) if memory.bytes() >= bytes => memory,
        _ => Memory::zeroed("planes of weights", bytes.next_power_of_two()).expect("a few hundred KiB of memory"),
    }
}

/// A product whose sums wait to be rounded, which happens between the tile instructions of the next one.
struct Waiting<'a> {
    task: &'a Task<'a>,
    panel: usize,
    first_row: usize,
    /// Rows that are done, and all.
    done: usize,
    rows: usize,
    sums: *const u8,
}

/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL, VNNI and AMX int8, and the process may use tiles; the task is within its
/// matrix and activations, and k <= `MAX_K`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn run(task: &Task) {
    // SAFETY: by the caller's word; each arm matches the panels' format.
    unsafe {
        match (task.panels.format.bits, task.panels.format.bias) {
            (4, None) => panels::<4, 0>(task),
            (4, Some(_)) => panels::<4, 8>(task),
            (5, None) => panels::<5, 0>(task),
            (5, Some(_)) => panels::<5, 16>(task),
            (6, _) => panels::<6, 32>(task),
            _ => panels::<8, 128>(task),
        }
    }
}

/// `BIAS`: the format's bias; 0 for a format with mins.
///
/// # Safety
/// As `run`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn panels<const BITS: u32, const BIAS: i32>(task: &Task) {
    let rows = task.x.rows();
    let k_tiles = task.panels.k.div_ceil(TILE_K);
    let planes = if BITS <= 5 { 2 } else { 3 };
    let per_panel = k_tiles * planes;
    let scratch = planes_scratch(per_panel * task.num_panels * TILE_BYTES);
    let planes_of = |index: usize| scratch.as_ptr::<u8>().wrapping_add(index * TILE_BYTES);
    let sums = [const { Sums(UnsafeCell::new(MaybeUninit::uninit())) }; 2];
    let mut waiting: Option<Waiting> = None;
    // SAFETY: by the caller's word; scratch holds the task's panels.
    unsafe {
        configure(rows.min(TILE_ROWS) as u8);
        if rows > TILE_ROWS {
            for p in 0..task.num_panels {
                let panel = task.panels.panel(task.first_panel + p);
                for tile in 0..k_tiles {
                    let to = planes_of(p * per_panel + tile * planes);
                    expand_tile::<BITS, BIAS>(task.panels.k, &panel, tile, to);
                }
            }
        }
        let mut turn = 0;
        for first_row in (0..rows).step_by(TILE_ROWS) {
            for p in 0..task.num_panels {
                let to: *mut u8 = sums[turn].0.get().cast();
                turn ^= 1;
                let panel = task.first_panel + p;
                if rows > TILE_ROWS {
                    multiply::<BITS>(task, first_row, planes_of(p * per_panel), to, waiting.as_mut());
                } else {
                    expand_and_multiply::<BITS, BIAS>(task, panel, planes_of(0), to, waiting.as_mut());
                }
                if let Some(last) = &mut waiting {
                    last.finish(TILE_ROWS);
                }
                let rows = (rows - first_row).min(TILE_ROWS);
                waiting = Some(Waiting { task, panel, first_row, done: 0, rows, sums: to });
            }
        }
        if let Some(last) = &mut waiting {
            last.finish(TILE_ROWS);
        }
        asm!("tilerelease", options(nostack, nomem));
    }
    PLANES.set(Some(scratch));
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
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], column_bytes: [0; 16], rows: [0; 16] };
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

/// One tile of rows by the planes of one panel.
///
/// # Safety
/// As `run`, tiles configured; `weights` holds the panel's planes, `to` has room for the sums.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply<const BITS: u32>(
    task: &Task,
    first_row: usize,
    weights: *const u8,
    to: *mut u8,
    mut waiting: Option<&mut Waiting>,
) {
    let k_tiles = task.panels.k.div_ceil(TILE_K);
    let planes = if BITS <= 5 { 2 } else { 3 };
    let rows_a_step = TILE_ROWS.div_ceil(k_tiles);
    // SAFETY: by the caller's word.
    unsafe {
        let x = task.x.integers::<u8>().add(first_row / TILE_ROWS * k_tiles * 2 * TILE_BYTES).cast_const();
        zero_sums();
        for tile in 0..k_tiles {
            step::<BITS>(x.add(tile * 2 * TILE_BYTES), weights.add(tile * planes * TILE_BYTES));
            if let Some(waiting) = &mut waiting {
                waiting.finish(rows_a_step);
            }
        }
        store_sums(to);
    }
}

/// The only tile of rows by one panel: products run in the shadow of expanding the next weights.
///
/// # Safety
/// As `run`, tiles configured; `scratch` holds the panel's planes, `to` has room for the sums.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_and_multiply<const BITS: u32, const BIAS: i32>(
    task: &Task,
    panel_index: usize,
    scratch: *mut u8,
    to: *mut u8,
    mut waiting: Option<&mut Waiting>,
) {
    let k_tiles = task.panels.k.div_ceil(TILE_K);
    let planes = if BITS <= 5 { 2 } else { 3 };
    let rows_a_step = TILE_ROWS.div_ceil(k_tiles);
    let panel = task.panels.panel(panel_index);
    // SAFETY: by the caller's word.
    unsafe {
        let x = task.x.integers::<u8>().cast_const();
        zero_sums();
        for tile in 0..k_tiles {
            // Buffers in turn: the tile being read is not the one being written.
            let weights = scratch.add(tile % RING.min(k_tiles) * planes * TILE_BYTES);
            expand_tile::<BITS, BIAS>(task.panels.k, &panel, tile, weights);
            step::<BITS>(x.add(tile * 2 * TILE_BYTES), weights);
            if let Some(waiting) = &mut waiting {
                waiting.finish(rows_a_step);
            }
        }
        store_sums(to);
    }
}

impl Waiting<'_> {
    /// Rounds, scales and stores up to `count` rows.
    ///
    /// # Safety
    /// As `run`; `sums` holds the sums of the task's rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn finish(&mut self, count: usize) {
        let (task, n) = (self.task, self.task.panels.n);
        let mask = output_mask(task, self.panel);
        let end = (self.done + count).min(self.rows);
        // SAFETY: by the caller's word; the mask keeps to outputs below n.
        unsafe {
            let steps = _mm512_loadu_ps(task.panels.panel(self.panel).steps);
            for r in self.done..end {
                let sum = |i: usize| _mm512_load_si512(self.sums.add(i * TILE_BYTES + r * 64).cast());
                let rounded = if task.panels.planes() == 2 {
                    round_two(sum(0), _mm512_add_epi32(sum(1), sum(3)), sum(2))
                } else {
                    round_three(sum(0), sum(1), sum(2), sum(3))
                };
                let scale = _mm512_set1_ps(*task.x.scales().add(self.first_row + r));
                let value = _mm512_mul_ps(_mm512_mul_ps(rounded, steps), scale);
                let out = task.out.add((self.first_row + r) * n + self.panel * PANEL);
                let value = if task.add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), value) } else { value };
                _mm512_mask_storeu_ps(out, mask, value);
            }
        }
        self.done = end;
    }
}

/// # Safety
/// Tiles configured.
#[inline(always)]
unsafe fn zero_sums() {
    // SAFETY: tile registers are this code's alone.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _);
    }
}

/// # Safety
/// Tiles configured; `to` has room for the sums.
#[inline(always)]
unsafe fn store_sums(to: *mut u8) {
    // SAFETY: by the caller's word.
    unsafe {
        asm!(
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + 1024], tmm1",
            "tilestored [{to} + {stride} + 2048], tmm2",
            "tilestored [{to} + {stride} + 3072], tmm3",
            to = in(reg) to, stride = in(reg) 64usize, options(nostack),
        );
    }
}

/// The products of one tile of activations with one of weights, on top of the sums.
///
/// # Safety
/// Tiles configured; `x` holds two planes of a tile, `weights` the format's planes.
#[inline(always)]
unsafe fn step<const BITS: u32>(x: *const u8, weights: *const u8) {
    // SAFETY: by the caller's word.
    unsafe {
        if BITS <= 5 {
            two_planes(x, weights);
        } else {
            three_planes(x, weights);
        }
    }
}

/// Sums 0..=3: al.Wl, al.Wh, ah.Wh, ah.Wl. Planes of weights: Wh (signed), Wl. The two middle sums are added later: a
/// product takes 52 cycles and would have to wait for the one before on the same sum.
///
/// # Safety
/// As `step`.
#[inline(always)]
unsafe fn two_planes(x: *const u8, weights: *const u8) {
    // SAFETY: reads what the contract names; tile registers are this code's alone.
    unsafe {
        asm!(
            "tileloadd tmm6, [{w} + {stride}]",
            "tileloadd tmm4, [{x} + {stride}]",
            "tdpbssd tmm2, tmm4, tmm6",
            "tileloadd tmm5, [{x} + {stride} + 1024]",
            "tdpbssd tmm1, tmm5, tmm6",
            "tileloadd tmm7, [{w} + {stride} + 1024]",
            "tdpbsud tmm0, tmm5, tmm7",
            "tdpbsud tmm3, tmm4, tmm7",
            x = in(reg) x, w = in(reg) weights, stride = in(reg) 64usize, options(nostack, readonly),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
        );
    }
}

/// Sums 0..=3: al.W0, ah.W0 + al.W1, ah.W1 + al.W2, ah.W2. Planes of weights: W2 (signed), W1, W0.
///
/// # Safety
/// As `step`.
#[inline(always)]
unsafe fn three_planes(x: *const u8, weights: *const u8) {
    // SAFETY: reads what the contract names; tile registers are this code's alone.
    unsafe {
        asm!(
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
            x = in(reg) x, w = in(reg) weights, stride = in(reg) 64usize, options(nostack, readonly),
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

/// Writes the planes of one tile of a panel's integers, `[plane][k / 4][output][k % 4]`.
///
/// # Safety
/// As `run`; the panel has the tile (its last may be half there: zeros of the activations meet what `to` held);
/// `to` has room for the planes.
#[inline(always)]
unsafe fn expand_tile<const BITS: u32, const BIAS: i32>(k: usize, panel: &Panel, tile: usize, to: *mut u8) {
    for half in 0..2 {
        let block = 2 * tile + half;
        if block * BLOCK < k {
            // SAFETY: by the caller's word.
            unsafe {
                if BITS <= 5 {
                    expand_two::<BITS, BIAS>(panel, block, to.add(half * TILE_BYTES / 2));
                } else {
                    expand_three::<BITS, BIAS>(panel, block, to.add(half * TILE_BYTES / 2));
                }
            }
        }
    }
}

/// # Safety
/// As `expand_tile`; the panel has the block, `to` is its half of the first plane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_two<const BITS: u32, const BIAS: i32>(panel: &Panel, block: usize, to: *mut u8) {
    let low_bytes = _mm512_set1_epi16(0xff);
    // SAFETY: by the caller's word.
    unsafe {
        let codes = unpack::<BITS>(panel.codes.add(block * code_block_bytes(BITS)));
        // Each 16-bit number twice in its output's 32-bit lane.
        let twice = |from: *const i16| {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_or_si512(wide, _mm512_slli_epi32::<16>(wide))
        };
        let scales = twice(panel.scales.add(block * PANEL));
        let mins = match BIAS {
            0 => twice(panel.mins.add(block * PANEL)),
            bias => _mm512_mullo_epi16(scales, _mm512_set1_epi16(-bias as i16)),
        };
        for g in 0..8 {
            let codes = codes[g];
            let weight = |codes| _mm512_add_epi16(_mm512_mullo_epi16(codes, scales), mins);
            let even = weight(_mm512_and_si512(codes, low_bytes));
            let odd = weight(_mm512_srli_epi16::<8>(codes));
            // The low byte of even words and the high byte of odd ones: a where the mask is set, else b.
            let highs = _mm512_ternarylogic_epi32::<0xca>(low_bytes, _mm512_srli_epi16::<8>(even), odd);
            let lows = _mm512_ternarylogic_epi32::<0xca>(low_bytes, even, _mm512_slli_epi16::<8>(odd));
            _mm512_store_si512(to.add(g * 64).cast(), highs);
            _mm512_store_si512(to.add(TILE_BYTES + g * 64).cast(), lows);
        }
    }
}

/// # Safety
/// As `expand_two`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_three<const BITS: u32, const BIAS: i32>(panel: &Panel, block: usize, to: *mut u8) {
    let bias = _mm512_set1_epi32(BIAS);
    let byte = _mm512_set1_epi32(0xff);
    // SAFETY: by the caller's word.
    unsafe {
        let codes = unpack::<BITS>(panel.codes.add(block * code_block_bytes(BITS)));
        for g in 0..8 {
            let codes = codes[g];
            let group = if BITS == 6 { 2 * block + g / 4 } else { block };
            let scales = _mm512_cvtepi16_epi32(_mm256_loadu_si256(panel.scales.add(group * PANEL).cast()));
            let weight = |code| _mm512_mullo_epi32(_mm512_sub_epi32(_mm512_and_si512(code, byte), bias), scales);
            let mut w = [
                weight(codes),
                weight(_mm512_srli_epi32::<8>(codes)),
                weight(_mm512_srli_epi32::<16>(codes)),
                weight(_mm512_srli_epi32::<24>(codes)),
            ];
            for step in 0..3 {
                let plane = 2 - step;
                let byte_at = |i: usize| _mm512_and_si512(w[i], byte);
                let low = _mm512_or_si512(byte_at(0), _mm512_slli_epi32::<8>(byte_at(1)));
                let high = _mm512_or_si512(byte_at(2), _mm512_slli_epi32::<8>(byte_at(3)));
                let joined = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                _mm512_store_si512(to.add(plane * TILE_BYTES + g * 64).cast(), joined);
                for w in &mut w {
                    *w = _mm512_srai_epi32::<8>(*w);
                }
            }
        }
    }
}
