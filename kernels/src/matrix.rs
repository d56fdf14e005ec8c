//! A weight matrix on a device, packed for its kernels and still quantised.

use crate::activations::InputForms;
use crate::cpu::blocks::{read_floats, Format, Row};
use crate::cpu::floats::FloatPanels;
use crate::cpu::isa::Isa;
use crate::cpu::panels::CodePanels;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{ensure, Result};

/// The longest k of a quantised matrix: up to it, integer dot products stay exact in f64.
const MAX_QUANTISED_K: usize = 1 << 16;

/// A weight of `n` outputs and `k` inputs (row n holds the k weights of output n).
pub struct Matrix {
    n: usize,
    k: usize,
    dtype: DType,
    pub(crate) store: Store,
}

pub(crate) enum Store {
    /// The file's bytes: the reference form.
    Raw(Vec<u8>),
    Floats(FloatPanels),
    Codes(CodePanels),
}

impl Matrix {
    /// Packs `bytes`, row after row in the file's layout of `dtype`.
    pub fn pack(device: &Device, dtype: DType, n: usize, k: usize, bytes: &[u8]) -> Result<Matrix> {
        let op = "Matrix::pack";
        ensure!(op, n > 0 && k > 0, "{n} x {k}");
        ensure!(
            op,
            k.is_multiple_of(dtype.block_len()),
            "k = {k} is not whole blocks of {dtype} ({})",
            dtype.block_len()
        );
        let want = dtype.bytes_for(k).and_then(|row| row.checked_mul(n));
        ensure!(op, want == Some(bytes.len()), "{} bytes for {n} x {k} of {dtype}", bytes.len());
        let store = match (device.isa(), Format::of(dtype)) {
            (Isa::Reference, _) => Store::Raw(bytes.to_vec()),
            (_, None) => Store::Floats(FloatPanels::pack(dtype, n, k, bytes)?),
            (_, Some(format)) => {
                ensure!(op, k <= MAX_QUANTISED_K, "k = {k} exceeds {MAX_QUANTISED_K}, the limit of {dtype}");
                Store::Codes(CodePanels::pack(dtype, format, n, k, bytes)?)
            }
        };
        Ok(Matrix { n, k, dtype, store })
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Raw(bytes) => bytes.len(),
            Store::Floats(panels) => panels.bytes(),
            Store::Codes(panels) => panels.bytes(),
        }
    }

    /// The form in which a product with this matrix wants its input.
    pub fn input_forms(&self) -> InputForms {
        let integers = matches!(self.store, Store::Codes(_));
        InputForms { integers, floats: !integers }
    }

    /// Output `row`'s weights as f32; `out` is `k` long.
    pub(crate) fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        debug_assert!(row < self.n && out.len() == self.k);
        match &self.store {
            Store::Floats(panels) => panels.read_row(row, out),
            Store::Codes(panels) => panels.dequantise_row(row, out),
            Store::Raw(bytes) => {
                let row_bytes = bytes.len() / self.n;
                let bytes = &bytes[row * row_bytes..(row + 1) * row_bytes];
                if self.dtype.is_float() {
                    read_floats(self.dtype, bytes, out);
                } else {
                    let mut blocks = Row::default();
                    blocks.read(self.dtype, bytes);
                    blocks.dequantise(out);
                }
            }
        }
    }
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matrix({} x {} {})", self.n, self.k, self.dtype)
    }
}
