//! What a forward pass is made of, and the forms that weights take on a device.
//!
//! A pass keeps its activations to itself: the residual stream `x` of all rows or, from [`Pass::keep_sampled`] on, of the
//! sampled rows; the normed input of the next product; q; what attention mixed. Operations name weights and say which rows.

use keepsake_kernels::KernelError;

use crate::error::ModelError;
use crate::weights::Tensor;

/// Weights on one kind of device.
pub(crate) trait Weights {
    /// `n` outputs over `k` inputs.
    type Matrix: Send + Sync;
    /// Matrices that read the same input.
    type Group: Send + Sync;
    /// A norm's weights, or biases.
    type Vector: Send + Sync;

    fn matrix_bytes(matrix: &Self::Matrix) -> usize;
    fn group_bytes(group: &Self::Group) -> usize;
    fn vector_bytes(vector: &Self::Vector) -> usize;
}

/// Brings tensors to a device. Called from several threads.
pub(crate) trait Memory<W: Weights>: Sync {
    /// A tensor of `[n, k]`.
    fn matrix(&self, tensor: &Tensor) -> Result<W::Matrix, ModelError>;
    /// Tensors of `[n_i, k]`.
    fn group(&self, tensors: &[Tensor]) -> Result<W::Group, ModelError>;
    fn vector(&self, values: &[f32]) -> Result<W::Vector, ModelError>;
}

pub(crate) struct Norm<W: Weights> {
    pub weight: W::Vector,
    /// A layer norm's; `None`: an RMS norm.
    pub shift: Option<W::Vector>,
    pub eps: f32,
}

/// A product and what is added to it.
pub(crate) struct Linear<W: Weights> {
    pub matrix: W::Matrix,
    pub bias: Option<W::Vector>,
}

/// How new rows of a layer become q and K/V.
pub(crate) struct Projection<W: Weights> {
    /// q, k, v.
    pub qkv: W::Group,
    /// Of q, k and v, one after the other.
    pub bias: Option<W::Vector>,
    /// Over each head.
    pub q_norm: Option<Norm<W>>,
    pub k_norm: Option<Norm<W>>,
}

pub(crate) enum FeedForward<W: Weights> {
    SiluGated { gate_up: W::Group, down: W::Matrix },
    Relu { up: Linear<W>, down: Linear<W> },
}

/// Which rows an operation takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    All,
    /// Those whose logits are wanted, packed.
    Sampled,
}

/// One forward pass on a device.
pub(crate) trait Pass {
    type Weights: Weights;

    /// x = the tokens' vectors, plus row `position + offset` of `learned` where positions are learned.
    fn embed(
        &self,
        table: &<Self::Weights as Weights>::Matrix,
        learned: Option<(&<Self::Weights as Weights>::Matrix, u32)>,
    ) -> Result<(), KernelError>;

    /// input = norm(x)
    fn norm(&self, norm: &Norm<Self::Weights>, rows: Rows) -> Result<(), KernelError>;

    /// q, K and V of every row from input; K and V go to their slots.
    fn write_kv(&self, layer: usize, projection: &Projection<Self::Weights>) -> Result<(), KernelError>;

    /// mixed = attention of q, for all rows or the sampled ones (not packed yet).
    fn attend(&self, layer: usize, rows: Rows) -> Result<(), KernelError>;

    /// x and mixed shrink to the sampled rows.
    fn keep_sampled(&self) -> Result<(), KernelError>;

    /// x += output(mixed)
    fn add_attention(&self, output: &Linear<Self::Weights>, rows: Rows) -> Result<(), KernelError>;

    /// x += feed_forward(input)
    fn add_feed_forward(&self, feed_forward: &FeedForward<Self::Weights>, rows: Rows) -> Result<(), KernelError>;

    /// The sampled rows' logits from input.
    fn logits(&self, output: &<Self::Weights as Weights>::Matrix) -> Result<(), KernelError>;
}
