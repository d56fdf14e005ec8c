//! NVIDIA GPUs: one context a device, streams, memory, kernels compiled for the device at hand, matrix products.
//!
//! May depend on the crate's shapes ([`KvLayout`](crate::KvLayout), [`Entry`](crate::Entry), [`RopeTable`](crate::RopeTable),
//! [`Matrix`](crate::Matrix) for what weights mean), not on its CPU kernels.
//!
//! # Invariants
//! - **Stream order.** Operations only enqueue; what an operation reads was written by an earlier one of its stream, or
//!   behind an [`Event`] that the stream waited for. Nothing is allocated, freed or waited for inside an operation, so that a
//!   sequence of them can be captured into a [`Graph`].
//! - **Checked shapes.** As on the CPU, an operation refuses buffers that are too short. What indices *in device memory* point
//!   to is only known to the kernels: embedding, gathers and K/V writes answer an index out of range with NaN or by
//!   writing nothing; the block tables of attention are the caller's word (`Batch::validate` in the model crate).
//! - The residual stream is f32, everything else is bf16 with sums in f32.
//! - A row's result depends on its stream's operations only, not on timing: no floating-point atomics. It may depend on how
//!   many rows a matrix product has, and on which of cuBLASLt's kernels a process found the fastest ([`Blas::tune`]), so the
//!   CPU's batch invariance does not hold here.
//! - Memory is released only after the device has gone idle.
//!
//! # Floors, on one H200 (4.3 TB/s device copy, 794 TFLOP/s bf16, 55 GB/s a direction of PCIe, as measured)
//! Row operations move each byte once; `tests/gpu/run check` prints their times beside bytes / bandwidth.
//!
//! Absent on purpose: other vendors, several devices in one context.

mod blas;
mod call;
mod compiler;
mod context;
mod copies;
mod graph;
mod kv;
mod library;
mod memory;
mod module;
pub mod ops;
mod pinned;
pub mod sources;
mod stream;

pub use blas::{Blas, Output, StoredRows, Weight};
pub use compiler::{Compiled, Compiler};
pub use context::{default_cubin_folder, Context};
pub use copies::{Copies, HostPage, Method};
pub use graph::Graph;
pub use kv::CudaKvPool;
pub use memory::{to_bf16, DeviceBuffer, Element, View};
pub use pinned::PinnedBuffer;
pub use stream::{Event, Stream};
