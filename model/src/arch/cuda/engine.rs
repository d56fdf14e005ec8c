//! What a model's steps on a GPU need beside its weights: a stream, scratch memory, a step's numbers, graphs, results.

use std::collections::{HashMap, VecDeque};

use half::bf16;
use keepsake_kernels::cuda::ops::{self, Attention, AttentionPlan, CudaRopeTable, SamplingRow};
use keepsake_kernels::cuda::{Blas, DeviceBuffer, Event, Graph, Output, PinnedBuffer, Stream, Weight};
use keepsake_kernels::ops::Accumulate;
use keepsake_kernels::{KernelError, KvPool, RopeTable};

use super::pass::CudaPass;
use super::weights::CudaWeights;
use crate::arch::decoder::Decoder;
use crate::arch::pass::FeedForward;
use crate::arch::{Positions, Step};
use crate::config::HParams;
use crate::error::ModelError;

/// Row counts that decode steps are padded to, each with a graph of its own.
const BUCKETS: [usize; 18] = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256];
/// Parts of the step's inputs begin at multiples of as many words.
const ALIGN_WORDS: usize = 8;
/// A slot that no pool has: a padding row writes no K/V.
const NO_SLOT: u32 = u32::MAX;
const ENTRY_WORDS: usize = 5;
/// A row whose token the host knows.
const KNOWN_TOKEN: u32 = u32::MAX;
/// Steps that are enqueued before the first of them has to be collected.
const MAX_IN_FLIGHT: usize = 2;

/// A stream, scratch memory and tables of a model's passes.
pub(crate) struct CudaEngine {
    pub(super) stream: Stream,
    pub(super) blas: Blas,
    pub(super) attention: Attention,
    /// `None`: positions are learned.
    pub(super) rope: Option<CudaRopeTable>,
    pub(super) scratch: Scratch,
    pub(super) inputs: Inputs,
    /// Two, used in turn.
    results: [StepResult; MAX_IN_FLIGHT],
    /// Indices into `results`, the oldest first, and their numbers of tokens.
    in_flight: VecDeque<(usize, usize)>,
    next_result: usize,
    /// Tokens that the last submitted step drew.
    num_drawn: usize,
    /// By bucket; dropped when what they point to moves.
    graphs: HashMap<usize, Graph>,
    vocab_size: usize,
    pub(super) hidden: usize,
    pub(super) ffn: usize,
    pub(super) num_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
    max_rows: usize,
}

/// Activations of one step, sized once for the largest; shapes are per row.
pub(super) struct Scratch {
    /// The residual stream, `hidden`, and that of the sampled rows.
    pub(super) x: DeviceBuffer<f32>,
    pub(super) sampled_x: DeviceBuffer<f32>,
    /// Whatever the next product reads, `hidden`.
    pub(super) input: DeviceBuffer<bf16>,
    pub(super) qkv: DeviceBuffer<bf16>,
    pub(super) q: DeviceBuffer<bf16>,
    /// What attention mixed, `query_dim`, and that of the sampled rows.
    pub(super) mixed: DeviceBuffer<bf16>,
    pub(super) sampled_mixed: DeviceBuffer<bf16>,
    /// gate and up side by side, `2 ffn`.
    pub(super) wide: DeviceBuffer<bf16>,
    pub(super) narrow: DeviceBuffer<bf16>,
    /// `vocab_size` for each sampled row, on either side; grow to the largest number of them seen.
    pub(super) logits: DeviceBuffer<f32>,
    pub(super) host_logits: PinnedBuffer<f32>,
    /// What the last submitted step drew; the next one may read it.
    pub(super) drawn: DeviceBuffer<u32>,
}

/// Where a step's tokens arrive.
struct StepResult {
    tokens: PinnedBuffer<u32>,
    arrived: Event,
}

/// How a step is sampled, and what it waits for.
#[derive(Clone, Copy)]
pub(crate) struct Submission<'a> {
    /// One for each of the batch's sample rows.
    pub sampling: &'a [SamplingRow],
    /// Rows whose token is one that the step submitted before draws: (row, index of its sample).
    pub fed: &'a [(u32, u32)],
    /// Attention of layer l waits for `layer_ready[l]`; empty: nothing is being loaded.
    pub layer_ready: &'a [Event],
}

/// The numbers of a step: one pinned array (two, used in turn), one on the device, one copy.
pub(super) struct Inputs {
    pub(super) host: [PinnedBuffer<u32>; MAX_IN_FLIGHT],
    pub(super) device: DeviceBuffer<u32>,
    pub(super) parts: Parts,
}

