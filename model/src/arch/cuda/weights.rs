//! Weights in the GPU's memory.

use std::sync::Arc;

use keepsake_kernels::cuda::{Context, DeviceBuffer, StoredRows, Weight};

use crate::arch::pass::{Memory, Weights};
use crate::error::ModelError;
use crate::weights::Tensor;

/// bf16 matrices; groups lie one after the other; f32 vectors.
pub(crate) struct CudaWeights;

impl Weights for CudaWeights {
    type Matrix = Weight;
    type Group = Weight;
    type Vector = DeviceBuffer<f32>;

    fn matrix_bytes(matrix: &Weight) -> usize {
        matrix.bytes()
    }

    fn group_bytes(group: &Weight) -> usize {
        group.bytes()
    }

    fn vector_bytes(vector: &DeviceBuffer<f32>) -> usize {
        vector.bytes()
    }
}

/// Where weights go.
pub(crate) struct CudaMemory {
    context: Arc<Context>,
}

impl CudaMemory {
    pub fn new(context: &Arc<Context>) -> Result<Self, ModelError> {
        Ok(Self { context: context.clone() })
    }
}

impl Memory<CudaWeights> for CudaMemory {
    fn matrix(&self, tensor: &Tensor) -> Result<Weight, ModelError> {
        self.upload(std::slice::from_ref(tensor))
    }

    fn group(&self, tensors: &[Tensor]) -> Result<Weight, ModelError> {
        self.upload(tensors)
    }

    fn vector(&self, values: &[f32]) -> Result<DeviceBuffer<f32>, ModelError> {
        Ok(DeviceBuffer::from_slice(&self.context, "a vector of weights", values)?)
    }
}

impl CudaMemory {
    fn upload<'a>(&self, tensors: &'a [Tensor<'_>]) -> Result<Weight, ModelError> {
        let rows =
            |tensor: &'a Tensor<'_>| StoredRows { dtype: tensor.dtype, n: tensor.shape[0], bytes: &tensor.bytes };
        let parts: Vec<StoredRows> = tensors.iter().map(rows).collect();
        Ok(Weight::upload(&self.context, tensors[0].shape[1], &parts)?)
    }
}
