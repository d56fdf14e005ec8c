//! Quantised weights as the integer kernels want them: panels of 16 outputs, the codes as they came, scales as integers.
//!
//! # Numbers
//! A weight is an integer times its row's step: `w = step[n] * W`, `W = D * code + M`, where `D` and `M` are the format's
//! scale and min in units of the step, rounded to 16 bits. With activations rounded to 16-bit integers (one scale a row,
//! see `activations.rs`), a dot product over all of k is an exact integer. So its value does not depend on the order,
//! the instruction set, the number of rows or threads: batch invariance needs no further care.
//! Formats of 4 and 5 bits keep `|W| < 2^15` (two byte planes for AMX), those of 6 and 8 bits `|W| <= 2^22` (three planes).
//! `M` is rounded so that the middle code's weight is exact to half a step, which halves the error of rounding `D`.
//!
//! # Layout
//! A panel is 16 outputs over all of k: codes of every 32-block, then `D` of every group, then `M` (absent where
//! `M = -bias * D`). Codes of a block: nibbles as 4 x 64 bytes, where byte j of 32-bit lane n in part i holds elements
//! 4i+j (low) and 16+4i+j (high) of output n, which is what a byte dot product (`vpdpbusd`) eats; then the fifth bits
//! (64 bytes, bit g of byte (n, j): element 4g+j) or the bits 4 and 5 (2 x 64 bytes, two bits an element). 8-bit codes are 8 x 64 bytes.

use super::blocks::{Format, Row};
use super::memory::Memory;
use crate::dtype::DType;
use crate::error::Result;

/// Outputs in a panel: the 32-bit lanes of a 512-bit register.
pub(crate) const PANEL: usize = 16;
/// Elements in a block of codes.
pub(crate) const BLOCK: usize = 32;
/// The largest |W| of the formats with two byte planes; leaves room for the rounding of D and M.
const TWO_PLANES: f32 = 32_700.0;
/// The largest |D| where |W| may take three planes.
const MAX_SCALE: f32 = 32_767.0;

pub(crate) struct CodePanels {
    memory: Memory,
    pub n: usize,
    pub k: usize,
    pub format: Format,
    panel_bytes: usize,
}

/// Where a panel's parts lie.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    pub codes: *const u8,
    pub scales: *const i16,
    /// Null where the format has a bias.
    pub mins: *const i16,
    pub steps: *const f32,
}

impl CodePanels {
    pub(crate) fn pack(dtype: DType, format: Format, n: usize, k: usize, bytes: &[u8]) -> Result<CodePanels> {
        let blocks = k / BLOCK;
        let groups = k / format.group_len;
        let mins = if format.bias.is_none() { groups } else { 0 };
        let panel_bytes = blocks * code_block_bytes(format.bits) + (groups + mins) * 2 * PANEL + 4 * PANEL;
        let panel_bytes = panel_bytes.next_multiple_of(64);
        let num_panels = n.div_ceil(PANEL);
        let memory = Memory::zeroed("a quantised matrix", num_panels * panel_bytes)?;
        let panels = CodePanels { memory, n, k, format, panel_bytes };
        let row_bytes = bytes.len() / n.max(1);
        let mut row = Row::default();
        for (output, row_bytes) in bytes.chunks_exact(row_bytes.max(1)).enumerate().take(n) {
            row.read(dtype, row_bytes);
            panels.pack_row(output, &row);
        }
        Ok(panels)
    }

    pub(crate) fn num_panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Byte planes that hold any weight.
    pub(crate) fn planes(&self) -> usize {
        if self.format.bits <= 5 {
            2
        } else {
            3
        }
    }

    pub(crate) fn panel(&self, index: usize) -> Panel {
        debug_assert!(index < self.num_panels());
        let blocks = self.k / BLOCK;
        let groups = self.k / self.format.group_len;
        // SAFETY: offsets below follow `pack`'s sum of the parts, all inside the panel, which lies inside the allocation.
        unsafe {
            let base = self.memory.as_ptr::<u8>().add(index * self.panel_bytes);
            let scales = base.add(blocks * code_block_bytes(self.format.bits));
            let mins = scales.add(groups * 2 * PANEL);
            let (mins, steps) = match self.format.bias {
                Some(_) => (std::ptr::null(), mins),
                None => (mins.cast_const().cast(), mins.add(groups * 2 * PANEL)),
            };
            Panel { codes: base, scales: scales.cast(), mins, steps: steps.cast() }
        }
    }