/// Where each part of the inputs lies, in words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) tokens: std::ops::Range<usize>,
    pub(super) positions: std::ops::Range<usize>,
    pub(super) slots: std::ops::Range<usize>,
    pub(super) sample_rows: std::ops::Range<usize>,
    /// Where a row's token comes from, see `KNOWN_TOKEN`.
    pub(super) fed: std::ops::Range<usize>,
    pub(super) sampling: std::ops::Range<usize>,
    /// Entries of one row and tiles of the others, for all rows, then for the sampled ones.
    pub(super) decode: [std::ops::Range<usize>; 2],
    pub(super) tiles: [std::ops::Range<usize>; 2],
    /// Last: its length changes most.
    pub(super) block_table: std::ops::Range<usize>,
}

impl CudaEngine {
    pub fn new(hparams: &HParams, pool: &KvPool, max_rows: usize) -> Result<Self, ModelError> {
        let Some(pool) = pool.cuda() else {
            return Err(ModelError::Shape("the model is on a GPU, the K/V pool is not".to_owned()));
        };
        let context = pool.context();
        let rows_of = |width: usize| max_rows.saturating_mul(width);
        let qkv_dim = hparams.query_dim() + 2 * hparams.kv_dim();
        let scratch = Scratch {
            x: DeviceBuffer::new(context, "activations", rows_of(hparams.hidden))?,
            sampled_x: DeviceBuffer::new(context, "activations", rows_of(hparams.hidden))?,
            input: DeviceBuffer::new(context, "activations", rows_of(hparams.hidden))?,
            qkv: DeviceBuffer::new(context, "activations", rows_of(qkv_dim))?,
            q: DeviceBuffer::new(context, "activations", rows_of(hparams.query_dim()))?,
            // Zeros: a padding row's would otherwise be whatever was there.
            mixed: DeviceBuffer::zeros(context, "activations", rows_of(hparams.query_dim()))?,
            sampled_mixed: DeviceBuffer::new(context, "activations", rows_of(hparams.query_dim()))?,
            wide: DeviceBuffer::new(context, "activations", rows_of(2 * hparams.ffn))?,
            narrow: DeviceBuffer::new(context, "activations", rows_of(hparams.ffn))?,
            logits: DeviceBuffer::new(context, "logits", hparams.vocab_size)?,
            host_logits: PinnedBuffer::new(context, "logits", hparams.vocab_size)?,
            drawn: DeviceBuffer::zeros(context, "drawn tokens", max_rows)?,
        };
        let rope = match hparams.arch.design().positions {
            Positions::Rotary => Some(CudaRopeTable::new(context, &RopeTable::new(&hparams.rope_spec())?)?),
            Positions::Learned { .. } => None,
        };
        Ok(Self {
            stream: Stream::new(context)?,
            blas: Blas::new(context)?,
            attention: Attention::new(pool, hparams.num_heads, max_rows)?,
            rope,
            scratch,
            inputs: Inputs {
                host: two(|| PinnedBuffer::new(context, "a step's inputs", ALIGN_WORDS))?,
                device: DeviceBuffer::new(context, "a step's inputs", ALIGN_WORDS)?,
                parts: Parts::default(),
            },
            results: two(|| {
                Ok(StepResult {
                    tokens: PinnedBuffer::new(context, "drawn tokens", max_rows)?,
                    arrived: Event::new(context)?,
                })
            })?,
            in_flight: VecDeque::new(),
            next_result: 0,
            num_drawn: 0,
            graphs: HashMap::new(),
            vocab_size: hparams.vocab_size,
            hidden: hparams.hidden,
            ffn: hparams.ffn,
            num_heads: hparams.num_heads,
            head_dim: hparams.head_dim,
            scale: 1.0 / (hparams.head_dim as f32).sqrt(),
            max_rows,
        })
    }

    /// Logits of the sampled rows, `vocab_size` each, on the host. No other step is in flight.
    pub fn forward(&mut self, decoder: &Decoder<CudaWeights>, step: Step) -> Result<&[f32], ModelError> {
        if !self.in_flight.is_empty() {
            return Err(ModelError::Batch("a submitted step has not been collected".to_owned()));
        }
        let wanted = step.batch.sample_rows.len() * self.vocab_size;
        if self.scratch.host_logits.len() < wanted {
            self.scratch.host_logits = PinnedBuffer::new(self.stream.context(), "logits", wanted)?;
        }
        self.enqueue(decoder, step, Submission { sampling: &[], fed: &[], layer_ready: &[] })?;
        self.stream.download(self.scratch.logits.slice(0..wanted)?, &self.scratch.host_logits, 0)?;
        self.stream.synchronize()?;
        Ok(&self.scratch.host_logits.as_slice()[..wanted])
    }

