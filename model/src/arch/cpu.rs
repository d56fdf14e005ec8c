//! The pass on the processor: SPMD, every worker of a region runs it.

use keepsake_kernels::ops::{self, Accumulate, Product};
use keepsake_kernels::{Activations, Buffer, Device, InputForms, KernelError, Matrix, RopeTable, Worker};

use super::decoder::Decoder;
use super::pass::{FeedForward, Linear, Memory, Norm, Pass, Projection, Rows, Weights};
use super::{Positions, Step};
use crate::config::HParams;
use crate::error::ModelError;
use crate::weights::Tensor;

/// Packed matrices, f32 vectors.
pub(crate) struct CpuWeights;

impl Weights for CpuWeights {
    type Matrix = Matrix;
    type Group = Vec<Matrix>;
    type Vector = Buffer;

    fn matrix_bytes(matrix: &Matrix) -> usize {
        matrix.bytes()
    }

    fn group_bytes(group: &Vec<Matrix>) -> usize {
        group.iter().map(Matrix::bytes).sum()
    }

    fn vector_bytes(vector: &Buffer) -> usize {
        size_of_val(vector.as_slice())
    }
}

impl Memory<CpuWeights> for Device {
    fn matrix(&self, tensor: &Tensor) -> Result<Matrix, ModelError> {
        Ok(Matrix::pack(self, tensor.dtype, tensor.shape[0], tensor.shape[1], &tensor.bytes)?)
    }

    fn group(&self, tensors: &[Tensor]) -> Result<Vec<Matrix>, ModelError> {
        tensors.iter().map(|tensor| self.matrix(tensor)).collect()
    }

    fn vector(&self, values: &[f32]) -> Result<Buffer, ModelError> {
        Ok(Buffer::from_slice(self, values)?)
    }
}

/// Scratch memory and tables of a model's passes.
pub(crate) struct CpuEngine {
    device: Device,
    rope: RopeTable,
    scratch: Scratch,
    vocab_size: usize,
    hidden: usize,
    num_heads: usize,
    head_dim: usize,
    num_kv_heads: usize,
}

/// Activations of one step, sized once for the largest; shapes are per row.
struct Scratch {
    /// The residual stream, `hidden`.
    x: Buffer,
    /// The residual stream of the sampled rows only, `hidden`.
    sampled_x: Buffer,
    /// `query_dim`
    q: Buffer,
    /// `kv_dim`
    k: Buffer,
    /// `kv_dim`
    v: Buffer,
    /// `query_dim`
    mixed: Buffer,
    /// `ffn`; also learned positions and outputs of layer norms, `hidden`.
    gate: Buffer,
    /// `ffn`
    up: Buffer,
    /// Whatever the next product reads.
    input: Activations,
    /// `vocab_size` for each sampled row; grows to the largest number of them seen.
    logits: Buffer,
}

impl CpuEngine {
    pub fn new(
        device: &Device,
        hparams: &HParams,
        decoder: &Decoder<CpuWeights>,
        max_rows: usize,
    ) -> Result<Self, ModelError> {
        let rows_of = |width: usize| match max_rows.checked_mul(width) {
            Some(len) => Ok(Buffer::zeros(device, len)?),
            None => Err(ModelError::Shape(format!("{max_rows} rows of {width} overflow"))),
        };
        let widest = hparams.hidden.max(hparams.query_dim()).max(hparams.ffn);
        let wide = hparams.ffn.max(hparams.hidden);
        let forms = InputForms::for_matrices(matrices(decoder));
        Ok(Self {
            device: device.clone(),
            rope: match hparams.arch.design().positions {
                Positions::Rotary => RopeTable::new(&hparams.rope_spec())?,
                Positions::Learned { .. } => RopeTable::identity(hparams.max_context),
            },
            scratch: Scratch {
                x: rows_of(hparams.hidden)?,
                sampled_x: rows_of(hparams.hidden)?,
                q: rows_of(hparams.query_dim())?,
                k: rows_of(hparams.kv_dim())?,
                v: rows_of(hparams.kv_dim())?,
                mixed: rows_of(hparams.query_dim())?,
                gate: rows_of(wide)?,
                up: rows_of(hparams.ffn)?,
                input: Activations::new(device, max_rows, widest, forms)?,
                logits: Buffer::zeros(device, hparams.vocab_size)?,
            },
            vocab_size: hparams.vocab_size,
            hidden: hparams.hidden,
            num_heads: hparams.num_heads,
            head_dim: hparams.head_dim,
            num_kv_heads: hparams.num_kv_heads,
        })
    }

