//! The pass on an NVIDIA GPU: operations on one stream, and graphs of them for steps that only decode.

mod engine;
mod pass;
mod weights;

pub(crate) use self::engine::{CudaEngine, Submission};
pub(crate) use self::weights::{CudaMemory, CudaWeights};
