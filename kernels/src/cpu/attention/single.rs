//! Few rows: one row at a time, elements of a head in lanes, K and V straight from the pool and shared by the group's heads.

use std::cell::RefCell;

use super::super::simd::{Simd, LANES};
use super::state::{finish, merge};
use super::{Task, PART_TILES, TILE_KEYS};

/// Heads that share a pass over K and V at most.
const MAX_HEADS: usize = 4;
/// Vectors of V that are summed together.
const COLUMNS: usize = 4;

thread_local! {
    /// q, part, total: `[head][element]` each.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
/// As [`Simd`]; the task lies within checked shapes, its output rows are the caller's; head_dim is whole vectors.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(task: &Task) {
    let group = task.group();
    debug_assert!(task.first_pair.is_multiple_of(group) && task.num_pairs.is_multiple_of(group));
    for first_pair in (0..task.num_pairs).step_by(group) {
        let mut head = 0;
        while head < group {
            // SAFETY: by the caller's word.
            unsafe {
                match group - head {
                    1 => heads::<S, 1>(task, first_pair + head),
                    2 => heads::<S, 2>(task, first_pair + head),
                    3 => heads::<S, 3>(task, first_pair + head),
                    _ => heads::<S, MAX_HEADS>(task, first_pair + head),
                }
            }
            head += MAX_HEADS;
        }
    }
}

/// # Safety
/// As `attend`; pairs `first_pair..first_pair + H` are of one row.
#[inline(always)]
unsafe fn heads<S: Simd, const H: usize>(task: &Task, first_pair: usize) {
    let layout = task.job.pool.layout();
    let dim = layout.head_dim;
    let num_keys = task.num_keys(first_pair);
    // Taken out instead of borrowed in a closure: a closure would not be compiled for the instruction set.
    let mut scratch = SCRATCH.take();
    scratch.clear();
    scratch.resize(3 * H * dim, 0.0);
    let (q, sums) = scratch.split_at_mut(H * dim);
    let (part, total) = sums.split_at_mut(H * dim);
    let mut part_state = [(f32::NEG_INFINITY, 0.0f32); H];
    let mut total_state = part_state;
    let mut pointers = [std::ptr::null(); TILE_KEYS];
    // SAFETY: by the caller's word; scratch was sized for H heads.
    unsafe {
        for head in 0..H {
            let from = task.job.q.add(task.element(first_pair + head));
            for i in (0..dim).step_by(LANES) {
                let scaled = S::load(from.add(i)).mul(S::splat(task.job.scale));
                scaled.store(q.as_mut_ptr().add(head * dim + i));
            }
        }
        for (tile, first_key) in (0..num_keys).step_by(TILE_KEYS).enumerate() {
            if tile % PART_TILES == 0 && tile > 0 {
                merge_heads::<S, H>(total, &mut total_state, part, &part_state, dim);
                part.fill(0.0);
                part_state = [(f32::NEG_INFINITY, 0.0); H];
            }
            let count = TILE_KEYS.min(num_keys - first_key);
            task.key_pointers(first_key, count, &mut pointers);
            let keys = &pointers[..count];
            task.prefetch::<S>(first_key + TILE_KEYS, num_keys);
            let mut p = [[f32::NEG_INFINITY; TILE_KEYS]; H];
            scores::<S, H>(keys, q.as_ptr(), dim, &mut p);
            for head in 0..H {
                softmax::<S>(&mut p[head], &mut part_state[head], &mut part[head * dim..(head + 1) * dim]);
            }
            let mut column = 0;
            while column < dim {
                if column + COLUMNS * LANES <= dim {
                    values::<S, H, COLUMNS>(keys, layout.v_offset(), &p, part.as_mut_ptr(), column, dim);
                    column += COLUMNS * LANES;
                } else {
                    values::<S, H, 1>(keys, layout.v_offset(), &p, part.as_mut_ptr(), column, dim);
                    column += LANES;
                }
            }
        }
        merge_heads::<S, H>(total, &mut total_state, part, &part_state, dim);
        for (head, state) in total_state.iter().enumerate() {
            let out = task.job.out.add(task.element(first_pair + head));
            finish::<S>(total.as_ptr().add(head * dim), state.1, dim, out);
        }
    }
    SCRATCH.set(scratch);
}

