//! Owns: the way to the device's thread. Receives: `RunStep`. Sends: `StepDone`. Never: decides what runs.
//!
//! One named thread a device runs forward passes and samples. Its channel holds as many plans as steps may be in flight, so the next
//! one is there when the present one ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use actix::{Actor, Context, Handler, MessageResult, Recipient};
use crossbeam_channel::{bounded, Receiver, Sender};
use keepsake_kernels::{Device, KvPool};
use keepsake_model::sampler::SamplerState;
use keepsake_model::{Batch, Model, ModelError, Runner};

use crate::core::{RowInput, SequenceId, StepOutput, StepPlan};
use crate::messages::observe::Observe;
use crate::messages::scheduler::StepDone;
use crate::messages::worker::RunStep;

/// Name of the device's thread; a panic on it ends the process.
pub const THREAD_NAME: &str = "device-0";

pub struct GpuWorkerActor {
    plans: Sender<StepPlan>,
    num_steps: u64,
    num_rows: u64,
    thread: Option<JoinHandle<()>>,
}

impl GpuWorkerActor {
    /// Starts the device's thread. `max_rows` is the step budget.
    pub fn start_thread(
        model: Arc<Model>,
        device: Device,
        pool: Arc<KvPool>,
        max_rows: usize,
        steps_in_flight: usize,
        done: Recipient<StepDone>,
    ) -> Result<Self, ModelError> {
        let runner = Runner::new(Arc::clone(&model), device, pool, max_rows)?;
        let (sender, plans) = bounded(steps_in_flight);
        let worker = Worker { runner, model, samplers: HashMap::new(), last: HashMap::new(), scratch: Vec::new() };
        let thread = std::thread::Builder::new()
            .name(THREAD_NAME.to_owned())
            .spawn(move || worker.run(&plans, &done))
            .expect("the operating system can start one more thread at start-up");
        Ok(Self { plans: sender, num_steps: 0, num_rows: 0, thread: Some(thread) })
    }
}

impl Actor for GpuWorkerActor {
    type Context = Context<Self>;

    fn stopped(&mut self, _: &mut Self::Context) {
        // Dropping the sender ends the thread's loop.
        let (closed, _) = bounded(0);
        self.plans = closed;
        if let Some(thread) = self.thread.take() {
            // A panic there has ended the process already.
            let _ = thread.join();
        }
    }
}

impl Handler<RunStep> for GpuWorkerActor {
    type Result = ();

    fn handle(&mut self, RunStep(plan): RunStep, _: &mut Self::Context) {
        self.num_steps += 1;
        self.num_rows += plan.num_rows() as u64;
        self.plans.try_send(plan).expect("the scheduler holds a credit for every step in flight");
    }
}

impl Handler<Observe> for GpuWorkerActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        MessageResult(serde_json::json!({ "steps": self.num_steps, "rows": self.num_rows, "queued": self.plans.len() }))
    }
}

/// The thread's state.
struct Worker {
    runner: Runner,
    model: Arc<Model>,
    samplers: HashMap<SequenceId, SamplerState>,
    /// The last sampled token of each live sequence, for rows planned before it was known.
    last: HashMap<SequenceId, u32>,
    scratch: Vec<f32>,
}

impl Worker {
    fn run(mut self, plans: &Receiver<StepPlan>, done: &Recipient<StepDone>) {
        while let Ok(plan) = plans.recv() {
            let started = Instant::now();
            let output = self.step(plan);
            done.do_send(StepDone { output, elapsed: started.elapsed() });
        }
    }

    fn step(&mut self, plan: StepPlan) -> StepOutput {
        for id in &plan.ends {
            self.samplers.remove(id);
            self.last.remove(id);
        }
        let eog = self.model.tokenizer.eog_ids();
        for start in plan.starts {
            let sampler = SamplerState::new(start.params, &start.prompt, eog);
            self.samplers.insert(start.sequence, sampler);
        }
        let token = |input: &RowInput| match input {
            RowInput::Token(token) => *token,
            RowInput::Sampled(id) => *self.last.get(id).expect("the step before sampled it"),
        };
        let batch = Batch {
            tokens: plan.inputs.iter().map(token).collect(),
            positions: plan.positions,
            slots: plan.slots,
            entries: plan.entries,
            block_table: plan.block_table,
            sample_rows: plan.samples.iter().map(|s| s.row).collect(),
        };
        // A batch the runner refuses, or a device fault, leaves K/V in an unknown state: the process ends (design section 9).
        let logits = match self.runner.forward(&batch) {
            Ok(logits) => logits,
            Err(error) => panic!("step {} failed: {error}", plan.id.0),
        };
        let mut tokens = Vec::with_capacity(plan.samples.len());
        for (index, sample) in plan.samples.iter().enumerate() {
            self.scratch.clear();
            self.scratch.extend_from_slice(logits.row(index));
            let sampler = self.samplers.get_mut(&sample.sequence).expect("a sequence starts with its first sample");
            let token = sampler.sample(&mut self.scratch, sample.position as usize);
            self.last.insert(sample.sequence, token);
            tokens.push((sample.sequence, token));
        }
        StepOutput { id: plan.id, tokens }
    }
}
