//! Many queries: sixteen pairs of a row and a head in the lanes of scores, K and V of a tile widened once for all of them.

use std::cell::RefCell;

use super::super::simd::{Simd, LANES};
use super::state::{finish, merge};
use super::{Task, PART_TILES, TILE_KEYS};

/// Keys whose scores are computed together: their chains hide the latency of one another.
const STRIP: usize = 4;
/// Lanes of the reduction by halves that meet in its second step, in the order the steps add them.
const QUADS: [[usize; 4]; 4] = [[0, 8, 4, 12], [2, 10, 6, 14], [1, 9, 5, 13], [3, 11, 7, 15]];
/// Vectors of a row's V that are summed together.
const COLUMNS: usize = 4;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Memory of one task, kept between tasks. `dim` is padded to lanes.
#[derive(Default)]
struct Scratch {
    /// `[vector][element][lane]`, scaled
    q: Vec<f32>,
    /// `[key][element]`
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[key][lane]`, scores and then probabilities of one vector
    scores: Vec<f32>,
    /// `[vector][lane][element]` of the part at hand, and of the parts before
    part: Vec<f32>,
    total: Vec<f32>,
    /// `[vector][lane]`: maxima and sums of the part and the total
    part_max: Vec<f32>,
    part_sum: Vec<f32>,
    total_max: Vec<f32>,
    total_sum: Vec<f32>,
}

impl Scratch {
    fn reset(&mut self, vectors: usize, dim: usize) {
        let clear = |v: &mut Vec<f32>, len: usize, value: f32| {
            v.clear();
            v.resize(len, value);
        };
        clear(&mut self.q, vectors * dim * LANES, 0.0);
        // Elements behind the head's and keys behind the entry's stay zero or finite.
        clear(&mut self.k, TILE_KEYS * dim, 0.0);
        clear(&mut self.v, TILE_KEYS * dim, 0.0);
        clear(&mut self.scores, TILE_KEYS * LANES, 0.0);
        for v in [&mut self.part, &mut self.total] {
            clear(v, vectors * LANES * dim, 0.0);
        }
        for v in [&mut self.part_max, &mut self.total_max] {
            clear(v, vectors * LANES, f32::NEG_INFINITY);
        }
        for v in [&mut self.part_sum, &mut self.total_sum] {
            clear(v, vectors * LANES, 0.0);
        }
    }

    fn reset_part(&mut self) {
        self.part.fill(0.0);
        self.part_max.fill(f32::NEG_INFINITY);
        self.part_sum.fill(0.0);
    }
}

/// # Safety
/// As [`Simd`]; the task lies within checked shapes and its output rows are the caller's.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(task: &Task) {
    let layout = task.job.pool.layout();
    let head_dim = layout.head_dim;
    let dim = head_dim.next_multiple_of(LANES);
    let vectors = task.num_pairs.div_ceil(LANES);
    let num_keys = task.num_keys(task.num_pairs - 1);
    // Taken out instead of borrowed in a closure: a closure would not be compiled for the instruction set.
    let mut owned = SCRATCH.take();
    let scratch = &mut owned;
    scratch.reset(vectors, dim);
    // SAFETY: by the caller's word; scratch was sized for the vectors and dim.
    unsafe {
        load_queries(task, scratch, dim);
        let mut pointers = [std::ptr::null(); TILE_KEYS];
        for (tile, first_key) in (0..num_keys).step_by(TILE_KEYS).enumerate() {
            if tile % PART_TILES == 0 && tile > 0 {
                merge_part::<S>(scratch, task.num_pairs, dim);
                scratch.reset_part();
            }
            let count = TILE_KEYS.min(num_keys - first_key);
            task.key_pointers(first_key, count, &mut pointers);
            task.prefetch::<S>(first_key + TILE_KEYS, num_keys);
            widen::<S>(&pointers[..count], layout.v_offset(), head_dim, dim, scratch);
            for vector in 0..vectors {
                let lanes = Lanes::of(task, vector);
                if lanes.most_keys <= first_key {
                    continue;
                }
                scores::<S>(scratch, vector, dim, count);
                softmax::<S>(task, scratch, lanes, dim, first_key, count);
                weighted_values::<S>(scratch, lanes, dim, count);
            }
        }
        merge_part::<S>(scratch, task.num_pairs, dim);
        for pair in 0..task.num_pairs {
            let out = task.job.out.add(task.element(pair));
            finish::<S>(scratch.total.as_ptr().add(pair * dim), scratch.total_sum[pair], head_dim, out);
        }
    }
    SCRATCH.set(owned);
}

/// A vector's pairs.
#[derive(Clone, Copy)]
struct Lanes {
    first_pair: usize,
    count: usize,
    /// Keys that the first pair sees, and the last.
    least_keys: usize,
    most_keys: usize,
}

impl Lanes {
    fn of(task: &Task, vector: usize) -> Lanes {
        let first_pair = vector * LANES;
        let count = LANES.min(task.num_pairs - first_pair);
        let (least_keys, most_keys) = (task.num_keys(first_pair), task.num_keys(first_pair + count - 1));
        Lanes { first_pair, count, least_keys, most_keys }
    }
}

/// # Safety
/// The task's pairs exist.
#[inline(always)]
unsafe fn load_queries(task: &Task, scratch: &mut Scratch, dim: usize) {
    for pair in 0..task.num_pairs {
        let (vector, lane) = (pair / LANES, pair % LANES);
        // SAFETY: by the caller's word.
        let q = unsafe { task.job.q.add(task.element(pair)) };
        for i in 0..task.job.pool.layout().head_dim {
            // SAFETY: as above, inside the head.
            scratch.q[(vector * dim + i) * LANES + lane] = unsafe { *q.add(i) } * task.job.scale;
        }
    }
}

/// # Safety
/// As [`Simd`]; the pointers are K of keys, V lies `v_offset` further.
#[inline(always)]
unsafe fn widen<S: Simd>(keys: &[*const u16], v_offset: usize, head_dim: usize, dim: usize, scratch: &mut Scratch) {
    for (key, &k) in keys.iter().enumerate() {
        for (from, to) in [(k, &mut scratch.k), (k.wrapping_add(v_offset), &mut scratch.v)] {
            let to = &mut to[key * dim..(key + 1) * dim];
            let whole = head_dim / LANES * LANES;
            // SAFETY: `whole` elements of a head lie there, and in the scratch row.
            unsafe {
                for i in (0..whole).step_by(LANES) {
                    S::load_f16(from.add(i)).store(to.as_mut_ptr().add(i));
                }
                for (i, to) in to.iter_mut().enumerate().take(head_dim).skip(whole) {
                    *to = half::f16::from_bits(*from.add(i)).to_f32();
                }
            }
        }
    }
}

/// Scores of sixteen pairs with each key of the tile.
///
/// # Safety
/// As [`Simd`]; scratch is sized for `dim`.
#[inline(always)]
unsafe fn scores<S: Simd>(scratch: &mut Scratch, vector: usize, dim: usize, count: usize) {
    // SAFETY: vectors, keys (whole strips: the tile has TILE_KEYS rows) and elements stay inside scratch.
    unsafe {
        let q = scratch.q.as_ptr().add(vector * dim * LANES);
        let (k, to) = (scratch.k.as_ptr(), scratch.scores.as_mut_ptr());
        if dim == 4 * LANES {
            scores_of_64::<S>(q, k, to, count);
        } else {
            for first in (0..count).step_by(STRIP) {
                scores_of_strip::<S>(q, k.add(first * dim), to.add(first * LANES), dim);
            }
        }
    }
}

/// Heads of 64 elements: a quarter of the queries stays in registers while all keys pass; the quarters' sums meet in `to`.
///
/// # Safety
/// As [`Simd`]; `q` holds 64 vectors, `k` `count` keys, `to` `count` vectors.
#[inline(always)]
unsafe fn scores_of_64<S: Simd>(q: *const f32, k: *const f32, to: *mut f32, count: usize) {
    // SAFETY: by the caller's word.
    unsafe {
        let mut odd = [[0.0; LANES]; TILE_KEYS];
        for (which, quad) in QUADS.iter().enumerate() {
            let at = |chain: usize, base: usize| S::load(q.add((base * LANES + quad[chain]) * LANES));
            let q0 = [at(0, 0), at(1, 0), at(2, 0), at(3, 0)];
            let q1 = [at(0, 1), at(1, 1), at(2, 1), at(3, 1)];
            let q2 = [at(0, 2), at(1, 2), at(2, 2), at(3, 2)];
            let q3 = [at(0, 3), at(1, 3), at(2, 3), at(3, 3)];
            let zero = S::splat(0.0);
            for key in 0..count {
                let k = k.add(key * 4 * LANES);
                let element = |chain: usize, base: usize| S::splat(*k.add(base * LANES + quad[chain]));
                let chain = |c: usize| {
                    let sum = q0[c].fma(element(c, 0), zero);
                    let sum = q1[c].fma(element(c, 1), sum);
                    let sum = q2[c].fma(element(c, 2), sum);
                    q3[c].fma(element(c, 3), sum)
                };
                let met = chain(0).add(chain(1)).add(chain(2).add(chain(3)));
                let to = to.add(key * LANES);
                let odd = odd[key].as_mut_ptr();
                match which {
                    0 => met.store(to),
                    1 => S::load(to).add(met).store(to),
                    2 => met.store(odd),
                    _ => S::load(to).add(S::load(odd).add(met)).store(to),
                }
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; `q` holds `dim` vectors, `k` STRIP keys, `to` STRIP vectors.
#[inline(always)]
unsafe fn scores_of_strip<S: Simd>(q: *const f32, k: *const f32, to: *mut f32, dim: usize) {
    // SAFETY: by the caller's word.
    unsafe {
        let mut sums = [S::splat(0.0); STRIP];
        let mut odd = [S::splat(0.0); STRIP];
        for (which, quad) in QUADS.iter().enumerate() {
            let mut chains = [[S::splat(0.0); 4]; STRIP];
            for base in (0..dim).step_by(LANES) {
                for (chain, lane) in quad.iter().enumerate() {
                    let q = S::load(q.add((base + lane) * LANES));
                    for (key, chains) in chains.iter_mut().enumerate() {
                        let k = S::splat(*k.add(key * dim + base + lane));
                        chains[chain] = q.fma(k, chains[chain]);
                    }
                }
            }
            for (key, c) in chains.iter().enumerate() {
                let met = c[0].add(c[1]).add(c[2].add(c[3]));
                match which {
                    0 => sums[key] = met,
                    1 => sums[key] = sums[key].add(met),
                    2 => odd[key] = met,
                    _ => odd[key] = odd[key].add(met),
                }
            }
        }
        for key in 0..STRIP {
            sums[key].add(odd[key]).store(to.add(key * LANES));
        }
    }
}

/// Turns the tile's scores into probabilities and brings the part's state to the new maxima.
///
/// # Safety
/// As [`Simd`]; scratch is sized for `dim`.
#[inline(always)]
unsafe fn softmax<S: Simd>(
    task: &Task,
    scratch: &mut Scratch,
    lanes: Lanes,
    dim: usize,
    first_key: usize,
    count: usize,
) {
    // SAFETY: lanes and keys stay inside scratch.
    unsafe {
        let scores = scratch.scores.as_mut_ptr();
        // The first pair sees fewer keys than the tile holds: hide the rest from it, and from those like it.
        if lanes.least_keys < first_key + count {
            for lane in 0..lanes.count {
                let seen = task.num_keys(lanes.first_pair + lane).saturating_sub(first_key);
                for key in seen..count {
                    *scores.add(key * LANES + lane) = f32::NEG_INFINITY;
                }
            }
        }
        let state = lanes.first_pair;
        let old = S::load(scratch.part_max.as_ptr().add(state));
        let mut max = old;
        for key in 0..count {
            max = S::load(scores.add(key * LANES)).max(max);
        }
        let factor = old.sub(max).exp();
        for key in 0..count {
            S::load(scores.add(key * LANES)).sub(max).exp().store(scores.add(key * LANES));
        }
        for key in count..TILE_KEYS {
            S::splat(0.0).store(scores.add(key * LANES));
        }
        let sum = S::load(scratch.part_sum.as_ptr().add(state)).fma(factor, sum_of_tile::<S>(scores));
        max.store(scratch.part_max.as_mut_ptr().add(state));
        sum.store(scratch.part_sum.as_mut_ptr().add(state));
        let factors = factor.to_array();
        for (lane, &factor) in factors.iter().enumerate().take(lanes.count) {
            if factor != 1.0 {
                let part = scratch.part.as_mut_ptr().add((state + lane) * dim);
                for i in (0..dim).step_by(LANES) {
                    S::load(part.add(i)).mul(S::splat(factor)).store(part.add(i));
                }
            }
        }
    }
}

/// Sums of a tile's probabilities, keys by halves.
///
/// # Safety
/// As [`Simd`]; `p` holds a tile.
#[inline(always)]
unsafe fn sum_of_tile<S: Simd>(p: *const f32) -> S {
    // SAFETY: by the caller's word.
    unsafe {
        let pair = |key: usize| S::load(p.add(key * LANES)).add(S::load(p.add((key + LANES) * LANES)));
        let four = |key: usize| pair(key).add(pair(key + 8));
        let eight = |key: usize| four(key).add(four(key + 4));
        let half = |key: usize| eight(key).add(eight(key + 2));
        half(0).add(half(1))
    }
}

/// Adds probability times V, keys ascending.
///
/// # Safety
/// As [`Simd`]; scratch is sized for `dim`.
#[inline(always)]
unsafe fn weighted_values<S: Simd>(scratch: &mut Scratch, lanes: Lanes, dim: usize, count: usize) {
    let mut column = 0;
    // SAFETY: lanes, keys and columns stay inside scratch.
    unsafe {
        while column < dim {
            let mut lane = 0;
            if column + COLUMNS * LANES <= dim {
                while lane < lanes.count {
                    value_tile::<S, 4, COLUMNS>(scratch, lanes.first_pair + lane, lane, column, dim, count);
                    lane += 4;
                }
                column += COLUMNS * LANES;
            } else {
                while lane < lanes.count {
                    value_tile::<S, 4, 1>(scratch, lanes.first_pair + lane, lane, column, dim, count);
                    lane += 4;
                }
                column += LANES;
            }
        }
    }
}

/// # Safety
/// As `weighted_values`.
#[inline(always)]
unsafe fn value_tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
    scratch: &mut Scratch,
    state: usize,
    lane: usize,
    column: usize,
    dim: usize,
    count: usize,
) {
    // SAFETY: by the caller's word.
    unsafe {
        let part = scratch.part.as_mut_ptr().add(state * dim + column);
        let v = scratch.v.as_ptr().add(column);
        let p = scratch.scores.as_ptr().add(lane);
        let mut sums: [[S; VECTORS]; ROWS] =
            std::array::from_fn(|r| std::array::from_fn(|i| S::load(part.add(r * dim + i * LANES))));
        for key in 0..count {
            let v: [S; VECTORS] = std::array::from_fn(|i| S::load(v.add(key * dim + i * LANES)));
            for (r, sums) in sums.iter_mut().enumerate() {
                let p = S::splat(*p.add(key * LANES + r));
                for (sum, &v) in sums.iter_mut().zip(&v) {
                    *sum = p.fma(v, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (i, sum) in sums.iter().enumerate() {
                sum.store(part.add(r * dim + i * LANES));
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; scratch is sized for `dim`.
#[inline(always)]
unsafe fn merge_part<S: Simd>(scratch: &mut Scratch, num_pairs: usize, dim: usize) {
    for pair in 0..num_pairs {
        // A part of keys that the pair does not see leaves it as it is.
        if scratch.part_max[pair] == f32::NEG_INFINITY {
            continue;
        }
        // SAFETY: inside scratch.
        unsafe {
            merge::<S>(
                scratch.total.as_mut_ptr().add(pair * dim),
                (&mut scratch.total_max[pair], &mut scratch.total_sum[pair]),
                scratch.part.as_ptr().add(pair * dim),
                (scratch.part_max[pair], scratch.part_sum[pair]),
                dim,
            );
        }
    }
}
