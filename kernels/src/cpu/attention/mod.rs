//! Attention over paged K/V: online softmax over tiles of keys, f32 throughout, K and V widened from f16.
//!
//! # Order (what makes it batch-invariant)
//! A row's keys are taken in tiles of 32 from position 0 and in parts of 256. Inside a part: scores are chains over the
//! lanes' elements reduced by halves; one maximum a tile; the tile's probabilities are summed by halves, the weighted V is
//! a chain over ascending keys. Parts are merged in ascending order. Nothing depends on which rows share a call, so the form for many
//! rows (`rows.rs`: rows in lanes, K and V widened once for all of them) and the form for few (`single.rs`: elements of
//! a head in lanes, straight from the pool) give the same bits, under every instruction set.

mod rows;
mod single;
mod state;

use super::isa::Isa;
use super::reference;
use super::simd::{dispatch, Kernel, Simd, LANES};
use super::team::Worker;
use crate::kv::{BlockId, Entry, KvPool};

/// Keys in a tile.
pub(super) const TILE_KEYS: usize = 32;
/// Tiles in a part.
pub(super) const PART_TILES: usize = 8;
/// Rows in a task.
const TASK_ROWS: usize = LANES;
/// Up to so many rows, one by one is faster than in lanes.
const FEW_ROWS: usize = 8;

/// What an attention operation works on; shapes are checked.
pub(crate) struct Job<'a> {
    pub q: *const f32,
    pub out: *mut f32,
    pub pool: &'a KvPool,
    pub layer: usize,
    pub entries: &'a [Entry],
    pub block_table: &'a [BlockId],
    pub num_heads: usize,
    pub scale: f32,
}

/// A K/V head's queries of up to sixteen consecutive rows of an entry.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub job: &'a Job<'a>,
    pub entry: &'a Entry,
    pub kv_head: usize,
    /// First row, counted in the entry.
    pub row: usize,
    pub num_rows: usize,
}

pub(crate) fn attention(w: &Worker, job: &Job) {
    if w.isa() == Isa::Reference {
        return reference::attention(w, job);
    }
    dispatch(w.isa(), Tasks { w, job });
}

struct Tasks<'a> {
    w: &'a Worker<'a>,
    job: &'a Job<'a>,
}

impl Kernel for Tasks<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let num_kv_heads = self.job.pool.layout().num_kv_heads;
        let in_lanes_only = !self.job.pool.layout().head_dim.is_multiple_of(LANES);
        let mut before = 0;
        let mut next = self.w.claim(usize::MAX).expect("no bound");
        for entry in self.job.entries {
            let tiles = (entry.num_rows as usize).div_ceil(TASK_ROWS);
            while next < before + tiles * num_kv_heads {
                let index = next - before;
                // The last rows see the most keys: first, so that the workers finish together.
                let row = (tiles - 1 - index / num_kv_heads) * TASK_ROWS;
                let num_rows = TASK_ROWS.min(entry.num_rows as usize - row);
                let task = Task { job: self.job, entry, kv_head: index % num_kv_heads, row, num_rows };
                // SAFETY: `S` is available; the task lies within checked shapes and is this worker's.
                unsafe {
                    if num_rows <= FEW_ROWS && !in_lanes_only {
                        single::attend::<S>(&task);
                    } else {
                        rows::attend::<S>(&task);
                    }
                }
                next = self.w.claim(usize::MAX).expect("no bound");
            }
            before += tiles * num_kv_heads;
        }
    }
}

impl Task<'_> {
    /// Query heads that share the K/V head.
    pub(super) fn group(&self) -> usize {
        self.job.num_heads / self.job.pool.layout().num_kv_heads
    }

    /// Keys that a row of the task sees.
    pub(super) fn num_keys(&self, row: usize) -> usize {
        self.entry.first_position as usize + self.row + row + 1
    }

    /// First element of a row's head in q and out; `head` counts in the group.
    pub(super) fn row_element(&self, row: usize, head: usize) -> usize {
        let row = self.entry.first_row as usize + self.row + row;
        (row * self.job.num_heads + self.kv_head * self.group() + head) * self.job.pool.layout().head_dim
    }

    /// Where K of keys `first..first + count` lies (V: `v_offset` further).
    ///
    /// # Safety
    /// The entry has these keys.
    #[inline(always)]
    pub(super) unsafe fn key_pointers(&self, first: usize, count: usize, to: &mut [*const u16; TILE_KEYS]) {
        let layout = self.job.pool.layout();
        let base: *const u16 = self.job.pool.layer_ptr(self.job.layer).cast_const().cast();
        let mut index = self.entry.first_block as usize + first / layout.chunk_tokens;
        let mut token = first % layout.chunk_tokens;
        for pointer in to.iter_mut().take(count) {
            if token == layout.chunk_tokens {
                token = 0;
                index += 1;
            }
            let block = self.job.block_table[index].0 as usize;
            // SAFETY: the operation checked that the entry's blocks cover its keys and lie in the pool.
            *pointer = unsafe { base.add(layout.k_element(block, token, self.kv_head)) };
            token += 1;
        }
    }
}
