//! The reference form: what each operation means, in plain loops with f64 sums, without rounding of activations.
//! Fast forms are compared with it; nothing here is tuned.

use half::f16;

use super::attention::Job;
use super::rope::Rows;
use super::team::Worker;
use crate::activations::Activations;
use crate::kv::{Entry, KvPool};
use crate::matrix::Matrix;
use crate::rope::{RopeStyle, RopeTable};

/// Outputs a task computes.
const TASK_OUTPUTS: usize = 64;

pub(crate) fn silu_mul(gate: *const f32, up: *const f32, share: std::ops::Range<usize>, out: *mut f32) {
    for i in share {
        // SAFETY: the share lies inside the checked lengths and is this worker's.
        unsafe {
            let g = f64::from(*gate.add(i));
            *out.add(i) = (g / (1.0 + (-g).exp()) * f64::from(*up.add(i))) as f32;
        }
    }
}

pub(crate) fn rms_norm(x: *const f32, weight: *const f32, eps: f32, dim: usize, out: *mut f32) {
    // SAFETY: `dim` elements each, checked by the operation.
    let at = |from: *const f32, i: usize| unsafe { f64::from(*from.add(i)) };
    let mean = (0..dim).map(|i| at(x, i) * at(x, i)).sum::<f64>() / dim as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    for i in 0..dim {
        // SAFETY: as above; x[i] was read before it is overwritten.
        unsafe { *out.add(i) = (at(x, i) * factor * at(weight, i)) as f32 };
    }
}

pub(crate) fn matmul_tasks(matrix: &Matrix) -> usize {
    matrix.n().div_ceil(TASK_OUTPUTS)
}

pub(crate) fn matmul(x: &Activations, matrix: &Matrix, task: usize, out: *mut f32, add: bool) {
    let (rows, k, n) = (x.rows(), matrix.k(), matrix.n());
    let mut weights = vec![0.0; k];
    for output in task * TASK_OUTPUTS..((task + 1) * TASK_OUTPUTS).min(n) {
        matrix.dequantise_row(output, &mut weights);
        for row in 0..rows {
            // SAFETY: the activations hold rows x k floats, the output rows x n; this output is this task's.
            unsafe {
                let x = std::slice::from_raw_parts(x.floats().add(row * k), k);
                let sum: f64 = x.iter().zip(&weights).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                let out = out.add(row * n + output);
                *out = if add { *out + sum as f32 } else { sum as f32 };
            }
        }
    }
}

pub(crate) fn rope_and_write(w: &Worker, rows: &Rows, table: &RopeTable, pool: &KvPool, layer: usize) {
    let layout = pool.layout();
    let half = table.rotary_dim() / 2;
    let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
    for row in w.share(rows.positions.len()) {
        table.angles(rows.positions[row] as usize, &mut cos, &mut sin);
        let rotate = |head: &mut [f32]| {
            for i in 0..half {
                let (a, b) = match table.style() {
                    RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                    RopeStyle::HalfSplit => (i, half + i),
                };
                (head[a], head[b]) = (head[a] * cos[i] - head[b] * sin[i], head[b] * cos[i] + head[a] * sin[i]);
            }
        };
        let slot = rows.slots[row] as usize;
        let (block, token) = (slot / layout.chunk_tokens, slot % layout.chunk_tokens);
        // SAFETY: rows, slots and layer were checked; a row and its slot are this worker's.
        unsafe {
            let width = rows.num_heads * layout.head_dim;
            for head in std::slice::from_raw_parts_mut(rows.q.add(row * width), width).chunks_exact_mut(layout.head_dim)
            {
                rotate(head);
            }
            for kv_head in 0..layout.num_kv_heads {
                let from = row * layout.token_len() + kv_head * layout.head_dim;
                let mut k = std::slice::from_raw_parts(rows.k.add(from), layout.head_dim).to_vec();
                rotate(&mut k);
                let to = pool.layer_ptr(layer).add(layout.k_element(block, token, kv_head));
                for (i, &k) in k.iter().enumerate() {
                    *to.add(i) = f16::from_f32(k);
                    *to.add(layout.v_offset() + i) = f16::from_f32(*rows.v.add(from + i));
                }
            }
        }
    }
}

pub(crate) fn attention(w: &Worker, job: &Job) {
    for entry in job.entries {
        for row in w.share(entry.num_rows as usize) {
            for head in 0..job.num_heads {
                attend(job, entry, row, head);
            }
        }
    }
}

fn attend(job: &Job, entry: &Entry, row: usize, head: usize) {
    let layout = job.pool.layout();
    let dim = layout.head_dim;
    let kv_head = head / (job.num_heads / layout.num_kv_heads);
    let keys = entry.first_position as usize + row + 1;
    let at = ((entry.first_row as usize + row) * job.num_heads + head) * dim;
    let element = |position: usize, i: usize| {
        let block = job.block_table[entry.first_block as usize + position / layout.chunk_tokens].0 as usize;
        layout.k_element(block, position % layout.chunk_tokens, kv_head) + i
    };
    // SAFETY: the operation checked rows, blocks and layer; the output row is this worker's; K and V are only read.
    unsafe {
        let kv = job.pool.layer_ptr(job.layer);
        let q = std::slice::from_raw_parts(job.q.add(at), dim);
        let score = |position: usize| {
            let dot = |(i, &q): (usize, &f32)| f64::from(q) * (*kv.add(element(position, i))).to_f64();
            q.iter().enumerate().map(dot).sum::<f64>() * f64::from(job.scale)
        };
        let scores: Vec<f64> = (0..keys).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        for i in 0..dim {
            let value = |position: usize| (*kv.add(element(position, i) + layout.v_offset())).to_f64();
            let mixed: f64 = scores.iter().enumerate().map(|(p, s)| (s - max).exp() / sum * value(p)).sum();
            *job.out.add(at + i) = mixed as f32;
        }
    }
}
