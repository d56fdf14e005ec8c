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