/// Scores of one row's heads with up to a tile of keys; keys that are not there keep minus infinity.
///
/// # Safety
/// As [`Simd`]; keys point at `dim` f16, `q` at H x dim.
#[inline(always)]
unsafe fn scores<S: Simd, const H: usize>(
    keys: &[*const u16],
    q: *const f32,
    dim: usize,
    to: &mut [[f32; TILE_KEYS]; H],
) {
    // SAFETY: by the caller's word.
    unsafe {
        for (strip, keys) in keys.chunks(LANES).enumerate() {
            let mut partial = [[S::splat(0.0); LANES]; H];
            for (key, &k) in keys.iter().enumerate() {
                let mut chains = [S::splat(0.0); H];
                for i in (0..dim).step_by(LANES) {
                    let k = S::load_f16(k.add(i));
                    for (head, chain) in chains.iter_mut().enumerate() {
                        *chain = S::load(q.add(head * dim + i)).fma(k, *chain);
                    }
                }
                for head in 0..H {
                    partial[head][key] = chains[head];
                }
            }
            for head in 0..H {
                let sums = S::reduce_add_each(&partial[head]).to_array();
                let at = strip * LANES;
                to[head][at..at + keys.len()].copy_from_slice(&sums[..keys.len()]);
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; `part` is whole vectors.
#[inline(always)]
unsafe fn softmax<S: Simd>(p: &mut [f32; TILE_KEYS], state: &mut (f32, f32), part: &mut [f32]) {
    // SAFETY: both halves of the tile and `part` are whole vectors.
    unsafe {
        let (low, high) = (S::load(p.as_ptr()), S::load(p.as_ptr().add(LANES)));
        let tile_max = low.max(high).reduce_max();
        let max = if tile_max > state.0 { tile_max } else { state.0 };
        let factor = S::splat(state.0).sub(S::splat(max)).exp();
        let (low, high) = (low.sub(S::splat(max)).exp(), high.sub(S::splat(max)).exp());
        low.store(p.as_mut_ptr());
        high.store(p.as_mut_ptr().add(LANES));
        let factor_one = factor.first();
        let sum = state.1.mul_add(factor_one, low.add(high).reduce_add());
        *state = (max, sum);
        if factor_one != 1.0 {
            for i in (0..part.len()).step_by(LANES) {
                S::load(part.as_ptr().add(i)).mul(factor).store(part.as_mut_ptr().add(i));
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; V of the keys lies `v_offset` behind the pointers; `part` holds H x dim.
#[inline(always)]
unsafe fn values<S: Simd, const H: usize, const VECTORS: usize>(
    keys: &[*const u16],
    v_offset: usize,
    p: &[[f32; TILE_KEYS]; H],
    part: *mut f32,
    column: usize,
    dim: usize,
) {
    // SAFETY: by the caller's word.
    unsafe {
        let at = |head: usize, i: usize| part.add(head * dim + column + i * LANES);
        let mut sums: [[S; VECTORS]; H] = std::array::from_fn(|head| std::array::from_fn(|i| S::load(at(head, i))));
        for (key, &k) in keys.iter().enumerate() {
            let v: [S; VECTORS] = std::array::from_fn(|i| S::load_f16(k.add(v_offset + column + i * LANES)));
            for (head, sums) in sums.iter_mut().enumerate() {
                let p = S::splat(p[head][key]);
                for (sum, &v) in sums.iter_mut().zip(&v) {
                    *sum = p.fma(v, *sum);
                }
            }
        }
        for (head, sums) in sums.iter().enumerate() {
            for (i, sum) in sums.iter().enumerate() {
                sum.store(at(head, i));
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; `total` and `part` hold H x dim.
#[inline(always)]
unsafe fn merge_heads<S: Simd, const H: usize>(
    total: &mut [f32],
    total_state: &mut [(f32, f32); H],
    part: &[f32],
    part_state: &[(f32, f32); H],
    dim: usize,
) {
    for head in 0..H {
        let (max, sum) = &mut total_state[head];
        // SAFETY: by the caller's word.
        unsafe {
            merge::<S>(
                total.as_mut_ptr().add(head * dim),
                (max, sum),
                part.as_ptr().add(head * dim),
                part_state[head],
                dim,
            );
        }
    }
}
