//! Devices, the layout and pools of K/V, and the operations of a transformer.
//!
//! Depends on no other crate of the workspace. It knows tensors and blocks of K/V; it does not know models, sessions,
//! tiers or tokens' text.
//!
//! # Invariants
//! - **SPMD.** A forward pass is one [`Device::run`] region; inside it every worker calls the same operations with the
//!   same arguments, and each operation ends in a barrier. An operation that returns an error has touched nothing and has
//!   not waited, on any worker.
//! - **Batch invariance.** A row's result has the same bits alone and in any batch, for any split of a prefill and any
//!   number of threads: reductions have a fixed order that depends on the row's own shape only. Products with quantised
//!   weights are exact integer sums (see `cpu/panels.rs`), so they are also equal under every instruction set.
//! - **Checked shapes.** Operations refuse shapes that do not fit; no argument of a public function leads to undefined
//!   behaviour, except for breaking the SPMD rule.
//! - [`KvLayout`] is the only place that knows offsets inside K/V.
//!
//! Absent on purpose: a graph of operations, automatic fusion, training.

mod activations;
mod buffer;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod dtype;
mod error;
mod kv;
mod matrix;
pub mod ops;
mod rope;

pub use activations::{Activations, InputForms};
pub use buffer::Buffer;
pub use cpu::isa::Isa;
pub use device::{CpuDevice, CudaDevice, Device, DeviceKind, Worker};
pub use dtype::DType;
pub use error::{KernelError, Result};
pub use kv::{BlockId, Entry, KvLayout, KvPool};
pub use matrix::Matrix;
pub use rope::{RopeScaling, RopeSpec, RopeStyle, RopeTable};