    /// Enqueues a step and returns; its tokens come from [`CudaEngine::collect`]. At most two steps are in flight.
    pub fn submit(
        &mut self,
        decoder: &Decoder<CudaWeights>,
        step: Step,
        submission: Submission,
    ) -> Result<(), ModelError> {
        let count = step.batch.sample_rows.len();
        let Submission { sampling, fed, .. } = submission;
        if sampling.len() != count {
            return Err(ModelError::Batch(format!("{} rows to sample, {count} sample rows", sampling.len())));
        }
        if self.in_flight.len() == MAX_IN_FLIGHT {
            return Err(ModelError::Batch(format!("{MAX_IN_FLIGHT} steps are in flight")));
        }
        let rows = step.batch.num_rows();
        if let Some((row, sample)) =
            fed.iter().find(|(row, sample)| *row as usize >= rows || *sample as usize >= self.num_drawn)
        {
            return Err(ModelError::Batch(format!("row {row} of {rows} takes token {sample} of {}", self.num_drawn)));
        }
        self.enqueue(decoder, step, submission)?;
        let drawn = self.scratch.drawn.slice(0..count)?;
        let params = self.inputs.device.slice(self.inputs.parts.sampling.clone())?;
        ops::sample(&self.stream, self.scratch.logits.view(), self.vocab_size, SamplingRow::view_of(params)?, drawn)?;
        let result = &self.results[self.next_result];
        self.stream.download(drawn, &result.tokens, 0)?;
        self.stream.record(&result.arrived)?;
        self.in_flight.push_back((self.next_result, count));
        self.next_result = (self.next_result + 1) % MAX_IN_FLIGHT;
        self.num_drawn = count;
        Ok(())
    }

    /// Waits for the oldest submitted step: its sampled rows' tokens.
    pub fn collect(&mut self) -> Result<Vec<u32>, ModelError> {
        let Some((index, count)) = self.in_flight.pop_front() else {
            return Err(ModelError::Batch("no step is in flight".to_owned()));
        };
        let result = &self.results[index];
        result.arrived.synchronize()?;
        Ok(result.tokens.as_slice()[..count].to_vec())
    }

    /// Enqueues the pass. The host's inputs are free again once the stream has been waited for.
    fn enqueue(
        &mut self,
        decoder: &Decoder<CudaWeights>,
        step: Step,
        submission: Submission,
    ) -> Result<(), ModelError> {
        let batch = step.batch;
        let only_decodes = batch.entries.iter().all(|entry| entry.num_rows == 1);
        let all_sampled = batch.sample_rows.len() == batch.num_rows();
        let layer_ready = submission.layer_ready;
        let bucket = BUCKETS.into_iter().find(|&bucket| bucket >= batch.num_rows() && bucket <= self.max_rows);
        let bucket = bucket.filter(|_| only_decodes && all_sampled && layer_ready.is_empty());
        self.take_inputs(step, submission, bucket.unwrap_or(batch.num_rows()))?;
        let num_sampled = self.inputs.parts.sample_rows.len();
        if self.scratch.logits.len() < num_sampled * self.vocab_size {
            self.graphs.clear();
            self.scratch.logits = DeviceBuffer::new(self.stream.context(), "logits", num_sampled * self.vocab_size)?;
        }
        let Inputs { host, device, parts } = &self.inputs;
        self.stream.upload(&host[self.next_result], 0, device.slice(0..parts.block_table.end)?)?;
        let pool = step.pool.cuda().expect("the engine was made for a pool on the GPU");
        let pass = || decoder.forward(&CudaPass { engine: self, pool, layer_ready }, num_sampled);
        let Some(bucket) = bucket else {
            return Ok(pass()?);
        };
        if let Some(graph) = self.graphs.get(&bucket) {
            return Ok(graph.launch(&self.stream)?);
        }
        // Products of this many rows come again and again. What tuning overwrites, the pass writes first.
        self.tune(decoder, bucket)?;
        // Once eagerly, which is this step; everything is loaded and chosen when the capture begins.
        pass()?;
        let graph = Graph::capture(&self.stream, pass)?;
        self.graphs.insert(bucket, graph);
        Ok(())
    }

