//! Named shapes for generated weights: benchmarks of a model's size without its file.

use keepsake_kernels::{DType, RopeScaling};

use super::HParams;
use crate::arch::Architecture;
use crate::error::ModelError;

/// What generated matrices are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DummyDType {
    Q4_1,
    BF16,
}

impl DummyDType {
    pub fn dtype(self) -> DType {
        match self {
            Self::Q4_1 => DType::Q4_1,
            Self::BF16 => DType::BF16,
        }
    }
}

/// A shape by name: `smollm2-135m`, or `llama3-8b:bf16` (the default is `:q4_1`).
#[derive(Debug, Clone, PartialEq)]
pub struct DummyShape {
    pub name: String,
    pub dtype: DummyDType,
    pub hparams: HParams,
}

/// A shape's numbers; the rest is the same for all.
struct Shape {
    name: &'static str,
    arch: Architecture,
    vocab_size: usize,
    hidden: usize,
    ffn: usize,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    max_context: usize,
    rope_theta: f64,
    tied_embeddings: bool,
}

const SHAPES: [Shape; 9] = [
    // Small enough for tests that need a forward pass and no sense.
    Shape {
        name: "tiny",
        arch: Architecture::Llama,
        vocab_size: 512,
        hidden: 128,
        ffn: 256,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        max_context: 2048,
        rope_theta: 10_000.0,
        tied_embeddings: true,
    },
    Shape {
        name: "smollm2-135m",
        arch: Architecture::Llama,
        vocab_size: 49_152,
        hidden: 576,
        ffn: 1536,
        num_layers: 30,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        max_context: 8192,
        rope_theta: 100_000.0,
        tied_embeddings: true,
    },
    Shape {
        name: "llama3-8b",
        arch: Architecture::Llama,
        vocab_size: 128_256,
        hidden: 4096,
        ffn: 14_336,
        num_layers: 32,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        max_context: 8192,
        rope_theta: 500_000.0,
        tied_embeddings: false,
    },
    Shape {
        name: "llama2-13b",
        arch: Architecture::Llama,
        vocab_size: 32_000,
        hidden: 5120,
        ffn: 13_824,
        num_layers: 40,
        num_heads: 40,
        num_kv_heads: 40,
        head_dim: 128,
        max_context: 4096,
        rope_theta: 10_000.0,
        tied_embeddings: false,
    },
    Shape {
        name: "qwen3-8b",
        arch: Architecture::Qwen3,
        vocab_size: 151_936,
        hidden: 4096,
        ffn: 12_288,
        num_layers: 36,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        max_context: 40_960,
        rope_theta: 1_000_000.0,
        tied_embeddings: false,
    },
    Shape {
        name: "opt-13b",
        arch: Architecture::Opt,
        vocab_size: 50_272,
        hidden: 5120,
        ffn: 20_480,
        num_layers: 40,
        num_heads: 40,
        num_kv_heads: 40,
        head_dim: 128,
        max_context: 2048,
        rope_theta: 10_000.0,
        tied_embeddings: true,
    },
    // One for each other architecture, with heads that GPU kernels know.
    Shape {
        name: "tiny-qwen2",
        arch: Architecture::Qwen2,
        vocab_size: 512,
        hidden: 256,
        ffn: 512,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        max_context: 2048,
        rope_theta: 10_000.0,
        tied_embeddings: false,
    },
    Shape {
        name: "tiny-qwen3",
        arch: Architecture::Qwen3,
        vocab_size: 512,
        hidden: 256,
        ffn: 512,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 128,
        max_context: 2048,
        rope_theta: 10_000.0,
        tied_embeddings: true,
    },
    Shape {
        name: "tiny-opt",
        arch: Architecture::Opt,
        vocab_size: 512,
        hidden: 256,
        ffn: 1024,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 64,
        max_context: 2048,
        rope_theta: 10_000.0,
        tied_embeddings: true,
    },
];

impl DummyShape {
    /// Every shape name, for help texts.
    pub fn names() -> Vec<&'static str> {
        SHAPES.iter().map(|shape| shape.name).collect()
    }

    pub fn parse(name: &str) -> Result<Self, ModelError> {
        let (base, dtype) = match name.split_once(':') {
            None => (name, DummyDType::Q4_1),
            Some((base, "q4_1")) => (base, DummyDType::Q4_1),
            Some((base, "bf16")) => (base, DummyDType::BF16),
            Some((_, other)) => {
                return Err(ModelError::Unsupported {
                    what: "dummy weight type",
                    value: other.to_owned(),
                    supported: "q4_1, bf16".to_owned(),
                })
            }
        };
        let shape = SHAPES.iter().find(|shape| shape.name == base);
        let shape = shape.ok_or_else(|| ModelError::Unsupported {
            what: "dummy shape",
            value: base.to_owned(),
            supported: Self::names().join(", "),
        })?;
        let hparams = HParams {
            arch: shape.arch,
            vocab_size: shape.vocab_size,
            hidden: shape.hidden,
            ffn: shape.ffn,
            num_layers: shape.num_layers,
            num_heads: shape.num_heads,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            max_context: shape.max_context,
            rope_theta: shape.rope_theta,
            rope_scaling: RopeScaling::None,
            rope_divisors: None,
            rms_eps: 1e-5,
            tied_embeddings: shape.tied_embeddings,
        };
        Ok(Self { name: name.to_owned(), dtype, hparams: hparams.validate()? })
    }
}