    /// One output's weights.
    pub(crate) fn dequantise_row(&self, output: usize, out: &mut [f32]) {
        let panel = self.panel(output / PANEL);
        let lane = output % PANEL;
        // SAFETY: the indices stay below the panel's blocks and groups because `out` is k long.
        unsafe {
            let step = *panel.steps.add(lane);
            for (i, out) in out.iter_mut().enumerate().take(self.k) {
                let code = i32::from(code_at(panel.codes, self.format.bits, lane, i));
                let group = i / self.format.group_len * PANEL + lane;
                let scale = i32::from(*panel.scales.add(group));
                let min = match self.format.bias {
                    Some(bias) => -bias * scale,
                    None => i32::from(*panel.mins.add(group)),
                };
                *out = step * (scale * code + min) as f32;
            }
        }
    }

    fn pack_row(&self, output: usize, row: &Row) {
        let panel = self.panel(output / PANEL);
        let lane = output % PANEL;
        let top = ((1u32 << self.format.bits) - 1) as f32;
        let step = match (self.format.bias, self.planes()) {
            (Some(_), 3) => largest(row.scales.iter().copied()) / MAX_SCALE,
            _ => {
                let ends = row.scales.iter().zip(&row.mins).flat_map(|(&scale, &min)| [min, scale * top + min]);
                largest(ends) / TWO_PLANES
            }
        };
        // A row of zeros, or one whose numbers are not finite: no integer stands for it, its weights become 0 or NaN.
        let usable = step.is_normal();
        // SAFETY: lane < PANEL; groups and elements follow the row, which is k long; the memory is ours alone while packing.
        unsafe {
            let steps = panel.steps.cast_mut();
            *steps.add(lane) = if usable || step == 0.0 { step } else { f32::NAN };
            if !usable {
                return;
            }
            for (i, &code) in row.codes.iter().enumerate() {
                put_code(panel.codes.cast_mut(), self.format.bits, lane, i, code);
            }
            for (group, (&scale, &min)) in row.scales.iter().zip(&row.mins).enumerate() {
                let scale = scale / step;
                let rounded = scale.round_ties_even();
                *panel.scales.cast_mut().add(group * PANEL + lane) = rounded as i16;
                if self.format.bias.is_none() {
                    let centred = min / step + (scale - rounded) * (0.5 * top);
                    *panel.mins.cast_mut().add(group * PANEL + lane) = centred.round_ties_even() as i16;
                }
            }
        }
    }
}

/// Bytes of 16 outputs' codes of one block.
pub(crate) const fn code_block_bytes(bits: u32) -> usize {
    PANEL * BLOCK * bits as usize / 8
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |max, v| if v.abs() > max || v.is_nan() { v.abs() } else { max })
}

/// Byte of (lane, j) in the 64-byte part `part`.
fn byte_of(block: usize, bits: u32, part: usize, lane: usize, j: usize) -> usize {
    block * code_block_bytes(bits) + part * 64 + lane * 4 + j
}

/// # Safety
/// `codes` is a panel that holds element `i`.
pub(crate) unsafe fn code_at(codes: *const u8, bits: u32, lane: usize, i: usize) -> u8 {
    let (block, group, j) = (i / BLOCK, i % BLOCK / 4, i % 4);
    // SAFETY: by the caller's word and the layout.
    let byte = |part: usize| unsafe { *codes.add(byte_of(block, bits, part, lane, j)) };
    if bits == 8 {
        return byte(group);
    }
    let nibble = if group < 4 { byte(group) & 15 } else { byte(group - 4) >> 4 };
    match bits {
        4 => nibble,
        5 => nibble | (byte(4) >> group & 1) << 4,
        _ => nibble | (byte(4 + group / 4) >> (2 * (group % 4)) & 3) << 4,
    }
}

/// # Safety
/// `codes` is a zeroed panel that holds element `i`, each element is put once, and nobody else looks.
unsafe fn put_code(codes: *mut u8, bits: u32, lane: usize, i: usize, code: u8) {
    let (block, group, j) = (i / BLOCK, i % BLOCK / 4, i % 4);
    // SAFETY: by the caller's word and the layout.
    let set = |part: usize, value: u8| unsafe { *codes.add(byte_of(block, bits, part, lane, j)) |= value };
    if bits == 8 {
        return set(group, code);
    }
    if group < 4 {
        set(group, code & 15);
    } else {
        set(group - 4, code << 4);
    }
    match bits {
        4 => {}
        5 => set(4, (code >> 4) << group),
        _ => set(4 + group / 4, (code >> 4) << (2 * (group % 4))),
    }
}
