//! The input of matrix products: rows of activations in the forms that the weights at hand want.

use crate::cpu::isa::Isa;
use crate::cpu::memory::Memory;
use crate::device::Device;
use crate::error::{ensure, Result};
use crate::matrix::Matrix;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which forms of its rows an [`Activations`] keeps: integers for quantised weights, floats for float weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InputForms {
    pub integers: bool,
    pub floats: bool,
}

impl InputForms {
    /// The forms that products with all these matrices need.
    pub fn for_matrices<'a>(matrices: impl IntoIterator<Item = &'a Matrix>) -> InputForms {
        matrices.into_iter().fold(InputForms::default(), |forms, matrix| forms.union(matrix.input_forms()))
    }

    pub fn union(self, other: InputForms) -> InputForms {
        InputForms { integers: self.integers | other.integers, floats: self.floats | other.floats }
    }
}

/// Rows in a tile of the integer planes, as many as a tile register of AMX has.
pub(crate) const TILE_ROWS: usize = 16;
/// Elements of a row in one tile.
pub(crate) const TILE_K: usize = 64;
/// Bytes of a tile of one plane.
pub(crate) const TILE_BYTES: usize = TILE_ROWS * TILE_K;
/// The largest integer an activation becomes; its high byte still fits i8 after the low one was balanced.
pub(crate) const MAX_INTEGER: f32 = 32_512.0;

/// Scratch for the rows of one operation's input. Filled by `prepare` and its fused forms, read by `matmul`; it may be
/// filled again and again, with any number of rows and any k up to its limits.
///
/// The integer form: each row is `scale * a`, `a` a 16-bit integer, split as `a = 256 * high + low` with both bytes signed.
pub struct Activations {
    max_rows: usize,
    max_k: usize,
    forms: InputForms,
    /// Rows and k of what it holds now; written by worker 0, read by all after the barrier.
    rows: AtomicUsize,
    k: AtomicUsize,
    integers: Memory,
    scales: Memory,
    sums: Memory,
    floats: Memory,
}

impl Activations {
    pub fn new(device: &Device, max_rows: usize, max_k: usize, forms: InputForms) -> Result<Activations> {
        let padded_rows = max_rows.next_multiple_of(TILE_ROWS);
        let padded_k = max_k.next_multiple_of(TILE_K);
        let Some(elements) = padded_rows.checked_mul(padded_k).filter(|&n| n < isize::MAX as usize / 8) else {
            return crate::error::shape("Activations::new", format!("{max_rows} x {max_k} is too large"));
        };
        let forms = if device.isa() == Isa::Reference { InputForms { integers: false, floats: true } } else { forms };
        let when = |wanted: bool, bytes: usize| if wanted { bytes } else { 0 };
        let memory = |bytes| Memory::zeroed("activations", bytes);
        Ok(Activations {
            max_rows,
            max_k,
            forms,
            rows: AtomicUsize::new(0),
            k: AtomicUsize::new(0),
            integers: memory(when(forms.integers, elements * 2))?,
            scales: memory(when(forms.integers, padded_rows * 4))?,
            sums: memory(when(forms.integers, elements / 16 * 4 + elements / 32 * 4))?,
            floats: memory(when(forms.floats, elements * 4))?,
        })
    }

    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    pub fn max_k(&self) -> usize {
        self.max_k
    }

    pub fn forms(&self) -> InputForms {
        self.forms
    }

    /// Rows it holds now.
    pub fn rows(&self) -> usize {
        self.rows.load(Ordering::Relaxed)
    }

    /// Elements a row now.
    pub fn k(&self) -> usize {
        self.k.load(Ordering::Relaxed)
    }

    pub(crate) fn check_fits(&self, op: &'static str, rows: usize, k: usize) -> Result<()> {
        ensure!(op, rows <= self.max_rows, "{rows} rows for activations of {}", self.max_rows);
        ensure!(op, k > 0 && k <= self.max_k, "k = {k} for activations of {}", self.max_k);
        ensure!(
            op,
            !self.forms.integers || k.is_multiple_of(32),
            "k = {k} is not a multiple of 32, which quantised weights need"
        );
        Ok(())
    }

    /// Called by worker 0 before the barrier of the operation that fills.
    pub(crate) fn set_shape(&self, rows: usize, k: usize) {
        self.rows.store(rows, Ordering::Relaxed);
        self.k.store(k, Ordering::Relaxed);
    }

    /// Integer form: tiles `[row / 16][k / 64][plane][row % 16][k % 64]` of bytes where the instruction set multiplies
    /// bytes, else rows of i16 in the order 0, 2, 1, 3 of each four.
    pub(crate) fn integers<T>(&self) -> *mut T {
        self.integers.as_ptr()
    }

    /// One f32 a row.
    pub(crate) fn scales(&self) -> *mut f32 {
        self.scales.as_ptr()
    }

    /// Sums of each `group_len` (16 or 32) integers of a row, `[row][k / group_len]`.
    pub(crate) fn sums(&self, group_len: usize) -> *mut i32 {
        let elements = self.max_rows.next_multiple_of(TILE_ROWS) * self.max_k.next_multiple_of(TILE_K);
        let first = if group_len == 16 { 0 } else { elements / 16 };
        // SAFETY: the sums of 32 follow those of 16 in one allocation (see `new`).
        unsafe { self.sums.as_ptr::<i32>().add(first) }
    }

    /// Rows of f32, `[row][k]`.
    pub(crate) fn floats(&self) -> *mut f32 {
        self.floats.as_ptr()
    }
}

impl std::fmt::Debug for Activations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Activations(up to {} x {}, {:?})", self.max_rows, self.max_k, self.forms)
    }
}
