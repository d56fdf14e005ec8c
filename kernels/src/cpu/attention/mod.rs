//! Attention over paged K/V: online softmax over tiles of keys, f32 throughout, K and V widened from f16.
//!
//! # Order (what makes it batch-invariant)
//! A row's keys are taken in tiles of 32 from position 0 and in parts of 256. Inside a part: scores are chains over the
//! lanes' elements reduced by halves; one maximum a tile; the tile's probabilities are summed by halves, the weighted V is
//! a chain over ascending keys. Parts are merged in ascending order. Nothing depends on which rows share a call, so the form for many
//! rows (`lanes.rs`: rows and heads in lanes, K and V widened once for all of them) and the form for few (`single.rs`: elements
//! of a head in lanes, straight from the pool) give the same bits, under every instruction set.
//!
//! # Tasks
//! The queries that share a K/V head are pairs of a row and a head, numbered row by row. A task takes a vector of sixteen pairs, so
//! lanes are full whatever the number of rows, or a few vectors where there are enough tasks to keep every worker busy anyway.

mod lanes;
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
/// Vectors in a task at most: they share the widened K and V, and must fit the first-level cache beside them.
const MAX_VECTORS: usize = 3;
/// What widening K and V costs a task, in vectors.
const WIDENING: f32 = 0.3;
/// Up to so many pairs, one row after the other is faster than in lanes.
const FEW_PAIRS: usize = 4;

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

/// Consecutive pairs of a row and a query head, all on one K/V head.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub job: &'a Job<'a>,
    pub entry: &'a Entry,
    pub kv_head: usize,
    /// Counted in the entry: `row * group + head`.
    pub first_pair: usize,
    pub num_pairs: usize,
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
        let group = self.job.num_heads / num_kv_heads;
        let in_lanes_only = !self.job.pool.layout().head_dim.is_multiple_of(LANES);
        let mut before = 0;
        let mut next = self.w.claim(usize::MAX).expect("no bound");
        for entry in self.job.entries {
            let num_pairs = entry.num_rows as usize * group;
            let is_single = num_pairs <= FEW_PAIRS && !in_lanes_only;
            let pairs_a_task = if is_single { num_pairs } else { self.pairs_a_task(num_pairs, num_kv_heads) };
            let tasks = num_pairs.div_ceil(pairs_a_task.max(1));
            while next < before + tasks * num_kv_heads {
                let index = next - before;
                // The last rows see the most keys: first, so that the workers finish together.
                let first_pair = (tasks - 1 - index / num_kv_heads) * pairs_a_task;
                let num_pairs = pairs_a_task.min(num_pairs - first_pair);
                let task = Task { job: self.job, entry, kv_head: index % num_kv_heads, first_pair, num_pairs };
                // SAFETY: `S` is available; the task lies within checked shapes and is this worker's.
                unsafe {
                    if is_single {
                        single::attend::<S>(&task);
                    } else {
                        lanes::attend::<S>(&task);
                    }
                }
                next = self.w.claim(usize::MAX).expect("no bound");
            }
            before += tasks * num_kv_heads;
        }
    }
}

impl Tasks<'_> {
    /// As many vectors a task as end soonest when the workers share the tasks: K and V are widened once a task, so fewer tasks cost
    /// less, but a worker without one helps nobody.
    fn pairs_a_task(&self, num_pairs: usize, num_kv_heads: usize) -> usize {
        let vectors = num_pairs.div_ceil(LANES);
        let ends = |vectors_a_task: usize| {
            let tasks = vectors.div_ceil(vectors_a_task) * num_kv_heads;
            let rounds = tasks.div_ceil(self.w.num_workers());
            rounds as f32 * (vectors_a_task as f32 + WIDENING)
        };
        let best = (1..=MAX_VECTORS).rev().min_by(|a, b| ends(*a).total_cmp(&ends(*b)));
        best.unwrap_or(1) * LANES
    }
}

impl Task<'_> {
    /// Query heads that share the K/V head.
    pub(super) fn group(&self) -> usize {
        self.job.num_heads / self.job.pool.layout().num_kv_heads
    }

    /// Keys that a pair of the task sees.
    pub(super) fn num_keys(&self, pair: usize) -> usize {
        self.entry.first_position as usize + (self.first_pair + pair) / self.group() + 1
    }

    /// First element of a pair in q and out.
    pub(super) fn element(&self, pair: usize) -> usize {
        let (row, head) = ((self.first_pair + pair) / self.group(), (self.first_pair + pair) % self.group());
        let row = self.entry.first_row as usize + row;
        (row * self.job.num_heads + self.kv_head * self.group() + head) * self.job.pool.layout().head_dim
    }

    /// Asks for K and V of the tile from `first_key` on while the one before it is worked on: heads lie apart in a block, too far
    /// for the processor to see them coming.
    ///
    /// # Safety
    /// As [`Simd`]; the entry has `num_keys` keys.
    #[inline(always)]
    pub(super) unsafe fn prefetch<S: Simd>(&self, first_key: usize, num_keys: usize) {
        if first_key >= num_keys {
            return;
        }
        let layout = self.job.pool.layout();
        let count = TILE_KEYS.min(num_keys - first_key);
        let mut pointers = [std::ptr::null(); TILE_KEYS];
        // SAFETY: by the caller's word; a prefetch reads nothing.
        unsafe {
            self.key_pointers(first_key, count, &mut pointers);
            for &k in &pointers[..count] {
                for line in (0..layout.head_dim).step_by(32) {
                    S::prefetch(k.wrapping_add(line));
                    S::prefetch(k.wrapping_add(layout.v_offset() + line));
                }
            }
        }
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
