//! A decoder-only transformer: its weights, and its forward pass over what a device can do.

use super::loader::Loader;
use super::pass::{FeedForward, Linear, Memory, Norm, Pass, Projection, Rows, Weights};
use super::Positions;
use crate::config::HParams;
use crate::error::ModelError;
use crate::weights::WeightSource;
use keepsake_kernels::KernelError;

pub(crate) struct Decoder<W: Weights> {
    pub(super) token_embedding: W::Matrix,
    /// Learned positions and the row of position 0.
    pub(super) positions: Option<(W::Matrix, u32)>,
    pub(super) layers: Vec<Layer<W>>,
    pub(super) output_norm: Norm<W>,
    /// `None`: the token embedding.
    pub(super) output: Option<W::Matrix>,
}

pub(super) struct Layer<W: Weights> {
    pub attention_norm: Norm<W>,
    pub projection: Projection<W>,
    pub attention_output: Linear<W>,
    pub ffn_norm: Norm<W>,
    pub feed_forward: FeedForward<W>,
}

impl<W: Weights> Decoder<W> {
    pub fn load(source: &dyn WeightSource, hparams: &HParams, memory: &impl Memory<W>) -> Result<Self, ModelError> {
        let loader = Loader::new(source, hparams, memory);
        Ok(Self {
            token_embedding: loader.token_embedding()?,
            positions: match hparams.arch.design().positions {
                Positions::Rotary => None,
                Positions::Learned { offset } => Some((loader.positions(offset)?, offset)),
            },
            layers: loader.layers()?,
            output_norm: loader.output_norm()?,
            output: loader.output()?,
        })
    }

    /// The whole pass. On the CPU every worker of a region calls it.
    pub fn forward(&self, pass: &impl Pass<Weights = W>, num_sampled: usize) -> Result<(), KernelError> {
        pass.embed(&self.token_embedding, self.positions.as_ref().map(|(table, offset)| (table, *offset)))?;
        for (index, layer) in self.layers.iter().enumerate() {
            pass.norm(&layer.attention_norm, Rows::All)?;
            pass.write_kv(index, &layer.projection)?;
            let mut rows = Rows::All;
            if index + 1 == self.layers.len() {
                // Nothing reads the last layer's output but the logits of the sampled rows.
                if num_sampled == 0 {
                    return Ok(());
                }
                rows = Rows::Sampled;
            }
            pass.attend(index, rows)?;
            if rows == Rows::Sampled {
                pass.keep_sampled()?;
            }
            pass.add_attention(&layer.attention_output, rows)?;
            pass.norm(&layer.ffn_norm, rows)?;
            pass.add_feed_forward(&layer.feed_forward, rows)?;
        }
        pass.norm(&self.output_norm, Rows::Sampled)?;
        pass.logits(self.output.as_ref().unwrap_or(&self.token_embedding))
    }

    pub fn bytes(&self) -> u64 {
        let optional = |vector: &Option<W::Vector>| vector.as_ref().map_or(0, W::vector_bytes);
        let norm = |norm: &Norm<W>| W::vector_bytes(&norm.weight) + optional(&norm.shift);
        let linear = |linear: &Linear<W>| W::matrix_bytes(&linear.matrix) + optional(&linear.bias);
        let layer = |layer: &Layer<W>| {
            let projection = &layer.projection;
            let feed_forward = match &layer.feed_forward {
                FeedForward::SiluGated { gate_up, down } => W::group_bytes(gate_up) + W::matrix_bytes(down),
                FeedForward::Relu { up, down } => linear(up) + linear(down),
            };
            norm(&layer.attention_norm)
                + W::group_bytes(&projection.qkv)
                + optional(&projection.bias)
                + projection.q_norm.as_ref().map_or(0, norm)
                + projection.k_norm.as_ref().map_or(0, norm)
                + linear(&layer.attention_output)
                + norm(&layer.ffn_norm)
                + feed_forward
        };
        let tables = W::matrix_bytes(&self.token_embedding)
            + self.positions.as_ref().map_or(0, |(table, _)| W::matrix_bytes(table))
            + self.output.as_ref().map_or(0, W::matrix_bytes);
        let layers: usize = self.layers.iter().map(layer).sum();
        (tables + layers + norm(&self.output_norm)) as u64
    }
}
