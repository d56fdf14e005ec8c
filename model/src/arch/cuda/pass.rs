//! The operations of a pass, enqueued on the engine's stream.

use half::bf16;
use keepsake_kernels::cuda::ops::{
    self, Activation, Addends, AttentionInputs, HeadNorms, PositionEmbedding, RopeInputs,
};
use keepsake_kernels::cuda::{CudaKvPool, DeviceBuffer, Event, Output, View, Weight};
use keepsake_kernels::ops::Accumulate;
use keepsake_kernels::KernelError;

use super::engine::CudaEngine;
use super::weights::CudaWeights;
use crate::arch::pass::{FeedForward, Linear, Norm, Pass, Projection, Rows};

/// One step's pass.
pub(super) struct CudaPass<'a> {
    pub engine: &'a CudaEngine,
    pub pool: &'a CudaKvPool,
    /// Attention of layer l waits for `layer_ready[l]`, if there are any.
    pub layer_ready: &'a [Event],
}

impl CudaPass<'_> {
    fn part(&self, range: &std::ops::Range<usize>) -> Result<View<'_, u32>, KernelError> {
        self.engine.inputs.device.slice(range.clone())
    }

    fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.engine.inputs.parts.tokens.len(),
            Rows::Sampled => self.engine.inputs.parts.sample_rows.len(),
        }
    }

    fn x(&self, rows: Rows) -> View<'_, f32> {
        match rows {
            Rows::All => self.engine.scratch.x.view(),
            Rows::Sampled => self.engine.scratch.sampled_x.view(),
        }
    }

    /// out = matrix(from)
    fn product(&self, from: View<bf16>, rows: usize, matrix: &Weight, out: View<bf16>) -> Result<(), KernelError> {
        self.engine.blas.matmul(&self.engine.stream, from, rows, matrix, Output::Bf16(out))
    }

    /// x += matrix(from) + bias
    fn add(
        &self,
        from: View<bf16>,
        matrix: &Weight,
        bias: Option<&DeviceBuffer<f32>>,
        rows: Rows,
    ) -> Result<(), KernelError> {
        let (engine, count, x) = (self.engine, self.count(rows), self.x(rows));
        engine.blas.matmul(&engine.stream, from, count, matrix, Output::F32(x, Accumulate::Add))?;
        match bias {
            Some(bias) => ops::add_bias(&engine.stream, x, bias.view(), count, matrix.n()),
            None => Ok(()),
        }
    }
}

