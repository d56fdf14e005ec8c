//! Rows of a matrix picked by token.

use super::check_rows;
use crate::buffer::Buffer;
use crate::device::Worker;
use crate::error::{ensure, Result};
use crate::matrix::Matrix;

/// Row i of `out` is row `tokens[i]` of `table`, as f32.
pub fn embedding(w: &Worker, table: &Matrix, tokens: &[u32], out: &Buffer) -> Result<()> {
    let op = "embedding";
    check_rows(op, "out", out, tokens.len(), table.k())?;
    let largest = tokens.iter().max().map_or(0, |&token| token as usize);
    ensure!(op, largest < table.n(), "token {largest} of {}", table.n());
    for i in w.share(tokens.len()) {
        // SAFETY: inside `out`; row i is this worker's.
        let row = unsafe { out.slice_mut(i * table.k()..(i + 1) * table.k()) };
        table.dequantise_row(tokens[i] as usize, row);
    }
    w.barrier();
    Ok(())
}
