//! Element by element, and rows picked out of rows.

use super::check_rows;
use crate::buffer::Buffer;
use crate::cpu::elementwise;
use crate::device::Worker;
use crate::error::{ensure, Result};

/// `out = silu(gate) * up`, `rows x dim` each. `out` may be `gate` or `up`.
pub fn silu_mul(w: &Worker, gate: &Buffer, up: &Buffer, rows: usize, dim: usize, out: &Buffer) -> Result<()> {
    for (name, buffer) in [("gate", gate), ("up", up), ("out", out)] {
        check_rows("silu_mul", name, buffer, rows, dim)?;
    }
    elementwise::silu_mul(w, gate.as_mut_ptr(), up.as_mut_ptr(), rows * dim, out.as_mut_ptr());
    w.barrier();
    Ok(())
}

/// `out += x`, `len` elements.
pub fn add(w: &Worker, x: &Buffer, len: usize, out: &Buffer) -> Result<()> {
    check_rows("add", "x", x, 1, len)?;
    check_rows("add", "out", out, 1, len)?;
    elementwise::add(w, x.as_mut_ptr(), len, out.as_mut_ptr());
    w.barrier();
    Ok(())
}

/// `x[row] += bias[offset..]`, `rows x dim`: the biases of several products may lie in one buffer.
pub fn add_bias(w: &Worker, bias: &Buffer, offset: usize, rows: usize, dim: usize, x: &Buffer) -> Result<()> {
    let op = "add_bias";
    check_rows(op, "x", x, rows, dim)?;
    let fits = offset.checked_add(dim).is_some_and(|end| end <= bias.len());
    ensure!(op, fits, "bias holds {} elements, not {dim} at {offset}", bias.len());
    ensure!(op, !std::ptr::eq(x, bias), "x and bias are the same buffer");
    for row in w.share(rows) {
        // SAFETY: the row was checked and is this worker's; the bias is another buffer and only read.
        let values = unsafe { x.slice_mut(row * dim..(row + 1) * dim) };
        values.iter_mut().zip(&bias.as_slice()[offset..offset + dim]).for_each(|(value, add)| *value += add);
    }
    w.barrier();
    Ok(())
}

/// `x = max(x, 0)`, `rows x dim`; NaN stays.
pub fn relu(w: &Worker, rows: usize, dim: usize, x: &Buffer) -> Result<()> {
    check_rows("relu", "x", x, rows, dim)?;
    for row in w.share(rows) {
        // SAFETY: the row was checked and is this worker's.
        for value in unsafe { x.slice_mut(row * dim..(row + 1) * dim) } {
            // Not `max`, which hides NaN.
            *value = if *value < 0.0 { 0.0 } else { *value };
        }
    }
    w.barrier();
    Ok(())
}

/// Row i of `out` is row `indices[i]` of `x`, rows of `dim`. The buffers are different ones.
pub fn gather_rows(w: &Worker, x: &Buffer, indices: &[u32], dim: usize, out: &Buffer) -> Result<()> {
    let op = "gather_rows";
    check_rows(op, "out", out, indices.len(), dim)?;
    ensure!(op, !std::ptr::eq(x, out), "x and out are the same buffer");
    for &index in indices {
        check_rows(op, "x", x, index as usize + 1, dim)?;
    }
    for i in w.share(indices.len()) {
        let from = indices[i] as usize * dim;
        // SAFETY: both ranges were checked; row i is this worker's, and x is only read.
        unsafe { out.slice_mut(i * dim..(i + 1) * dim) }.copy_from_slice(&x.as_slice()[from..from + dim]);
    }
    w.barrier();
    Ok(())
}