impl Pass for CudaPass<'_> {
    type Weights = CudaWeights;

    fn embed(&self, table: &Weight, learned: Option<(&Weight, u32)>) -> Result<(), KernelError> {
        let parts = &self.engine.inputs.parts;
        let positions = self.part(&parts.positions)?;
        let learned = learned.map(|(table, offset)| PositionEmbedding { table, positions, offset });
        let (tokens, rows) = (self.part(&parts.tokens)?, self.count(Rows::All));
        let (drawn, fed) = (self.engine.scratch.drawn.view(), self.part(&parts.fed)?);
        ops::take_tokens(&self.engine.stream, drawn, fed, rows, tokens)?;
        ops::embedding(&self.engine.stream, table, tokens, learned, rows, self.x(Rows::All))
    }

    fn norm(&self, norm: &Norm<CudaWeights>, rows: Rows) -> Result<(), KernelError> {
        let (stream, x, count, dim) = (&self.engine.stream, self.x(rows), self.count(rows), self.engine.hidden);
        let (weight, input) = (norm.weight.view(), self.engine.scratch.input.view());
        match &norm.shift {
            None => ops::rms_norm(stream, x, Addends::none(), weight, norm.eps, count, dim, input),
            Some(shift) => {
                ops::layer_norm(stream, x, Addends::none(), weight, shift.view(), norm.eps, count, dim, input)
            }
        }
    }

    fn write_kv(&self, layer: usize, projection: &Projection<CudaWeights>) -> Result<(), KernelError> {
        let (engine, rows) = (self.engine, self.count(Rows::All));
        let s = &engine.scratch;
        self.product(s.input.view(), rows, &projection.qkv, s.qkv.view())?;
        let inputs = RopeInputs {
            qkv: s.qkv.view(),
            bias: optional(projection.bias.as_ref()),
            norms: HeadNorms {
                q: optional(projection.q_norm.as_ref().map(|norm| &norm.weight)),
                k: optional(projection.k_norm.as_ref().map(|norm| &norm.weight)),
                eps: projection.q_norm.as_ref().map_or(0.0, |norm| norm.eps),
            },
            positions: self.part(&engine.inputs.parts.positions)?,
            slots: self.part(&engine.inputs.parts.slots)?,
            table: engine.rope.as_ref(),
        };
        ops::rope_and_write(&engine.stream, &inputs, rows, engine.num_heads, self.pool, layer, s.q.view())
    }

    fn attend(&self, layer: usize, rows: Rows) -> Result<(), KernelError> {
        let (engine, parts) = (self.engine, &self.engine.inputs.parts);
        if let Some(ready) = self.layer_ready.get(layer) {
            engine.stream.wait(ready)?;
        }
        let which = usize::from(rows == Rows::Sampled);
        let inputs = AttentionInputs {
            block_table: self.part(&parts.block_table)?,
            decode: self.part(&parts.decode[which])?,
            tiles: self.part(&parts.tiles[which])?,
        };
        let (q, mixed) = (engine.scratch.q.view(), engine.scratch.mixed.view());
        let all = self.count(Rows::All);
        engine.attention.run(&engine.stream, self.pool, layer, q, &inputs, all, engine.scale, mixed)
    }

    fn keep_sampled(&self) -> Result<(), KernelError> {
        let (engine, s) = (self.engine, &self.engine.scratch);
        let (all, sampled) = (self.count(Rows::All), self.count(Rows::Sampled));
        let indices = self.part(&engine.inputs.parts.sample_rows)?;
        let width = engine.num_heads * engine.head_dim;
        let (x, kept) = (s.x.view(), s.sampled_x.view());
        ops::gather_rows(&engine.stream, x, all, indices, sampled, engine.hidden, kept)?;
        let (mixed, kept) = (s.mixed.view(), s.sampled_mixed.view());
        ops::gather_rows(&engine.stream, mixed, all, indices, sampled, width, kept)
    }

    fn add_attention(&self, output: &Linear<CudaWeights>, rows: Rows) -> Result<(), KernelError> {
        let mixed = match rows {
            Rows::All => &self.engine.scratch.mixed,
            Rows::Sampled => &self.engine.scratch.sampled_mixed,
        };
        self.add(mixed.view(), &output.matrix, output.bias.as_ref(), rows)
    }

    fn add_feed_forward(&self, feed_forward: &FeedForward<CudaWeights>, rows: Rows) -> Result<(), KernelError> {
        let (engine, s, count) = (self.engine, &self.engine.scratch, self.count(rows));
        let (wide, narrow) = (s.wide.view(), s.narrow.view());
        match feed_forward {
            FeedForward::SiluGated { gate_up, down } => {
                self.product(s.input.view(), count, gate_up, wide)?;
                ops::silu_mul(&engine.stream, wide, count, engine.ffn, narrow)?;
                self.add(narrow, down, None, rows)
            }
            FeedForward::Relu { up, down } => {
                self.product(s.input.view(), count, &up.matrix, narrow)?;
                let bias = optional(up.bias.as_ref());
                ops::bias_activate(&engine.stream, narrow, bias, Activation::Relu, count, engine.ffn)?;
                self.add(narrow, &down.matrix, down.bias.as_ref(), rows)
            }
        }
    }

    fn logits(&self, output: &Weight) -> Result<(), KernelError> {
        let (engine, count) = (self.engine, self.count(Rows::Sampled));
        let logits = Output::F32(engine.scratch.logits.view(), Accumulate::Set);
        engine.blas.matmul(&engine.stream, engine.scratch.input.view(), count, output, logits)
    }
}

fn optional(vector: Option<&DeviceBuffer<f32>>) -> View<'_, f32> {
    match vector {
        Some(vector) => vector.view(),
        None => View::none(),
    }
}
