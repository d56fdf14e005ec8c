//! Matrix products through cuBLASLt: bf16 operands, f32 sums.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use half::bf16;
use rayon::prelude::*;

use super::context::Context;
use super::memory::{DeviceBuffer, View};
use super::stream::{Event, Stream};
use crate::cpu::blocks::{read_floats, Row};
use crate::dtype::DType;
use crate::error::{ensure, KernelError, Result};
use crate::ops::Accumulate;

/// What NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Proposals that tuning times, how often, and on how many weights: some milliseconds a shape.
const NUM_PROPOSALS: usize = 10;
const TUNING_ROUNDS: usize = 3;
const TUNING_WEIGHTS: usize = 8;

/// A weight of `n` outputs and `k` inputs, row n holding the k weights of output n. Weights that share their input lie one
/// after the other in one `Weight` (q, k, v; gate, up): their outputs come side by side from one product.
pub struct Weight {
    pub data: DeviceBuffer<bf16>,
    n: usize,
    k: usize,
}

impl Weight {
    /// `data` holds `n` rows of `k`, which is a multiple of 8.
    pub fn new(data: DeviceBuffer<bf16>, n: usize, k: usize) -> Result<Weight> {
        ensure!("Weight", n.checked_mul(k) == Some(data.len()), "{} elements for {n} x {k}", data.len());
        ensure!("Weight", k.is_multiple_of(8) && k > 0 && n > 0, "{n} x {k}: k is not a multiple of 8");
        Ok(Weight { data, n, k })
    }

    /// Brings stored rows of `k` to the device, one part after the other: bf16 as it is, the rest as bf16 made on the host.
    pub fn upload(context: &Arc<Context>, k: usize, parts: &[StoredRows]) -> Result<Weight> {
        let op = "Weight::upload";
        let n: usize = parts.iter().map(|part| part.n).sum();
        let data = DeviceBuffer::new(context, "weights", n.saturating_mul(k))?;
        let mut first = 0;
        for part in parts {
            let whole = k > 0 && k.is_multiple_of(part.dtype.block_len());
            ensure!(op, whole, "k = {k} is not whole blocks of {}", part.dtype);
            let row_bytes = part.dtype.bytes_for(k).expect("whole blocks");
            let fits = row_bytes.checked_mul(part.n) == Some(part.bytes.len());
            ensure!(op, fits, "{} bytes for {} x {k} of {}", part.bytes.len(), part.n, part.dtype);
            let to = data.slice(first..first + part.n * k)?;
            match part.dtype {
                DType::BF16 => to.write_bytes(context, part.bytes)?,
                dtype => {
                    let mut rows = vec![0u8; part.n * k * size_of::<bf16>()];
                    rows.par_chunks_mut(k * size_of::<bf16>()).zip(part.bytes.par_chunks(row_bytes)).for_each_init(
                        || vec![0.0; k],
                        |floats, (row, stored)| {
                            dequantise(dtype, stored, floats);
                            for (to, value) in row.chunks_exact_mut(size_of::<bf16>()).zip(floats) {
                                to.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
                            }
                        },
                    );
                    to.write_bytes(context, &rows)?;
                }
            }
            first += part.n * k;
        }
        Weight::new(data, n, k)
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }
}

/// Rows of a weight as a file stores them.
#[derive(Debug, Clone, Copy)]
pub struct StoredRows<'a> {
    pub dtype: DType,
    pub n: usize,
    pub bytes: &'a [u8],
}

/// Where a product goes, `[row][n]`.
#[derive(Clone, Copy)]
pub enum Output<'a> {
    Bf16(View<'a, bf16>),
    /// Logits, or the residual stream.
    F32(View<'a, f32>, Accumulate),
}

/// Products of one stream: the workspace is theirs alone.
pub struct Blas {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    workspace: DeviceBuffer<u8>,
    /// What cuBLASLt chose for each shape.
    plans: Mutex<HashMap<Shape, Arc<Plan>>>,
    tuned: Mutex<HashSet<Shape>>,
}

// SAFETY: a handle whose calls are thread-safe; plans are immutable.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    n: usize,
    k: usize,
    is_f32: bool,
    adds: bool,
}

impl Blas {
    pub fn new(context: &Arc<Context>) -> Result<Blas> {
        context.bind()?;
        let workspace = DeviceBuffer::new(context, "cuBLASLt's workspace", WORKSPACE_BYTES)?;
        let handle = result::create_handle().map_err(|error| failed("cublasLtCreate", error))?;
        Ok(Blas { context: context.clone(), handle, workspace, plans: Mutex::default(), tuned: Mutex::default() })
    }

