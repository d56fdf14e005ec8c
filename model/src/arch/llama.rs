//! Llama: RMS norm, rotary attention with grouped K/V heads, SiLU-gated feed-forward, no biases.

use keepsake_kernels::ops::{self, Accumulate, Product};
use keepsake_kernels::{Buffer, Device, InputForms, KernelError, Matrix, Worker};
use rayon::prelude::*;

use super::{Scratch, Step};
use crate::config::HParams;
use crate::error::ModelError;
use crate::weights::rope_rows::to_half_split;
use crate::weights::{LayerTensor, Tensor, TensorName, WeightSource};

pub(crate) struct Llama {
    token_embedding: Matrix,
    layers: Vec<Layer>,
    output_norm: Buffer,
    /// `None`: the token embedding.
    output: Option<Matrix>,
    rms_eps: f32,
    num_heads: usize,
    head_dim: usize,
}

struct Layer {
    attention_norm: Buffer,
    query: Matrix,
    key: Matrix,
    value: Matrix,
    attention_output: Matrix,
    ffn_norm: Buffer,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Llama {
    pub fn load(source: &dyn WeightSource, hparams: &HParams, device: &Device) -> Result<Self, ModelError> {
        let loader = Loader { source, hparams, device };
        let table = [hparams.vocab_size, hparams.hidden];
        let layers = (0..hparams.num_layers).into_par_iter();
        Ok(Self {
            token_embedding: loader.matrix(TensorName::TokenEmbedding, table)?,
            layers: layers.map(|index| loader.layer(index)).collect::<Result<_, _>>()?,
            output_norm: loader.norm(TensorName::OutputNorm)?,
            output: match hparams.tied_embeddings {
                true => None,
                false => Some(loader.matrix(TensorName::Output, table)?),
            },
            rms_eps: hparams.rms_eps,
            num_heads: hparams.num_heads,
            head_dim: hparams.head_dim,
        })
    }

    pub fn bytes(&self) -> u64 {
        let norm_bytes = |norm: &Buffer| size_of_val(norm.as_slice());
        let matrices: usize = self.matrices().map(Matrix::bytes).sum();
        let norms: usize =
            self.layers.iter().map(|layer| norm_bytes(&layer.attention_norm) + norm_bytes(&layer.ffn_norm)).sum();
        (matrices + norms + norm_bytes(&self.output_norm)) as u64
    }

    pub fn input_forms(&self) -> InputForms {
        InputForms::for_matrices(self.matrices())
    }

    /// Called by every worker. `scratch.logits` then holds a row for each sampled one.
    pub fn forward(&self, w: &Worker, step: &Step, scratch: &Scratch) -> Result<(), KernelError> {
        let s = scratch;
        let batch = step.batch;
        let num_sampled = batch.sample_rows.len();
        ops::embedding(w, &self.token_embedding, &batch.tokens, &s.x)?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.write_kv(w, index, layer, step, s)?;
            if index + 1 < self.layers.len() {
                let rows = batch.num_rows();
                self.attend(w, index, &batch.entries, step, s)?;
                self.finish_layer(w, layer, rows, &s.attended, &s.x, s)?;
                continue;
            }
            // Nothing reads the last layer's output but the logits of the sampled rows.
            if num_sampled == 0 {
                return Ok(());
            }
            self.attend(w, index, step.sample_entries, step, s)?;
            let (query_dim, hidden) = (layer.query.n(), layer.query.k());
            ops::gather_rows(w, &s.attended, &batch.sample_rows, query_dim, &s.q)?;
            ops::gather_rows(w, &s.x, &batch.sample_rows, hidden, &s.sampled_x)?;
            self.finish_layer(w, layer, num_sampled, &s.q, &s.sampled_x, s)?;
        }
        let output = self.output.as_ref().unwrap_or(&self.token_embedding);
        self.norm_into_input(w, &s.sampled_x, &self.output_norm, num_sampled, s)?;
        ops::matmul(w, &s.input, output, &s.logits, Accumulate::Set)
    }

    /// Q, K and V of every row; K and V go to their slots.
    fn write_kv(&self, w: &Worker, index: usize, layer: &Layer, step: &Step, s: &Scratch) -> Result<(), KernelError> {
        let batch = step.batch;
        self.norm_into_input(w, &s.x, &layer.attention_norm, batch.num_rows(), s)?;
        let products = [product(&layer.query, &s.q), product(&layer.key, &s.k), product(&layer.value, &s.v)];
        ops::matmul_many(w, &s.input, &products, Accumulate::Set)?;
        ops::rope_and_write(
            w,
            &s.q,
            &s.k,
            &s.v,
            &batch.positions,
            &batch.slots,
            step.rope,
            step.pool,
            index,
            self.num_heads,
        )
    }

