//! Where weights come from: a GGUF file, a Hugging Face folder, or a seeded generator.
//!
//! A [`WeightSource`] hands out tensors under one set of names ([`TensorName`]), still in the type
//! they are stored in, so that an architecture is written once. Sources check files; shapes against hyperparameters are checked by whoever
//! takes the tensor ([`Tensor::expect_shape`]).
//!
//! Deliberately absent: dequantisation (weights go to the device as they are) and any network.

pub mod dummy;
pub mod gguf;
mod names;
pub(crate) mod rope_rows;
pub mod safetensors;

use std::borrow::Cow;

use half::{bf16, f16};
use keepsake_kernels::{DType, RopeStyle};

pub use self::names::{LayerTensor, TensorName};
use crate::error::ModelError;

/// A tensor as it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    pub dtype: DType,
    /// Outermost dimension first: a matrix of n outputs over k inputs is `[n, k]`.
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

impl Tensor<'_> {
    pub fn expect_shape(&self, name: &str, wanted: &[usize]) -> Result<(), ModelError> {
        if self.shape == wanted {
            return Ok(());
        }
        Err(ModelError::Shape(format!("tensor `{name}` is {:?}, the hyperparameters ask for {wanted:?}", self.shape)))
    }

    /// A small float tensor (a norm, rope divisors) as f32.
    pub fn to_f32s(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let halves = self.bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
        match self.dtype {
            DType::F32 => Ok(self
                .bytes
                .chunks_exact(4)
                .map(|quad| f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]))
                .collect()),
            DType::F16 => Ok(halves.map(|pair| f16::from_le_bytes(pair).to_f32()).collect()),
            DType::BF16 => Ok(halves.map(|pair| bf16::from_le_bytes(pair).to_f32()).collect()),
            other => {
                Err(ModelError::Shape(format!("tensor `{name}` is {other:?}, a vector has to be F32, F16 or BF16")))
            }
        }
    }
}

/// Tensors by name. Object safe; `Sync`, so that digests are taken on all cores.
pub trait WeightSource: Sync {
    /// `None`: the source has no such tensor (tied output embeddings, for one).
    fn tensor(&self, name: TensorName) -> Result<Option<Tensor<'_>>, ModelError>;

    /// The tensor's name in this source, for messages.
    fn display_name(&self, name: TensorName) -> String;

    /// The order of the rows of Q and K.
    fn rope_style(&self) -> RopeStyle {
        RopeStyle::HalfSplit
    }

    /// Identifies the tensor's content: its type, shape and bytes.
    fn digest(&self, name: TensorName) -> Result<Option<blake3::Hash>, ModelError> {
        Ok(self.tensor(name)?.map(|tensor| digest_of(&tensor)))
    }

    /// A tensor that the architecture cannot do without.
    fn required(&self, name: TensorName) -> Result<Tensor<'_>, ModelError> {
        self.tensor(name)?.ok_or_else(|| ModelError::Shape(format!("tensor `{}` is missing", self.display_name(name))))
    }
}

fn digest_of(tensor: &Tensor) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{:?} {:?}\n", tensor.dtype, tensor.shape).as_bytes());
    hasher.update(&tensor.bytes);
    hasher.finalize()
}