    /// `out[r][n] = sum over k of x[r][k] * weight[n][k]` for `rows` rows.
    pub fn matmul(&self, stream: &Stream, x: View<bf16>, rows: usize, weight: &Weight, out: Output) -> Result<()> {
        let op = "cuda::matmul";
        let (n, k) = (weight.n, weight.k);
        let (out_len, address, is_f32, adds) = match out {
            Output::Bf16(view) => (view.len(), view.address(), false, false),
            Output::F32(view, accumulate) => (view.len(), view.address(), true, accumulate == Accumulate::Add),
        };
        ensure!(op, rows.saturating_mul(k) <= x.len(), "x holds {} elements, not {rows} x {k}", x.len());
        ensure!(op, rows.saturating_mul(n) <= out_len, "out holds {out_len} elements, not {rows} x {n}");
        ensure!(op, x.is_aligned() && address.is_multiple_of(16), "x or out is not aligned to 16 bytes");
        if rows == 0 {
            return Ok(());
        }
        let plan = self.plan(Shape { rows, n, k, is_f32, adds })?;
        self.enqueue(stream, &plan, x, weight, address, adds)
    }

    /// Replaces cuBLASLt's first proposal for a shape by the fastest of several, timed on weights of one shape that are read
    /// in turn, so that none lies in the cache. Overwrites `out` and waits. Does nothing for a shape that was tuned.
    pub fn tune(&self, stream: &Stream, x: View<bf16>, rows: usize, weights: &[&Weight], out: Output) -> Result<()> {
        let Some(first) = weights.first() else {
            return Ok(());
        };
        let (n, k) = (first.n, first.k);
        ensure!("Blas::tune", weights.iter().all(|weight| (weight.n, weight.k) == (n, k)), "weights of several shapes");
        let (address, is_f32, adds) = match out {
            Output::Bf16(view) => (view.address(), false, false),
            Output::F32(view, accumulate) => (view.address(), true, accumulate == Accumulate::Add),
        };
        let shape = Shape { rows, n, k, is_f32, adds };
        if rows == 0 || !self.tuned.lock().unwrap_or_else(PoisonError::into_inner).insert(shape) {
            return Ok(());
        }
        // Checks the operands and warms up.
        self.matmul(stream, x, rows, first, out)?;
        let (start, end) = (Event::timed(&self.context)?, Event::timed(&self.context)?);
        let mut best: Option<(f64, Plan)> = None;
        for plan in Plan::proposals(self.handle, shape, NUM_PROPOSALS)? {
            self.enqueue(stream, &plan, x, first, address, adds)?;
            let mut seconds = f64::INFINITY;
            for _ in 0..TUNING_ROUNDS {
                stream.record(&start)?;
                for weight in weights.iter().take(TUNING_WEIGHTS) {
                    self.enqueue(stream, &plan, x, weight, address, adds)?;
                }
                stream.record(&end)?;
                end.synchronize()?;
                seconds = seconds.min(start.seconds_to(&end)?);
            }
            if best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
                best = Some((seconds, plan));
            }
        }
        if let Some((_, plan)) = best {
            self.plans.lock().unwrap_or_else(PoisonError::into_inner).insert(shape, Arc::new(plan));
        }
        Ok(())
    }

    /// The operands were checked.
    fn enqueue(
        &self,
        stream: &Stream,
        plan: &Plan,
        x: View<bf16>,
        weight: &Weight,
        out: cudarc::driver::sys::CUdeviceptr,
        adds: bool,
    ) -> Result<()> {
        self.context.bind()?;
        let (alpha, beta) = (1.0f32, if adds { 1.0f32 } else { 0.0 });
        let Description { operation, weight: weight_layout, x: x_layout, out: out_layout } = *plan.description;
        // SAFETY: the layouts describe memory that was checked; the workspace is this stream's alone (the type's contract), so
        // that products do not meet in it.
        unsafe {
            result::matmul(
                self.handle,
                operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                weight.data.view().address() as *const c_void,
                weight_layout,
                x.address() as *const c_void,
                x_layout,
                out as *const c_void,
                out_layout,
                out as *mut c_void,
                out_layout,
                &plan.algorithm,
                self.workspace.view().address() as *mut c_void,
                WORKSPACE_BYTES,
                stream.raw().cast(),
            )
        }
        .map_err(|error| failed("cublasLtMatmul", error))
    }

    fn plan(&self, shape: Shape) -> Result<Arc<Plan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&shape) {
            return Ok(plan.clone());
        }
        let plan = Plan::proposals(self.handle, shape, 1)?.pop();
        let plan = Arc::new(plan.expect("cuBLASLt proposes something or says that it cannot"));
        plans.insert(shape, plan.clone());
        Ok(plan)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.context.synchronize().is_ok() {
            // SAFETY: created once, destroyed once; the device is idle.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

/// Part of [`Context::numeric_version`]. The library was found before.
pub(crate) fn library_version() -> String {
    // SAFETY: no preconditions.
    format!("cublaslt{}", unsafe { sys::cublasLtGetVersion() })
}

/// How a shape is computed.
struct Plan {
    description: Arc<Description>,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt's view of a shape. Its matrices are column-major: out^T (n x rows) = weight (stored as k x n, transposed) * x^T
/// (k x rows).
struct Description {
    operation: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

// SAFETY: nobody changes a description after it was made.
unsafe impl Send for Description {}
// SAFETY: as above.
unsafe impl Sync for Description {}

impl Plan {
    /// Up to `count` plans, the one that cuBLASLt expects to be the fastest first; at least one.
    fn proposals(handle: sys::cublasLtHandle_t, shape: Shape, count: usize) -> Result<Vec<Plan>> {
        let call = "cublasLtMatmulAlgoGetHeuristic";
        let description = Arc::new(Description::new(shape)?);
        let Description { operation, weight, x, out } = *description;
        let preference =
            result::create_matmul_pref().map_err(|error| failed("cublasLtMatmulPreferenceCreate", error))?;
        let workspace_bytes = WORKSPACE_BYTES;
        // SAFETY: plain data that cuBLASLt fills.
        let empty = || unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() };
        let mut found: Vec<_> = (0..count).map(|_| empty()).collect();
        let mut num_found = 0;
        // SAFETY: everything exists; the attribute is a size; the array has `count` elements.
        let asked = unsafe {
            let set = result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of_val(&workspace_bytes),
            );
            let asked = set.and_then(|()| {
                let (count, into) = (count as i32, found.as_mut_ptr());
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    operation,
                    weight,
                    x,
                    out,
                    out,
                    preference,
                    count,
                    into,
                    &mut num_found,
                )
                .result()
            });
            let _ = result::destroy_matmul_pref(preference);
            asked
        };
        asked.map_err(|error| failed(call, error))?;
        found.truncate(num_found.max(0) as usize);
        let usable = found.into_iter().filter(|found| found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        let plans: Vec<Plan> =
            usable.map(|found| Plan { description: description.clone(), algorithm: found.algo }).collect();
        if plans.is_empty() {
            return Err(KernelError::Cuda { call, reason: format!("nothing for {shape:?}") });
        }
        Ok(plans)
    }
}

impl Description {
    fn new(shape: Shape) -> Result<Description> {
        let Shape { rows, n, k, is_f32, .. } = shape;
        let (rows, n, k) = (rows as u64, n as u64, k as u64);
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let f32 = sys::cudaDataType_t::CUDA_R_32F;
        let layout = |data_type, rows, cols| {
            let made = result::create_matrix_layout(data_type, rows, cols, rows as i64);
            made.map_err(|error| failed("cublasLtMatrixLayoutCreate", error))
        };
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let operation =
            result::create_matmul_desc(compute, f32).map_err(|error| failed("cublasLtMatmulDescCreate", error))?;
        let transpose: i32 = 1;
        // SAFETY: the description exists; the attribute is an i32 (cublasOperation_t, T = 1).
        unsafe {
            result::set_matmul_desc_attribute(
                operation,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transpose).cast(),
                size_of_val(&transpose),
            )
        }
        .map_err(|error| failed("cublasLtMatmulDescSetAttribute", error))?;
        Ok(Description {
            operation,
            weight: layout(bf16, k, n)?,
            x: layout(bf16, k, rows)?,
            out: layout(if is_f32 { f32 } else { bf16 }, n, rows)?,
        })
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; a product copies what it needs when it is enqueued.
        unsafe {
            let _ = result::destroy_matrix_layout(self.weight);
            let _ = result::destroy_matrix_layout(self.x);
            let _ = result::destroy_matrix_layout(self.out);
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

fn dequantise(dtype: DType, stored: &[u8], out: &mut [f32]) {
    match dtype.is_float() {
        true => read_floats(dtype, stored, out),
        false => {
            let mut blocks = Row::default();
            blocks.read(dtype, stored);
            blocks.dequantise(out);
        }
    }
}

fn failed(call: &'static str, error: result::CublasError) -> KernelError {
    KernelError::Cuda { call, reason: format!("{error:?}") }
}
