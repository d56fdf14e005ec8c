//! Rotary embedding, and the write of new K and V to their slots.

use super::check_rows;
use crate::buffer::Buffer;
use crate::cpu::rope;
use crate::device::Worker;
use crate::error::{ensure, Result};
use crate::kv::KvPool;
use crate::rope::RopeTable;

/// Rotates q (`rows x num_heads x head_dim`) in place and k (`rows x num_kv_heads x head_dim`) on its way into the pool;
/// writes k and v as f16 to `slots` (block * chunk_tokens + offset, one a row, no slot twice) of `layer`.
#[allow(clippy::too_many_arguments)]
pub fn rope_and_write(
    w: &Worker,
    q: &Buffer,
    k: &Buffer,
    v: &Buffer,
    positions: &[u32],
    slots: &[u32],
    table: &RopeTable,
    pool: &KvPool,
    layer: usize,
    num_heads: usize,
) -> Result<()> {
    let op = "rope_and_write";
    let layout = pool.layout();
    let rows = positions.len();
    ensure!(op, slots.len() == rows, "{} slots for {rows} rows", slots.len());
    pool.check_host(op)?;
    ensure!(op, layer < layout.num_layers, "layer {layer} of {}", layout.num_layers);
    ensure!(op, table.rotary_dim() <= layout.head_dim, "{} rotated of {}", table.rotary_dim(), layout.head_dim);
    check_rows(op, "q", q, rows, num_heads.saturating_mul(layout.head_dim))?;
    check_rows(op, "k", k, rows, layout.token_len())?;
    check_rows(op, "v", v, rows, layout.token_len())?;
    let num_slots = pool.num_blocks() * layout.chunk_tokens;
    for (&position, &slot) in positions.iter().zip(slots) {
        ensure!(op, (position as usize) < table.max_positions(), "position {position} of {}", table.max_positions());
        ensure!(op, (slot as usize) < num_slots, "slot {slot} of {num_slots}");
    }
    rope::rope_and_write(
        w,
        &rope::Rows { q: q.as_mut_ptr(), k: k.as_mut_ptr(), v: v.as_mut_ptr(), positions, slots, num_heads },
        table,
        pool,
        layer,
    );
    w.barrier();
    Ok(())
}
