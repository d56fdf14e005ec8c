//! Products of 16-bit integer activations with quantised weights: exact integer sums, then one rounding.
//!
//! For row r and output n: `total = sum over groups g of D[n,g] * (sum of code * a) + M[n,g] * (sum of a)`, an integer
//! below 2^53 in size (k <= 2^16, |a| < 2^15, |W| <= 2^22), so f64 sums of it are exact in any order. Its f32 form is
//! `high * 65536 + low` with `high = floor(total / 65536)` rounded to f32 first; then `* step[n] * scale[r]`.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::isa::Isa;
use super::panels::{CodePanels, PANEL};
use super::team::Worker;
use crate::activations::Activations;

/// What a kernel works on: every row of the activations with the panels of one task.
pub(super) struct Task<'a> {
    pub x: &'a Activations,
    pub panels: &'a CodePanels,
    pub first_panel: usize,
    pub num_panels: usize,
    pub out: *mut f32,
    pub add: bool,
}

/// From so many rows on, tiles win.
const AMX_ROWS: usize = 6;
/// Panels a task covers.
const TASK_PANELS: usize = 2;

pub(crate) fn num_tasks(_isa: Isa, panels: &CodePanels, rows: usize) -> usize {
    if rows == 0 {
        return 0;
    }
    panels.num_panels().div_ceil(TASK_PANELS)
}

pub(crate) fn matmul(w: &Worker, x: &Activations, panels: &CodePanels, task: usize, out: *mut f32, add: bool) {
    let first_panel = task * TASK_PANELS;
    let num_panels = TASK_PANELS.min(panels.num_panels() - first_panel);
    let task = Task { x, panels, first_panel, num_panels, out, add };
    match w.isa() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a device is opened only with an instruction set the machine has; the task is within its matrix.
        Isa::Amx if x.rows() >= AMX_ROWS && panels.k <= amx::MAX_K => unsafe { amx::run(&task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::run(&task) },
        isa => portable::run(&task, super::quantise::reads_tiles(isa)),
    }
}

/// The f32 of an exact total.
pub(super) fn round_total(total: f64) -> f32 {
    let high = (total * (1.0 / 65536.0)).floor();
    let low = total - high * 65536.0;
    (high as f32).mul_add(65536.0, low as f32)
}

impl Task<'_> {
    /// Outputs of a panel that exist.
    pub(super) fn num_outputs(&self, panel: usize) -> usize {
        PANEL.min(self.panels.n - panel * PANEL)
    }
}
