//! Architectures: one file each, chosen by name through a closed enum.
//!
//! To add one: a file with its weights and forward pass over the kernels' operations, a variant in
//! [`Architecture`] and `Network`, and the names it has in GGUF files and `config.json`.

mod llama;
mod scratch;

use std::fmt;

use keepsake_kernels::{Device, Entry, InputForms, KernelError, KvPool, RopeTable, Worker};

use self::llama::Llama;
pub(crate) use self::scratch::Scratch;
use crate::batch::Batch;
use crate::config::HParams;
use crate::error::ModelError;
use crate::weights::WeightSource;

/// An architecture whose forward pass exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3, Mistral (within its window), SmolLM2 and whatever else is stored as these.
    Llama,
}

impl Architecture {
    pub const ALL: [Self; 1] = [Self::Llama];

    /// GGUF's `general.architecture`.
    pub fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
        }
    }

    /// Class names in `config.json`.
    pub fn classes(self) -> &'static [&'static str] {
        match self {
            Self::Llama => &["LlamaForCausalLM", "MistralForCausalLM"],
        }
    }

    pub fn from_gguf(name: &str) -> Result<Self, ModelError> {
        let found = Self::ALL.into_iter().find(|arch| arch.gguf_name() == name);
        found.ok_or_else(|| unsupported(name, Self::ALL.map(Self::gguf_name).join(", ")))
    }

    pub fn from_class(name: &str) -> Result<Self, ModelError> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|arch| arch.classes().contains(&name));
        found.ok_or_else(|| unsupported(name, Self::ALL.map(|arch| arch.classes().join(", ")).join(", ")))
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.gguf_name())
    }
}

/// A network's weights on a device, and how they are run.
pub(crate) enum Network {
    Llama(Llama),
}

/// What one step reads besides weights.
pub(crate) struct Step<'a> {
    pub batch: &'a Batch,
    /// The batch's entries cut down to its sampled rows.
    pub sample_entries: &'a [Entry],
    pub pool: &'a KvPool,
    pub rope: &'a RopeTable,
}

impl Network {
    pub fn load(source: &dyn WeightSource, hparams: &HParams, device: &Device) -> Result<Self, ModelError> {
        match hparams.arch {
            Architecture::Llama => Llama::load(source, hparams, device).map(Self::Llama),
        }
    }

    /// Bytes of all weights in memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Llama(llama) => llama.bytes(),
        }
    }

    /// What [`Scratch::input`] has to hold.
    pub fn input_forms(&self) -> InputForms {
        match self {
            Self::Llama(llama) => llama.input_forms(),
        }
    }

    /// One forward pass; every worker of a region calls it.
    pub fn forward(&self, w: &Worker, step: &Step, scratch: &Scratch) -> Result<(), KernelError> {
        match self {
            Self::Llama(llama) => llama.forward(w, step, scratch),
        }
    }
}

fn unsupported(name: &str, supported: String) -> ModelError {
    ModelError::Unsupported { what: "architecture", value: name.escape_debug().to_string(), supported }
}