    fn attend(
        &self,
        w: &Worker,
        index: usize,
        entries: &[keepsake_kernels::Entry],
        step: &Step,
        s: &Scratch,
    ) -> Result<(), KernelError> {
        ops::attention(
            w,
            &s.q,
            step.pool,
            index,
            entries,
            &step.batch.block_table,
            self.num_heads,
            1.0 / (self.head_dim as f32).sqrt(),
            &s.attended,
        )
    }

    /// Attention output and feed-forward, both added to `x`.
    fn finish_layer(
        &self,
        w: &Worker,
        layer: &Layer,
        rows: usize,
        attended: &Buffer,
        x: &Buffer,
        s: &Scratch,
    ) -> Result<(), KernelError> {
        ops::prepare(w, attended, rows, layer.attention_output.k(), &s.input)?;
        ops::matmul(w, &s.input, &layer.attention_output, x, Accumulate::Add)?;
        self.norm_into_input(w, x, &layer.ffn_norm, rows, s)?;
        let products = [product(&layer.gate, &s.gate), product(&layer.up, &s.up)];
        ops::matmul_many(w, &s.input, &products, Accumulate::Set)?;
        ops::silu_mul_prepare(w, &s.gate, &s.up, rows, layer.down.k(), &s.input)?;
        ops::matmul(w, &s.input, &layer.down, x, Accumulate::Add)
    }

    fn norm_into_input(
        &self,
        w: &Worker,
        x: &Buffer,
        weight: &Buffer,
        rows: usize,
        s: &Scratch,
    ) -> Result<(), KernelError> {
        ops::rms_norm_prepare(w, x, weight, self.rms_eps, rows, weight.len(), &s.input)
    }

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let layers = self.layers.iter().flat_map(|layer| {
            [&layer.query, &layer.key, &layer.value, &layer.attention_output, &layer.gate, &layer.up, &layer.down]
        });
        layers.chain([&self.token_embedding]).chain(&self.output)
    }
}

fn product<'a>(matrix: &'a Matrix, out: &'a Buffer) -> Product<'a> {
    Product { matrix, out }
}

/// Takes tensors from a source, checks their shapes and packs them.
struct Loader<'a> {
    source: &'a dyn WeightSource,
    hparams: &'a HParams,
    device: &'a Device,
}

impl Loader<'_> {
    fn layer(&self, index: usize) -> Result<Layer, ModelError> {
        let name = |tensor| TensorName::Layer(index, tensor);
        let HParams { hidden, ffn, .. } = *self.hparams;
        let query_dim = self.hparams.query_dim();
        let kv_dim = self.hparams.kv_dim();
        Ok(Layer {
            attention_norm: self.norm(name(LayerTensor::AttentionNorm))?,
            query: self.rotary_matrix(name(LayerTensor::Query), [query_dim, hidden])?,
            key: self.rotary_matrix(name(LayerTensor::Key), [kv_dim, hidden])?,
            value: self.matrix(name(LayerTensor::Value), [kv_dim, hidden])?,
            attention_output: self.matrix(name(LayerTensor::AttentionOutput), [hidden, query_dim])?,
            ffn_norm: self.norm(name(LayerTensor::FfnNorm))?,
            gate: self.matrix(name(LayerTensor::Gate), [ffn, hidden])?,
            up: self.matrix(name(LayerTensor::Up), [ffn, hidden])?,
            down: self.matrix(name(LayerTensor::Down), [hidden, ffn])?,
        })
    }

    fn norm(&self, name: TensorName) -> Result<Buffer, ModelError> {
        let tensor = self.take(name, &[self.hparams.hidden])?;
        let values = tensor.to_f32s(&self.source.display_name(name))?;
        Ok(Buffer::from_slice(self.device, &values)?)
    }

    fn matrix(&self, name: TensorName, shape: [usize; 2]) -> Result<Matrix, ModelError> {
        let tensor = self.take(name, &shape)?;
        self.pack(&tensor, shape)
    }

    fn rotary_matrix(&self, name: TensorName, shape: [usize; 2]) -> Result<Matrix, ModelError> {
        let tensor = self.take(name, &shape)?;
        let style = self.source.rope_style();
        self.pack(&to_half_split(style, tensor, self.hparams.head_dim), shape)
    }

    fn take(&self, name: TensorName, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.source.required(name)?;
        tensor.expect_shape(&self.source.display_name(name), shape)?;
        Ok(tensor)
    }

    fn pack(&self, tensor: &Tensor, [n, k]: [usize; 2]) -> Result<Matrix, ModelError> {
        let matrix = Matrix::pack(self.device, tensor.dtype, n, k, &tensor.bytes)?;
        Ok(matrix)
    }
}
