//! Rows picked by index.

use half::bf16;

use super::{check_dim, check_len, check_rows, ROW_THREADS};
use crate::cuda::blas::Weight;
use crate::cuda::memory::{Element, View};
use crate::cuda::stream::{Launch, Stream};
use crate::error::{ensure, Result};

/// Learned positions: row `positions[r] + offset` of `table` is added.
#[derive(Clone, Copy)]
pub struct PositionEmbedding<'a> {
    pub table: &'a Weight,
    pub positions: View<'a, u32>,
    pub offset: u32,
}

/// Row i of `out` is row `tokens[i]` of `table`; NaN if there is none.
pub fn embedding(
    stream: &Stream,
    table: &Weight,
    tokens: View<u32>,
    learned: Option<PositionEmbedding>,
    rows: usize,
    out: View<f32>,
) -> Result<()> {
    let op = "cuda::embedding";
    let dim = table.k();
    check_dim(op, rows, dim)?;
    check_len(op, "tokens", tokens, rows)?;
    check_rows(op, "out", out, rows, dim)?;
    let (positions_table, num_positions, positions, offset) = match learned {
        None => (View::<bf16>::none(), 0, View::none(), 0),
        Some(PositionEmbedding { table: learned, positions, offset }) => {
            ensure!(op, learned.k() == dim, "positions of {} for tokens of {dim}", learned.k());
            check_len(op, "positions", positions, rows)?;
            (learned.data.view(), learned.n() as u32, positions, offset)
        }
    };
    let function = stream.context().function("embedding")?;
    let (num_tokens, dim) = (table.n() as u32, dim as u32);
    let table = table.data.view();
    let launch = Launch::new(rows, ROW_THREADS);
    // SAFETY: the kernel's parameters; lengths were checked, and the kernel checks indices.
    unsafe {
        stream.launch(
            function,
            launch,
            &[&table, &num_tokens, &tokens, &positions_table, &num_positions, &positions, &offset, &dim, &out],
        )
    }
}

/// Row i of `out` is row `indices[i]` of the `num_rows` rows of `x`; NaN if there is none.
#[allow(clippy::too_many_arguments)]
pub fn gather_rows<T: Element>(
    stream: &Stream,
    x: View<T>,
    num_rows: usize,
    indices: View<u32>,
    count: usize,
    dim: usize,
    out: View<T>,
) -> Result<()> {
    let op = "cuda::gather_rows";
    check_dim(op, num_rows, dim)?;
    check_rows(op, "x", x, num_rows, dim)?;
    check_rows(op, "out", out, count, dim)?;
    check_len(op, "indices", indices, count)?;
    let row_bytes = dim * size_of::<T>();
    ensure!(op, row_bytes.is_multiple_of(16), "rows of {row_bytes} bytes are not whole 16-byte vectors");
    let function = stream.context().function("gather_rows")?;
    let (num_rows, row_vectors) = (num_rows as u32, (row_bytes / 16) as u32);
    // SAFETY: as above.
    unsafe { stream.launch(function, Launch::new(count, ROW_THREADS), &[&x, &num_rows, &indices, &row_vectors, &out]) }
}

/// `tokens[row] = previous[from[row]]` for the rows whose `from` is not `u32::MAX`: tokens that an earlier step on this stream
/// drew and the host does not know yet.
pub fn take_tokens(
    stream: &Stream,
    previous: View<u32>,
    from: View<u32>,
    rows: usize,
    tokens: View<u32>,
) -> Result<()> {
    let op = "cuda::take_tokens";
    ensure!(op, rows <= i32::MAX as usize, "{rows} rows");
    check_len(op, "from", from, rows)?;
    check_len(op, "tokens", tokens, rows)?;
    let function = stream.context().function("take_tokens")?;
    let launch = Launch::new(rows.div_ceil(ROW_THREADS as usize), ROW_THREADS);
    let (num_previous, rows) = (previous.len() as u32, rows as u32);
    // SAFETY: as above.
    unsafe { stream.launch(function, launch, &[&previous, &num_previous, &from, &rows, &tokens]) }
}
