//! Runs steps: owns the scratch memory of a forward pass and hands out logits.

use std::sync::Arc;

use keepsake_kernels::{Device, Entry, KvPool};

#[cfg(feature = "cuda")]
use keepsake_kernels::cuda::{ops::SamplingRow, Event};

use crate::arch::{CpuEngine, Network, Step};
#[cfg(feature = "cuda")]
use crate::arch::{CudaEngine, Submission};
use crate::batch::{Batch, Limits};
use crate::error::ModelError;
use crate::model::Model;

/// One model on one device over one pool. On the CPU a step is one parallel region, on a GPU one sequence of operations
/// on a stream.
pub struct Runner {
    model: Arc<Model>,
    pool: Arc<KvPool>,
    max_rows: usize,
    engine: Engine,
}

/// Activations and tables of a device's passes.
enum Engine {
    Cpu(Box<CpuEngine>),
    #[cfg(feature = "cuda")]
    Cuda(Box<CudaEngine>),
}

/// Logits of a step's sampled rows, in their order.
pub struct Logits<'a> {
    values: &'a [f32],
    vocab_size: usize,
}

impl Runner {
    /// `max_rows` bounds a step's rows and with them the scratch memory.
    pub fn new(model: Arc<Model>, device: Device, pool: Arc<KvPool>, max_rows: usize) -> Result<Self, ModelError> {
        let chunk_tokens = pool.layout().chunk_tokens;
        if *pool.layout() != model.kv_layout(chunk_tokens) {
            return Err(ModelError::Shape(format!(
                "the pool's layout {:?} is not the model's {:?}",
                pool.layout(),
                model.kv_layout(chunk_tokens)
            )));
        }
        let hparams = &model.hparams;
        let engine = match &model.network {
            Network::Cpu(decoder) => Engine::Cpu(Box::new(CpuEngine::new(&device, hparams, decoder, max_rows)?)),
            #[cfg(feature = "cuda")]
            Network::Cuda(_) => Engine::Cuda(Box::new(CudaEngine::new(hparams, &pool, max_rows)?)),
        };
        Ok(Self { engine, model, pool, max_rows })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Writes K/V of every row to its slot and computes the logits of the sampled rows. A refused
    /// batch has changed nothing. Blocks that the batch names must not be used by others meanwhile.
    pub fn forward(&mut self, batch: &Batch) -> Result<Logits<'_>, ModelError> {
        self.validate(batch)?;
        let vocab_size = self.model.hparams.vocab_size;
        let sample_entries = sample_entries(batch);
        let step = Step { batch, sample_entries: &sample_entries, pool: &self.pool };
        let values = match (&mut self.engine, &self.model.network) {
            (Engine::Cpu(engine), Network::Cpu(decoder)) => engine.forward(decoder, step)?,
            #[cfg(feature = "cuda")]
            (Engine::Cuda(engine), Network::Cuda(decoder)) => engine.forward(decoder, step)?,
            #[cfg(feature = "cuda")]
            _ => unreachable!("the engine was made for the network"),
        };
        Ok(Logits { values, vocab_size })
    }

    /// Enqueues a step on a GPU and returns: the device draws the next token of each sampled row, `sampling[i]` saying how for
    /// `sample_rows[i]`, and logits never leave it. Tokens come from [`Runner::collect`], in order; at most two steps are in
    /// flight. `fed` names rows whose token the step submitted before draws: (row, index of its sample); what the batch
    /// says there is not read. Attention of layer l waits for `layer_ready[l]`, if there are any.
    #[cfg(feature = "cuda")]
    pub fn submit(
        &mut self,
        batch: &Batch,
        sampling: &[SamplingRow],
        fed: &[(u32, u32)],
        layer_ready: &[Event],
    ) -> Result<(), ModelError> {
        self.validate(batch)?;
        let sample_entries = sample_entries(batch);
        let step = Step { batch, sample_entries: &sample_entries, pool: &self.pool };
        match (&mut self.engine, &self.model.network) {
            (Engine::Cuda(engine), Network::Cuda(decoder)) => {
                engine.submit(decoder, step, Submission { sampling, fed, layer_ready })
            }
            _ => Err(ModelError::Batch("the CPU runs one step at a time; use `forward`".to_owned())),
        }
    }

    /// Waits for the oldest submitted step: its sampled rows' tokens, `u32::MAX` where no logit was finite.
    #[cfg(feature = "cuda")]
    pub fn collect(&mut self) -> Result<Vec<u32>, ModelError> {
        match &mut self.engine {
            Engine::Cuda(engine) => engine.collect(),
            Engine::Cpu(_) => Err(ModelError::Batch("no step is in flight".to_owned())),
        }
    }

    fn validate(&self, batch: &Batch) -> Result<(), ModelError> {
        let limits = Limits {
            max_rows: self.max_rows,
            num_blocks: self.pool.num_blocks(),
            chunk_tokens: self.pool.layout().chunk_tokens,
        };
        batch.validate(&self.model.hparams, limits)
    }
}

impl Logits<'_> {
    pub fn num_rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// Logits of the batch's `sample_rows[index]`, one a token of the vocabulary.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..(index + 1) * self.vocab_size]
    }
}

/// Entries that cover the sampled rows only: runs of neighbours inside each entry.
fn sample_entries(batch: &Batch) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut sampled = batch.sample_rows.iter().copied().peekable();
    for entry in &batch.entries {
        let end = entry.first_row + entry.num_rows;
        let mut previous = None;
        while let Some(row) = sampled.next_if(|&row| row < end) {
            match entries.last_mut() {
                Some(run) if previous.is_some_and(|previous| previous + 1 == row) => {
                    run.num_rows += 1;
                }
                _ => entries.push(Entry {
                    first_row: row,
                    num_rows: 1,
                    first_position: entry.first_position + row - entry.first_row,
                    ..*entry
                }),
            }
            previous = Some(row);
        }
    }
    entries
}