    /// Logits of the sampled rows, `vocab_size` each.
    pub fn forward(&mut self, decoder: &Decoder<CpuWeights>, step: Step) -> Result<&[f32], ModelError> {
        let num_sampled = step.batch.sample_rows.len();
        let wanted = num_sampled * self.vocab_size;
        if self.scratch.logits.len() < wanted {
            self.scratch.logits = Buffer::zeros(&self.device, wanted)?;
        }
        let engine = &*self;
        self.device.run(|w| decoder.forward(&CpuPass { w, engine, step }, num_sampled))?;
        Ok(&self.scratch.logits.as_slice()[..wanted])
    }
}

fn matrices(decoder: &Decoder<CpuWeights>) -> impl Iterator<Item = &Matrix> {
    let layers = decoder.layers.iter().flat_map(|layer| {
        let feed_forward: Vec<&Matrix> = match &layer.feed_forward {
            FeedForward::SiluGated { gate_up, down } => gate_up.iter().chain([down]).collect(),
            FeedForward::Relu { up, down } => vec![&up.matrix, &down.matrix],
        };
        layer.projection.qkv.iter().chain([&layer.attention_output.matrix]).chain(feed_forward)
    });
    layers.chain([&decoder.token_embedding]).chain(&decoder.output)
}

struct CpuPass<'a> {
    w: &'a Worker<'a>,
    engine: &'a CpuEngine,
    step: Step<'a>,
}

impl CpuPass<'_> {
    fn scratch(&self) -> &Scratch {
        &self.engine.scratch
    }

    fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.step.batch.num_rows(),
            Rows::Sampled => self.step.batch.sample_rows.len(),
        }
    }

    fn x(&self, rows: Rows) -> &Buffer {
        match rows {
            Rows::All => &self.scratch().x,
            Rows::Sampled => &self.scratch().sampled_x,
        }
    }

    /// `x += linear(input)`
    fn add(&self, linear: &Linear<CpuWeights>, rows: Rows) -> Result<(), KernelError> {
        let x = self.x(rows);
        ops::matmul(self.w, &self.scratch().input, &linear.matrix, x, Accumulate::Add)?;
        match &linear.bias {
            Some(bias) => ops::add_bias(self.w, bias, 0, self.count(rows), linear.matrix.n(), x),
            None => Ok(()),
        }
    }
}

