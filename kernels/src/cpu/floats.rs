//! Products with float weights: one chain of fused multiply-adds over ascending k for each output, whatever the rows.

use super::blocks::read_floats;
use super::memory::Memory;
use super::simd::{dispatch, Kernel, Simd, LANES};
use super::team::Worker;
use crate::activations::Activations;
use crate::dtype::DType;
use crate::error::Result;

/// Panels a task covers at most: enough independent chains for one row to hide the latency of a fused multiply-add.
const TASK_PANELS: usize = 4;

/// Float weights in panels of 16 outputs, `[panel][k][16]`, in the file's element type.
pub(crate) struct FloatPanels {
    memory: Memory,
    dtype: DType,
    n: usize,
    k: usize,
}

impl FloatPanels {
    pub(crate) fn pack(dtype: DType, n: usize, k: usize, bytes: &[u8]) -> Result<FloatPanels> {
        let size = dtype.block_bytes();
        let padded = n.next_multiple_of(LANES).saturating_mul(k * size);
        let memory = Memory::zeroed("a float matrix", padded)?;
        for (index, element) in bytes.chunks_exact(size).enumerate() {
            let (output, i) = (index / k, index % k);
            let to = ((output / LANES * k + i) * LANES + output % LANES) * size;
            // SAFETY: inside the padded allocation, which is ours alone.
            unsafe { std::ptr::copy_nonoverlapping(element.as_ptr(), memory.as_ptr::<u8>().add(to), size) };
        }
        Ok(FloatPanels { memory, dtype, n, k })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(crate) fn read_row(&self, output: usize, out: &mut [f32]) {
        let size = self.dtype.block_bytes();
        for (i, out) in out.iter_mut().enumerate().take(self.k) {
            let at = ((output / LANES * self.k + i) * LANES + output % LANES) * size;
            // SAFETY: element (output, i) of the allocation, which nobody writes after packing.
            let bytes = unsafe { std::slice::from_raw_parts(self.memory.as_ptr::<u8>().add(at), size) };
            read_floats(self.dtype, bytes, std::slice::from_mut(out));
        }
    }

    fn num_panels(&self) -> usize {
        self.n.div_ceil(LANES)
    }
}

pub(crate) fn num_tasks(panels: &FloatPanels, _rows: usize) -> usize {
    panels.num_panels().div_ceil(TASK_PANELS)
}

pub(crate) fn matmul(w: &Worker, x: &Activations, panels: &FloatPanels, task: usize, out: *mut f32, add: bool) {
    dispatch(w.isa(), Task { x: x.floats(), rows: x.rows(), panels, task, out, add });
}

struct Task<'a> {
    x: *const f32,
    rows: usize,
    panels: &'a FloatPanels,
    task: usize,
    out: *mut f32,
    add: bool,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let first = self.task * TASK_PANELS;
        let count = TASK_PANELS.min(self.panels.num_panels() - first);
        let base = self.panels.memory.as_ptr::<u8>().cast_const();
        // SAFETY: the loads read sixteen elements inside a panel.
        unsafe {
            match self.panels.dtype {
                DType::F32 => self.columns::<S, 4>(count, &|at| S::load(base.cast::<f32>().add(at))),
                DType::F16 => self.columns::<S, 4>(count, &|at| S::load_f16(base.cast::<u16>().add(at))),
                _ => self.columns::<S, 4>(count, &|at| S::load_bf16(base.cast::<u16>().add(at))),
            }
        }
    }
}

impl Task<'_> {
    /// # Safety
    /// As [`Simd`].
    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize>(&self, count: usize, load: &impl Fn(usize) -> S) {
        let mut row = 0;
        // SAFETY: by the caller's word; rows and panels are in range.
        unsafe {
            while row + R <= self.rows {
                self.tile::<S, R>(row, count, load);
                row += R;
            }
            while row < self.rows {
                self.tile::<S, 1>(row, count, load);
                row += 1;
            }
        }
    }

    /// `R` rows of up to `TASK_PANELS` panels.
    ///
    /// # Safety
    /// As [`Simd`]; the rows exist.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize>(&self, row: usize, count: usize, load: &impl Fn(usize) -> S) {
        let k = self.panels.k;
        let first = self.task * TASK_PANELS;
        // SAFETY: x holds rows x k; panels are k x 16 elements each; outputs are checked against n below.
        unsafe {
            if count == TASK_PANELS {
                let mut sums = [[S::splat(0.0); TASK_PANELS]; R];
                for i in 0..k {
                    let weights: [S; TASK_PANELS] = std::array::from_fn(|p| load(((first + p) * k + i) * LANES));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let x = S::splat(*self.x.add((row + r) * k + i));
                        for p in 0..TASK_PANELS {
                            sums[p] = x.fma(weights[p], sums[p]);
                        }
                    }
                }
                for (r, sums) in sums.iter().enumerate() {
                    for (p, &sum) in sums.iter().enumerate() {
                        self.put(row + r, first + p, sum);
                    }
                }
            } else {
                for p in 0..count {
                    let mut sums = [S::splat(0.0); R];
                    for i in 0..k {
                        let weights = load(((first + p) * k + i) * LANES);
                        for (r, sum) in sums.iter_mut().enumerate() {
                            *sum = S::splat(*self.x.add((row + r) * k + i)).fma(weights, *sum);
                        }
                    }
                    for (r, &sum) in sums.iter().enumerate() {
                        self.put(row + r, first + p, sum);
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`Simd`]; row and panel exist.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, row: usize, panel: usize, sum: S) {
        let n = self.panels.n;
        let len = LANES.min(n - panel * LANES);
        // SAFETY: `len` outputs from panel * 16 on lie below n; they are this task's.
        unsafe {
            let to = self.out.add(row * n + panel * LANES);
            let sum = if self.add { S::load_part(to, len).add(sum) } else { sum };
            sum.store_part(to, len);
        }
    }
}
