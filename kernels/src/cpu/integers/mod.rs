//! Products of 16-bit integer activations with quantised weights: exact integer sums, then one rounding.
//!
//! For row r and output n: `total = sum over groups g of D[n,g] * (sum of code * a) + M[n,g] * (sum of a)`, an integer
//! below 2^53 in size (k <= 2^16, |a| < 2^15, |W| <= 2^22), so f64 sums of it are exact in any order. Its f32 form is
//! `high * 65536 + low` with `high = floor(total / 65536)` rounded to f32 first; then `* step[n] * scale[r]`.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::isa::Isa;
use super::panels::{CodePanels, PANEL};
use super::team::Worker;
use crate::activations::{Activations, TILE_ROWS};

/// What a kernel works on: every row of the activations with the panels of one task.
pub(super) struct Task<'a> {
    pub x: &'a Activations,
    pub panels: &'a CodePanels,
    pub first_panel: usize,
    pub num_panels: usize,
    pub out: *mut f32,
    pub add: bool,
}

/// From so many rows on, tiles win: weights of two byte planes, and of three, which are dearer to expand.
const AMX_ROWS: [usize; 2] = [4, 12];
/// Panels a task covers, few rows: small enough to share out evenly.
const FEW_PANELS: usize = 2;
/// Panels a task covers, many rows: the activations stream past once for all of them.
const MANY_PANELS: usize = 6;

pub(crate) fn num_tasks(isa: Isa, panels: &CodePanels, rows: usize) -> usize {
    if rows == 0 {
        return 0;
    }
    panels.num_panels().div_ceil(task_panels(isa, rows))
}

pub(crate) fn matmul(w: &Worker, x: &Activations, panels: &CodePanels, task: usize, out: *mut f32, add: bool) {
    let per_task = task_panels(w.isa(), x.rows());
    let first_panel = task * per_task;
    let num_panels = per_task.min(panels.num_panels() - first_panel);
    let task = Task { x, panels, first_panel, num_panels, out, add };
    match w.isa() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a device is opened only with an instruction set the machine has; the task is within its matrix.
        Isa::Amx if x.rows() >= AMX_ROWS[panels.planes() - 2] && panels.k <= amx::MAX_K => unsafe { amx::run(&task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::run(&task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { avx2::run(&task) },
        isa => portable::run(&task, super::quantise::reads_tiles(isa)),
    }
}

fn task_panels(isa: Isa, rows: usize) -> usize {
    if isa == Isa::Amx && rows > TILE_ROWS {
        MANY_PANELS
    } else {
        FEW_PANELS
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
