//! Generated weights of a given shape: the work of a real model without its file.
//!
//! A tensor is a pure function of seed, name, type and shape. Values are uniform with a standard
//! deviation of 1/sqrt(k), so that activations keep their scale and nothing overflows.

use half::{bf16, f16};
use keepsake_kernels::DType;

use super::{LayerTensor, Tensor, TensorName, WeightSource};
use crate::arch::{FeedForwardKind, NormKind, Positions};
use crate::config::{DummyDType, HParams};
use crate::error::ModelError;

/// Raise when the same seed gives other bytes: digests cover it.
const GENERATOR_VERSION: u32 = 1;
/// Standard deviation of a uniform integer in 0..16.
const NIBBLE_DEVIATION: f32 = 4.61;

pub struct DummyWeights {
    hparams: HParams,
    dtype: DummyDType,
    seed: u64,
}

impl DummyWeights {
    pub fn new(hparams: HParams, dtype: DummyDType, seed: u64) -> Self {
        Self { hparams, dtype, seed }
    }

    /// `None`: the architecture has no such tensor.
    fn shape(&self, name: TensorName) -> Option<Vec<usize>> {
        let hparams = &self.hparams;
        let (hidden, ffn) = (hparams.hidden, hparams.ffn);
        let design = hparams.arch.design();
        let has_shift = design.norm == NormKind::Layer;
        Some(match name {
            TensorName::OutputNormShift => has_shift.then_some(vec![hidden])?,
            TensorName::PositionEmbedding => match design.positions {
                Positions::Rotary => return None,
                Positions::Learned { offset } => vec![hparams.max_context + offset as usize, hidden],
            },
            TensorName::TokenEmbedding => vec![hparams.vocab_size, hidden],
            TensorName::OutputNorm => vec![hidden],
            TensorName::Output if hparams.tied_embeddings => return None,
            TensorName::Output => vec![hparams.vocab_size, hidden],
            TensorName::RopeFactors => return None,
            TensorName::Layer(layer, _) if layer >= hparams.num_layers => return None,
            TensorName::Layer(_, tensor) => match tensor {
                LayerTensor::AttentionNorm | LayerTensor::FfnNorm => vec![hidden],
                LayerTensor::Query => vec![hparams.query_dim(), hidden],
                LayerTensor::Key | LayerTensor::Value => vec![hparams.kv_dim(), hidden],
                LayerTensor::AttentionOutput => vec![hidden, hparams.query_dim()],
                LayerTensor::Gate if design.feed_forward == FeedForwardKind::Relu => return None,
                LayerTensor::Gate | LayerTensor::Up => vec![ffn, hidden],
                LayerTensor::QueryBias => design.qkv_bias.then_some(vec![hparams.query_dim()])?,
                LayerTensor::KeyBias | LayerTensor::ValueBias => design.qkv_bias.then_some(vec![hparams.kv_dim()])?,
                LayerTensor::QueryNorm | LayerTensor::KeyNorm => design.head_norms.then_some(vec![hparams.head_dim])?,
                LayerTensor::AttentionNormShift | LayerTensor::FfnNormShift => has_shift.then_some(vec![hidden])?,
                LayerTensor::AttentionOutputBias | LayerTensor::DownBias => {
                    design.output_bias.then_some(vec![hidden])?
                }
                LayerTensor::UpBias => design.output_bias.then_some(vec![ffn])?,
                LayerTensor::Down => vec![hidden, ffn],
            },
        })
    }

    fn dtype(&self, shape: &[usize]) -> DType {
        match shape {
            [_] => DType::F32,
            _ => self.dtype.dtype(),
        }
    }

    /// The tensor's own random stream.
    fn random(&self, name: TensorName) -> SplitMix64 {
        let hash = blake3::hash(format!("{} {}", self.seed, name.gguf()).as_bytes());
        let first = hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes");
        SplitMix64(u64::from_le_bytes(first))
    }
}

impl WeightSource for DummyWeights {
    fn tensor(&self, name: TensorName) -> Result<Option<Tensor<'_>>, ModelError> {
        let Some(shape) = self.shape(name) else {
            return Ok(None);
        };
        let mut random = self.random(name);
        let row_len = shape[shape.len() - 1];
        let len: usize = shape.iter().product();
        let deviation = 1.0 / (row_len as f32).sqrt();
        let dtype = self.dtype(&shape);
        let bytes = match dtype {
            DType::F32 if name.is_bias() => random_f32(&mut random, len, deviation),
            DType::F32 => 1.0f32.to_le_bytes().repeat(len),
            DType::BF16 => random_bf16(&mut random, len, deviation),
            _ => random_q4_1(&mut random, len / DType::Q4_1.block_len(), deviation),
        };
        Ok(Some(Tensor { dtype, shape, bytes: bytes.into() }))
    }

    fn display_name(&self, name: TensorName) -> String {
        name.gguf()
    }

    /// Of what determines the bytes, not of the bytes: an 8B model need not be generated twice.
    fn digest(&self, name: TensorName) -> Result<Option<blake3::Hash>, ModelError> {
        Ok(self.shape(name).map(|shape| {
            let dtype = self.dtype(&shape);
            let seed = self.seed;
            let text = format!("dummy {GENERATOR_VERSION} {seed} {name:?} {dtype:?} {shape:?}");
            blake3::hash(text.as_bytes())
        }))
    }
}

/// Blocks of f16 scale, f16 minimum, 16 bytes of nibbles.
fn random_q4_1(random: &mut SplitMix64, num_blocks: usize, deviation: f32) -> Vec<u8> {
    let scale = deviation / NIBBLE_DEVIATION;
    let minimum = f16::from_f32(-7.5 * scale).to_le_bytes();
    let scale = f16::from_f32(scale).to_le_bytes();
    let mut bytes = Vec::with_capacity(num_blocks * DType::Q4_1.block_bytes());
    for _ in 0..num_blocks {
        bytes.extend_from_slice(&scale);
        bytes.extend_from_slice(&minimum);
        bytes.extend_from_slice(&random.next().to_le_bytes());
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes
}

fn random_bf16(random: &mut SplitMix64, len: usize, deviation: f32) -> Vec<u8> {
    // A uniform value in -1..1 has a standard deviation of 1/sqrt(3).
    let half_width = deviation * 3f32.sqrt();
    let mut bytes = Vec::with_capacity(2 * len);
    for _ in 0..len {
        let unit = (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        bytes.extend_from_slice(&bf16::from_f32(unit * half_width).to_le_bytes());
    }
    bytes
}

fn random_f32(random: &mut SplitMix64, len: usize, deviation: f32) -> Vec<u8> {
    let half_width = deviation * 3f32.sqrt();
    let value = |_| ((random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * half_width;
    (0..len).map(value).flat_map(f32::to_le_bytes).collect()
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