    /// Finds the fastest products of `rows` rows.
    fn tune(&self, decoder: &Decoder<CudaWeights>, rows: usize) -> Result<(), ModelError> {
        let (blas, stream, s) = (&self.blas, &self.stream, &self.scratch);
        let mut downs: Vec<&Weight> = Vec::new();
        let mut ups: Vec<&Weight> = Vec::new();
        for layer in &decoder.layers {
            match &layer.feed_forward {
                FeedForward::SiluGated { gate_up, down } => {
                    ups.push(gate_up);
                    downs.push(down);
                }
                FeedForward::Relu { up, down } => {
                    ups.push(&up.matrix);
                    downs.push(&down.matrix);
                }
            }
        }
        let qkv: Vec<&Weight> = decoder.layers.iter().map(|layer| &layer.projection.qkv).collect();
        let outputs: Vec<&Weight> = decoder.layers.iter().map(|layer| &layer.attention_output.matrix).collect();
        let (input, mixed, narrow) = (s.input.view(), s.mixed.view(), s.narrow.view());
        let sum = Output::F32(s.x.view(), Accumulate::Add);
        blas.tune(stream, input, rows, &qkv, Output::Bf16(s.qkv.view()))?;
        blas.tune(stream, mixed, rows, &outputs, sum)?;
        blas.tune(stream, input, rows, &ups, Output::Bf16(s.wide.view()))?;
        blas.tune(stream, narrow, rows, &downs, sum)?;
        let table = decoder.output.as_ref().unwrap_or(&decoder.token_embedding);
        let logits = Output::F32(s.logits.view(), Accumulate::Set);
        Ok(blas.tune(stream, input, rows, &[table], logits)?)
    }

    /// Lays a step's numbers out, padded to `rows` rows.
    fn take_inputs(&mut self, step: Step, submission: Submission, rows: usize) -> Result<(), ModelError> {
        let batch = step.batch;
        let padding = rows - batch.num_rows();
        let padded = |values: &[u32], with: u32| {
            let mut values = values.to_vec();
            values.resize(values.len() + padding, with);
            values
        };
        let AttentionPlan { decode, tiles } = self.attention.plan(&batch.entries);
        let sampled = self.attention.plan(step.sample_entries);
        let mut sample_rows = batch.sample_rows.clone();
        sample_rows.extend(batch.num_rows() as u32..rows as u32);
        let mut fed = vec![KNOWN_TOKEN; rows];
        for &(row, sample) in submission.fed {
            fed[row as usize] = sample;
        }
        let sampling: Vec<u32> = submission.sampling.iter().flat_map(SamplingRow::words).collect();
        let no_entries = |mut entries: Vec<u32>| {
            entries.resize(entries.len() + padding * ENTRY_WORDS, 0);
            entries
        };
        let mut words = Vec::new();
        let mut put = |part: &[u32]| {
            words.resize(usize::next_multiple_of(words.len(), ALIGN_WORDS), 0);
            let start = words.len();
            words.extend_from_slice(part);
            start..words.len()
        };
        let parts = Parts {
            tokens: put(&padded(&batch.tokens, 0)),
            positions: put(&padded(&batch.positions, 0)),
            slots: put(&padded(&batch.slots, NO_SLOT)),
            sample_rows: put(&sample_rows),
            fed: put(&fed),
            // As long as the bucket, so that what follows lies where the graph reads it.
            sampling: {
                let whole = put(&[&sampling[..], &vec![0; rows * SamplingRow::WORDS - sampling.len()]].concat());
                whole.start..whole.start + sampling.len()
            },
            decode: [put(&no_entries(decode)), put(&no_entries(sampled.decode))],
            tiles: [put(&tiles), put(&sampled.tiles)],
            block_table: put(&batch.block_table.iter().map(|block| block.0).collect::<Vec<u32>>()),
        };
        if self.inputs.device.len() < words.len() {
            let len = words.len().next_power_of_two();
            let context = self.stream.context().clone();
            self.graphs.clear();
            self.inputs.host = two(|| PinnedBuffer::new(&context, "a step's inputs", len))?;
            self.inputs.device = DeviceBuffer::new(&context, "a step's inputs", len)?;
        }
        self.inputs.host[self.next_result].as_mut_slice()[..words.len()].copy_from_slice(&words);
        self.inputs.parts = parts;
        Ok(())
    }
}

fn two<T>(make: impl Fn() -> Result<T, KernelError>) -> Result<[T; MAX_IN_FLIGHT], KernelError> {
    Ok([make()?, make()?])
}
