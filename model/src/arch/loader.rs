//! From a source's tensors to a decoder's weights: shapes checked, rotary rows in one order.

use rayon::prelude::*;

use super::decoder::Layer;
use super::pass::{FeedForward, Linear, Memory, Norm, Projection, Weights};
use super::{Design, FeedForwardKind, NormKind};
use crate::config::HParams;
use crate::error::ModelError;
use crate::weights::rope_rows::to_half_split;
use crate::weights::{LayerTensor, Tensor, TensorName, WeightSource};

pub(super) struct Loader<'a, W: Weights, M: Memory<W>> {
    source: &'a dyn WeightSource,
    hparams: &'a HParams,
    design: Design,
    memory: &'a M,
    weights: std::marker::PhantomData<fn() -> W>,
}

impl<'a, W: Weights, M: Memory<W>> Loader<'a, W, M> {
    pub fn new(source: &'a dyn WeightSource, hparams: &'a HParams, memory: &'a M) -> Self {
        Self { source, hparams, design: hparams.arch.design(), memory, weights: std::marker::PhantomData }
    }

    pub fn token_embedding(&self) -> Result<W::Matrix, ModelError> {
        self.matrix(TensorName::TokenEmbedding, [self.hparams.vocab_size, self.hparams.hidden])
    }

    pub fn output(&self) -> Result<Option<W::Matrix>, ModelError> {
        if self.hparams.tied_embeddings {
            return Ok(None);
        }
        self.matrix(TensorName::Output, [self.hparams.vocab_size, self.hparams.hidden]).map(Some)
    }

    pub fn output_norm(&self) -> Result<Norm<W>, ModelError> {
        self.norm(TensorName::OutputNorm, TensorName::OutputNormShift)
    }

    pub fn layers(&self) -> Result<Vec<Layer<W>>, ModelError> {
        (0..self.hparams.num_layers).into_par_iter().map(|index| self.layer(index)).collect()
    }

    fn layer(&self, index: usize) -> Result<Layer<W>, ModelError> {
        let name = |tensor| TensorName::Layer(index, tensor);
        let hidden = self.hparams.hidden;
        let output_bias = |tensor| self.design.output_bias.then_some(name(tensor));
        Ok(Layer {
            attention_norm: self.norm(name(LayerTensor::AttentionNorm), name(LayerTensor::AttentionNormShift))?,
            projection: self.projection(index)?,
            attention_output: self.linear(
                name(LayerTensor::AttentionOutput),
                [hidden, self.hparams.query_dim()],
                output_bias(LayerTensor::AttentionOutputBias),
            )?,
            ffn_norm: self.norm(name(LayerTensor::FfnNorm), name(LayerTensor::FfnNormShift))?,
            feed_forward: self.feed_forward(index)?,
        })
    }

    fn projection(&self, index: usize) -> Result<Projection<W>, ModelError> {
        let name = |tensor| TensorName::Layer(index, tensor);
        let HParams { hidden, head_dim, .. } = *self.hparams;
        let (query_dim, kv_dim) = (self.hparams.query_dim(), self.hparams.kv_dim());
        let head_norm = |tensor| -> Result<Option<Norm<W>>, ModelError> {
            if !self.design.head_norms {
                return Ok(None);
            }
            // The rotation's order of channels, as the rows of Q and K.
            let weight = self.memory.vector(&self.rotary_vector(name(tensor), head_dim)?)?;
            Ok(Some(Norm { weight, shift: None, eps: self.hparams.rms_eps }))
        };
        let bias = match self.design.qkv_bias {
            false => None,
            true => {
                let mut values = self.rotary_vector(name(LayerTensor::QueryBias), query_dim)?;
                values.extend(self.rotary_vector(name(LayerTensor::KeyBias), kv_dim)?);
                values.extend(self.vector(name(LayerTensor::ValueBias), kv_dim)?);
                Some(self.memory.vector(&values)?)
            }
        };
        Ok(Projection {
            qkv: self.memory.group(&[
                self.rotary(name(LayerTensor::Query), [query_dim, hidden])?,
                self.rotary(name(LayerTensor::Key), [kv_dim, hidden])?,
                self.take(name(LayerTensor::Value), &[kv_dim, hidden])?,
            ])?,
            bias,
            q_norm: head_norm(LayerTensor::QueryNorm)?,
            k_norm: head_norm(LayerTensor::KeyNorm)?,
        })
    }

    fn feed_forward(&self, index: usize) -> Result<FeedForward<W>, ModelError> {
        let name = |tensor| TensorName::Layer(index, tensor);
        let HParams { hidden, ffn, .. } = *self.hparams;
        let bias = |tensor| self.design.output_bias.then_some(name(tensor));
        Ok(match self.design.feed_forward {
            FeedForwardKind::SiluGated => FeedForward::SiluGated {
                gate_up: self.memory.group(&[
                    self.take(name(LayerTensor::Gate), &[ffn, hidden])?,
                    self.take(name(LayerTensor::Up), &[ffn, hidden])?,
                ])?,
                down: self.matrix(name(LayerTensor::Down), [hidden, ffn])?,
            },
            FeedForwardKind::Relu => FeedForward::Relu {
                up: self.linear(name(LayerTensor::Up), [ffn, hidden], bias(LayerTensor::UpBias))?,
                down: self.linear(name(LayerTensor::Down), [hidden, ffn], bias(LayerTensor::DownBias))?,
            },
        })
    }

    fn norm(&self, weight: TensorName, shift: TensorName) -> Result<Norm<W>, ModelError> {
        let hidden = self.hparams.hidden;
        Ok(Norm {
            weight: self.memory.vector(&self.vector(weight, hidden)?)?,
            shift: match self.design.norm {
                NormKind::Rms => None,
                NormKind::Layer => Some(self.memory.vector(&self.vector(shift, hidden)?)?),
            },
            eps: self.hparams.rms_eps,
        })
    }

    fn linear(&self, name: TensorName, shape: [usize; 2], bias: Option<TensorName>) -> Result<Linear<W>, ModelError> {
        let bias = bias.map(|bias| self.vector(bias, shape[0]).and_then(|values| self.memory.vector(&values)));
        Ok(Linear { matrix: self.matrix(name, shape)?, bias: bias.transpose()? })
    }

    fn matrix(&self, name: TensorName, shape: [usize; 2]) -> Result<W::Matrix, ModelError> {
        self.memory.matrix(&self.take(name, &shape)?)
    }

    /// A matrix whose rows are heads that rotate.
    fn rotary(&self, name: TensorName, shape: [usize; 2]) -> Result<Tensor<'a>, ModelError> {
        Ok(to_half_split(self.source.rope_style(), self.take(name, &shape)?, self.hparams.head_dim))
    }

    fn rotary_vector(&self, name: TensorName, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.take(name, &[len])?;
        let tensor = to_half_split(self.source.rope_style(), tensor, self.hparams.head_dim);
        tensor.to_f32s(&self.source.display_name(name))
    }

    fn vector(&self, name: TensorName, len: usize) -> Result<Vec<f32>, ModelError> {
        self.take(name, &[len])?.to_f32s(&self.source.display_name(name))
    }

    fn take(&self, name: TensorName, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.source.required(name)?;
        tensor.expect_shape(&self.source.display_name(name), shape)?;
        Ok(tensor)
    }

    pub fn positions(&self, offset: u32) -> Result<W::Matrix, ModelError> {
        let rows = self.hparams.max_context + offset as usize;
        self.matrix(TensorName::PositionEmbedding, [rows, self.hparams.hidden])
    }
}
