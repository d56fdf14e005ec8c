//! Architectures: one file each, chosen by name through a closed enum.
//!
//! A file states what its architecture has where decoders differ (`Design`) and how its tensors are called. The forward
//! pass is written once (`decoder`) over what a device can do (`pass::Pass`), and each device implements that once.
//! To add an architecture: a file, a variant in [`Architecture`], and what it needs beyond the present designs in `Pass`.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod decoder;
mod llama;
mod loader;
mod opt;
mod pass;
mod qwen2;
mod qwen3;

use std::fmt;

use keepsake_kernels::{Device, Entry, KvPool};

pub(crate) use self::cpu::CpuEngine;
#[cfg(feature = "cuda")]
pub(crate) use self::cuda::{CudaEngine, Submission};
use self::decoder::Decoder;
use crate::batch::Batch;
use crate::config::HParams;
use crate::error::ModelError;
use crate::weights::{TensorName, WeightSource};

/// An architecture whose forward pass exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3, Mistral (within its window), SmolLM2 and whatever else is stored as these.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// OPT with its norms before each part (all sizes but 350M).
    Opt,
}

/// Where decoders differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Design {
    pub norm: NormKind,
    /// Biases of the q, k and v products.
    pub qkv_bias: bool,
    /// An RMS norm over each head of q and k, before the rotation.
    pub head_norms: bool,
    /// Biases of the attention's output and of the feed-forward products.
    pub output_bias: bool,
    pub feed_forward: FeedForwardKind,
    pub positions: Positions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormKind {
    /// Divides by the root of the mean square.
    Rms,
    /// Subtracts the mean first, adds a shift after.
    Layer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FeedForwardKind {
    /// `down(silu(gate(x)) * up(x))`
    SiluGated,
    /// `down(relu(up(x)))`
    Relu,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Positions {
    Rotary,
    /// A table of vectors, row `position + offset`, added to the token's.
    Learned {
        offset: u32,
    },
}

impl Architecture {
    pub const ALL: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Opt];

    /// GGUF's `general.architecture`; what the architecture is called in messages.
    pub fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Opt => "opt",
        }
    }

    /// Class names in `config.json`.
    pub fn classes(self) -> &'static [&'static str] {
        match self {
            Self::Llama => &["LlamaForCausalLM", "MistralForCausalLM"],
            Self::Qwen2 => &["Qwen2ForCausalLM"],
            Self::Qwen3 => &["Qwen3ForCausalLM"],
            Self::Opt => &["OPTForCausalLM"],
        }
    }

    pub fn from_gguf(name: &str) -> Result<Self, ModelError> {
        // The format has no OPT.
        let known = [Self::Llama, Self::Qwen2, Self::Qwen3];
        let found = known.into_iter().find(|arch| arch.gguf_name() == name);
        found.ok_or_else(|| unsupported(name, known.map(Self::gguf_name).join(", ")))
    }

    pub fn from_class(name: &str) -> Result<Self, ModelError> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|arch| arch.classes().contains(&name));
        found.ok_or_else(|| unsupported(name, Self::ALL.map(|arch| arch.classes().join(", ")).join(", ")))
    }

    pub(crate) fn design(self) -> Design {
        match self {
            Self::Llama => llama::DESIGN,
            Self::Qwen2 => qwen2::DESIGN,
            Self::Qwen3 => qwen3::DESIGN,
            Self::Opt => opt::DESIGN,
        }
    }

    /// A tensor's name in a Hugging Face folder.
    pub(crate) fn hugging_face_name(self, name: TensorName) -> String {
        match self {
            Self::Llama | Self::Qwen2 | Self::Qwen3 => name.hugging_face(),
            Self::Opt => opt::hugging_face_name(name),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.gguf_name())
    }
}

/// A network's weights on the device they were loaded for.
pub(crate) enum Network {
    Cpu(Decoder<cpu::CpuWeights>),
    #[cfg(feature = "cuda")]
    Cuda(Decoder<cuda::CudaWeights>),
}

/// What one step reads besides weights.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub batch: &'a Batch,
    /// The batch's entries cut down to its sampled rows.
    pub sample_entries: &'a [Entry],
    pub pool: &'a KvPool,
}

impl Network {
    pub fn load(source: &dyn WeightSource, hparams: &HParams, device: &Device) -> Result<Self, ModelError> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let memory = cuda::CudaMemory::new(cuda.context())?;
                Decoder::load(source, hparams, &memory).map(Self::Cuda)
            }
            _ => Decoder::load(source, hparams, device).map(Self::Cpu),
        }
    }

    /// Bytes of all weights in the device's memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Cpu(decoder) => decoder.bytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(decoder) => decoder.bytes(),
        }
    }
}

fn unsupported(name: &str, supported: String) -> ModelError {
    ModelError::Unsupported { what: "architecture", value: name.escape_debug().to_string(), supported }
}
