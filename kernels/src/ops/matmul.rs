//! Products of prepared activations with weights.

use super::check_rows;
use crate::activations::{Activations, InputForms};
use crate::buffer::Buffer;
use crate::cpu::{floats, integers, reference};
use crate::device::Worker;
use crate::error::{ensure, Result};
use crate::matrix::{Matrix, Store};

/// What becomes of the output's old value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulate {
    Set,
    /// `out += product`: a residual connection.
    Add,
}

/// One product of [`matmul_many`].
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    pub out: &'a Buffer,
}

/// `out[r][n] = sum over k of x[r][k] * matrix[n][k]` for every row that `x` holds.
pub fn matmul(w: &Worker, x: &Activations, matrix: &Matrix, out: &Buffer, accumulate: Accumulate) -> Result<()> {
    matmul_many(w, x, &[Product { matrix, out }], accumulate)
}

/// Several matrices on one input (q, k, v; gate, up): one pass, one barrier. The outputs are different buffers.
pub fn matmul_many(w: &Worker, x: &Activations, products: &[Product], accumulate: Accumulate) -> Result<()> {
    let op = "matmul";
    let (rows, k) = (x.rows(), x.k());
    for (i, product) in products.iter().enumerate() {
        ensure!(op, product.matrix.k() == k, "{:?} on rows of {k}", product.matrix);
        check_rows(op, "out", product.out, rows, product.matrix.n())?;
        let forms = product.matrix.input_forms();
        let InputForms { integers, floats } = x.forms();
        ensure!(op, (integers || !forms.integers) && (floats || !forms.floats), "{:?} lack {forms:?}", x);
        let again = products[..i].iter().any(|other| std::ptr::eq(other.out, product.out));
        ensure!(op, !again, "two products have one output");
    }
    // Every product's tasks come from one counter, so that workers finish together.
    let mut before = 0;
    let mut next = w.claim(usize::MAX).expect("no bound");
    for product in products {
        let out = product.out.as_mut_ptr();
        let add = accumulate == Accumulate::Add;
        let num_tasks = match &product.matrix.store {
            Store::Raw(_) => reference::matmul_tasks(product.matrix),
            Store::Floats(panels) => floats::num_tasks(panels, rows),
            Store::Codes(panels) => integers::num_tasks(w.isa(), panels, rows),
        };
        while next < before + num_tasks {
            let task = next - before;
            match &product.matrix.store {
                Store::Raw(_) => reference::matmul(x, product.matrix, task, out, add),
                Store::Floats(panels) => floats::matmul(w, x, panels, task, out, add),
                Store::Codes(panels) => integers::matmul(w, x, panels, task, out, add),
            }
            next = w.claim(usize::MAX).expect("no bound");
        }
        before += num_tasks;
    }
    w.barrier();
    Ok(())
}