impl Pass for CpuPass<'_> {
    type Weights = CpuWeights;

    fn embed(&self, table: &Matrix, learned: Option<(&Matrix, u32)>) -> Result<(), KernelError> {
        let (batch, s) = (self.step.batch, self.scratch());
        ops::embedding(self.w, table, &batch.tokens, &s.x)?;
        let Some((learned, offset)) = learned else {
            return Ok(());
        };
        let rows: Vec<u32> = batch.positions.iter().map(|position| position + offset).collect();
        ops::embedding(self.w, learned, &rows, &s.gate)?;
        ops::add(self.w, &s.gate, rows.len() * learned.k(), &s.x)
    }

    fn norm(&self, norm: &Norm<CpuWeights>, rows: Rows) -> Result<(), KernelError> {
        let (x, count, dim, s) = (self.x(rows), self.count(rows), norm.weight.len(), self.scratch());
        match &norm.shift {
            None => ops::rms_norm_prepare(self.w, x, &norm.weight, norm.eps, count, dim, &s.input),
            Some(shift) => {
                ops::layer_norm(self.w, x, &norm.weight, shift, norm.eps, count, dim, &s.gate)?;
                ops::prepare(self.w, &s.gate, count, dim, &s.input)
            }
        }
    }

    fn write_kv(&self, layer: usize, projection: &Projection<CpuWeights>) -> Result<(), KernelError> {
        let (batch, s, engine) = (self.step.batch, self.scratch(), self.engine);
        let outputs = [&s.q, &s.k, &s.v];
        let products: Vec<Product> =
            projection.qkv.iter().zip(outputs).map(|(matrix, out)| Product { matrix, out }).collect();
        ops::matmul_many(self.w, &s.input, &products, Accumulate::Set)?;
        let rows = batch.num_rows();
        if let Some(bias) = &projection.bias {
            let mut offset = 0;
            for product in &products {
                ops::add_bias(self.w, bias, offset, rows, product.matrix.n(), product.out)?;
                offset += product.matrix.n();
            }
        }
        if let Some(Norm { weight, eps, .. }) = &projection.q_norm {
            ops::rms_norm(self.w, &s.q, weight, *eps, rows * engine.num_heads, engine.head_dim, &s.q)?;
        }
        if let Some(Norm { weight, eps, .. }) = &projection.k_norm {
            ops::rms_norm(self.w, &s.k, weight, *eps, rows * engine.num_kv_heads, engine.head_dim, &s.k)?;
        }
        ops::rope_and_write(
            self.w,
            &s.q,
            &s.k,
            &s.v,
            &batch.positions,
            &batch.slots,
            &engine.rope,
            self.step.pool,
            layer,
            engine.num_heads,
        )
    }

    fn attend(&self, layer: usize, rows: Rows) -> Result<(), KernelError> {
        let entries = match rows {
            Rows::All => &self.step.batch.entries,
            Rows::Sampled => self.step.sample_entries,
        };
        ops::attention(
            self.w,
            &self.scratch().q,
            self.step.pool,
            layer,
            entries,
            &self.step.batch.block_table,
            self.engine.num_heads,
            1.0 / (self.engine.head_dim as f32).sqrt(),
            &self.scratch().mixed,
        )
    }

    fn keep_sampled(&self) -> Result<(), KernelError> {
        let (s, sampled) = (self.scratch(), &self.step.batch.sample_rows);
        // q has served: its buffer takes the packed rows.
        ops::gather_rows(self.w, &s.mixed, sampled, self.engine.num_heads * self.engine.head_dim, &s.q)?;
        ops::gather_rows(self.w, &s.x, sampled, self.engine.hidden, &s.sampled_x)
    }

    fn add_attention(&self, output: &Linear<CpuWeights>, rows: Rows) -> Result<(), KernelError> {
        let s = self.scratch();
        let mixed = match rows {
            Rows::All => &s.mixed,
            Rows::Sampled => &s.q,
        };
        ops::prepare(self.w, mixed, self.count(rows), output.matrix.k(), &s.input)?;
        self.add(output, rows)
    }

    fn add_feed_forward(&self, feed_forward: &FeedForward<CpuWeights>, rows: Rows) -> Result<(), KernelError> {
        let (s, count) = (self.scratch(), self.count(rows));
        match feed_forward {
            FeedForward::SiluGated { gate_up, down } => {
                let outputs = [&s.gate, &s.up];
                let products: Vec<Product> =
                    gate_up.iter().zip(outputs).map(|(matrix, out)| Product { matrix, out }).collect();
                ops::matmul_many(self.w, &s.input, &products, Accumulate::Set)?;
                ops::silu_mul_prepare(self.w, &s.gate, &s.up, count, down.k(), &s.input)?;
                ops::matmul(self.w, &s.input, down, self.x(rows), Accumulate::Add)
            }
            FeedForward::Relu { up, down } => {
                let ffn = up.matrix.n();
                ops::matmul(self.w, &s.input, &up.matrix, &s.up, Accumulate::Set)?;
                if let Some(bias) = &up.bias {
                    ops::add_bias(self.w, bias, 0, count, ffn, &s.up)?;
                }
                ops::relu(self.w, count, ffn, &s.up)?;
                ops::prepare(self.w, &s.up, count, ffn, &s.input)?;
                self.add(down, rows)
            }
        }
    }

    fn logits(&self, output: &Matrix) -> Result<(), KernelError> {
        ops::matmul(self.w, &self.scratch().input, output, &self.scratch().logits, Accumulate::Set)
    }
}
