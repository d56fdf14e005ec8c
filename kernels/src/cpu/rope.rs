//! Rotation of q and k, and the f16 write of k and v to their slots.

use half::f16;

use super::isa::Isa;
use super::reference;
use super::simd::{dispatch, Kernel, Simd, LANES};
use super::team::Worker;
use crate::kv::KvPool;
use crate::rope::{RopeStyle, RopeTable};

/// The rows of a step.
pub(crate) struct Rows<'a> {
    pub q: *mut f32,
    pub k: *mut f32,
    pub v: *mut f32,
    pub positions: &'a [u32],
    pub slots: &'a [u32],
    pub num_heads: usize,
}

pub(crate) fn rope_and_write(w: &Worker, rows: &Rows, table: &RopeTable, pool: &KvPool, layer: usize) {
    if w.isa() == Isa::Reference {
        return reference::rope_and_write(w, rows, table, pool, layer);
    }
    dispatch(w.isa(), RopeAndWrite { share: w.share(rows.positions.len()), rows, table, pool, layer });
}

struct RopeAndWrite<'a> {
    share: std::ops::Range<usize>,
    rows: &'a Rows<'a>,
    table: &'a RopeTable,
    pool: &'a KvPool,
    layer: usize,
}

impl Kernel for RopeAndWrite<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let layout = self.pool.layout();
        let (head_dim, rotary) = (layout.head_dim, self.table.rotary_dim());
        let width = self.rows.num_heads * head_dim;
        let mut cos = vec![0.0; rotary / 2];
        let mut sin = vec![0.0; rotary / 2];
        // One factor an element: out = x * factor + partner * signed.
        let mut factor = vec![0.0; rotary];
        let mut signed = vec![0.0; rotary];
        let mut rotated = vec![0.0; head_dim.next_multiple_of(LANES)];
        for row in self.share {
            self.table.angles(self.rows.positions[row] as usize, &mut cos, &mut sin);
            spread(self.table.style(), &cos, &sin, &mut factor, &mut signed);
            let slot = self.rows.slots[row] as usize;
            let (block, token) = (slot / layout.chunk_tokens, slot % layout.chunk_tokens);
            // SAFETY: rows, slots and layer were checked; a row and its slot are this worker's.
            unsafe {
                for head in 0..self.rows.num_heads {
                    let q = self.rows.q.add(row * width + head * head_dim);
                    rotate::<S>(self.table.style(), q, &factor, &signed, q);
                }
                for head in 0..layout.num_kv_heads {
                    let from = row * layout.token_len() + head * head_dim;
                    let to = self.pool.layer_ptr(self.layer).add(layout.k_element(block, token, head));
                    std::ptr::copy_nonoverlapping(self.rows.k.add(from), rotated.as_mut_ptr(), head_dim);
                    rotate::<S>(self.table.style(), self.rows.k.add(from), &factor, &signed, rotated.as_mut_ptr());
                    write_f16::<S>(rotated.as_ptr(), to, head_dim);
                    write_f16::<S>(self.rows.v.add(from), to.add(layout.v_offset()), head_dim);
                }
            }
        }
    }
}

/// The factors of every element of a head.
#[inline(always)]
fn spread(style: RopeStyle, cos: &[f32], sin: &[f32], factor: &mut [f32], signed: &mut [f32]) {
    let half = cos.len();
    match style {
        RopeStyle::Interleaved => {
            for i in 0..half {
                factor[2 * i] = cos[i];
                factor[2 * i + 1] = cos[i];
                signed[2 * i] = -sin[i];
                signed[2 * i + 1] = sin[i];
            }
        }
        RopeStyle::HalfSplit => {
            for i in 0..half {
                factor[i] = cos[i];
                factor[half + i] = cos[i];
                signed[i] = -sin[i];
                signed[half + i] = sin[i];
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; `x` and `out` hold as many elements as `factor`; they may be the same.
#[inline(always)]
unsafe fn rotate<S: Simd>(style: RopeStyle, x: *const f32, factor: &[f32], signed: &[f32], out: *mut f32) {
    let dim = factor.len();
    // SAFETY: all indices stay below `dim`.
    unsafe {
        match style {
            RopeStyle::Interleaved => {
                let mut i = 0;
                while i + LANES <= dim {
                    let own = S::load(x.add(i));
                    let lanes = own.to_array();
                    let partner: [f32; LANES] = std::array::from_fn(|j| lanes[j ^ 1]);
                    let turned = S::load(partner.as_ptr()).mul(S::load(signed.as_ptr().add(i)));
                    own.fma(S::load(factor.as_ptr().add(i)), turned).store(out.add(i));
                    i += LANES;
                }
                while i < dim {
                    let (a, b) = (*x.add(i), *x.add(i + 1));
                    *out.add(i) = a.mul_add(factor[i], b * signed[i]);
                    *out.add(i + 1) = b.mul_add(factor[i + 1], a * signed[i + 1]);
                    i += 2;
                }
            }
            RopeStyle::HalfSplit => {
                let half = dim / 2;
                for i in 0..half {
                    let (a, b) = (*x.add(i), *x.add(half + i));
                    *out.add(i) = a.mul_add(factor[i], b * signed[i]);
                    *out.add(half + i) = b.mul_add(factor[half + i], a * signed[half + i]);
                }
            }
        }
    }
}

/// # Safety
/// As [`Simd`]; `from` and `to` hold `len` elements.
#[inline(always)]
unsafe fn write_f16<S: Simd>(from: *const f32, to: *mut f16, len: usize) {
    let whole = len / LANES * LANES;
    // SAFETY: by the caller's word.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            S::load(from.add(i)).store_f16(to.add(i).cast());
        }
        for i in whole..len {
            *to.add(i) = f16::from_f32(*from.add(i));
        }
    }
}
