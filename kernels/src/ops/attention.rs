//! Causal attention over paged K/V.

use super::check_rows;
use crate::buffer::Buffer;
use crate::cpu::attention::{self, Job};
use crate::device::Worker;
use crate::error::{ensure, Result};
use crate::kv::{BlockId, Entry, KvPool};

/// `out[row][head] = softmax(scale * q . K) V` over the keys `[0, position]` of each entry's rows. `q` and `out` are
/// `rows x num_heads x head_dim`, different buffers; heads share K/V heads in equal groups. Rows of no entry are left alone.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    w: &Worker,
    q: &Buffer,
    pool: &KvPool,
    layer: usize,
    entries: &[Entry],
    block_table: &[BlockId],
    num_heads: usize,
    scale: f32,
    out: &Buffer,
) -> Result<()> {
    let op = "attention";
    let layout = pool.layout();
    pool.check_host(op)?;
    ensure!(op, layer < layout.num_layers, "layer {layer} of {}", layout.num_layers);
    let grouped = num_heads > 0 && num_heads.is_multiple_of(layout.num_kv_heads);
    ensure!(op, grouped, "{num_heads} heads on {} K/V heads", layout.num_kv_heads);
    ensure!(op, !std::ptr::eq(q, out), "q and out are the same buffer");
    let width = num_heads.saturating_mul(layout.head_dim);
    for entry in entries {
        let rows_end = entry.first_row as usize + entry.num_rows as usize;
        check_rows(op, "q", q, rows_end, width)?;
        check_rows(op, "out", out, rows_end, width)?;
        let blocks = entry.first_block as usize..entry.first_block as usize + entry.num_blocks as usize;
        ensure!(op, blocks.end <= block_table.len(), "blocks {blocks:?} of a table of {}", block_table.len());
        let keys = entry.first_position as usize + entry.num_rows as usize;
        let room = (entry.num_blocks as usize).saturating_mul(layout.chunk_tokens);
        ensure!(op, keys <= room, "{keys} keys in {} blocks of {}", entry.num_blocks, layout.chunk_tokens);
        for block in &block_table[blocks] {
            ensure!(op, (block.0 as usize) < pool.num_blocks(), "block {} of {}", block.0, pool.num_blocks());
        }
    }
    let job = Job { q: q.as_mut_ptr(), out: out.as_mut_ptr(), pool, layer, entries, block_table, num_heads, scale };
    attention::attention(w, &job);
    w.barrier();
    Ok(())
}
