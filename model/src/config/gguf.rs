//! Hyperparameters from GGUF metadata.

use keepsake_kernels::RopeScaling;

use super::HParams;
use crate::arch::Architecture;
use crate::error::ModelError;
use crate::weights::gguf::{GgufFile, Metadata, Value, WrongType};
use crate::weights::{TensorName, WeightSource};

const DEFAULT_THETA: f32 = 10_000.0;

impl HParams {
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        check_whole(file)?;
        let keys = Keys::new(file)?;
        let embedding = file.required(TensorName::TokenEmbedding)?;
        let hidden = keys.required_u32("embedding_length")?;
        embedding.expect_shape("token_embd.weight", &[embedding.shape[0], hidden])?;
        let num_heads = keys.required_u32("attention.head_count")?;
        let head_dim = match keys.u32("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => hidden / num_heads.max(1),
        };
        let max_context = keys.required_u32("context_length")?;
        keys.check_unsupported(head_dim)?;
        let hparams = Self {
            arch: keys.arch,
            vocab_size: embedding.shape[0],
            hidden,
            ffn: keys.required_u32("feed_forward_length")?,
            num_layers: keys.required_u32("block_count")?,
            num_heads,
            num_kv_heads: keys.num_kv_heads()?.unwrap_or(num_heads),
            head_dim,
            max_context,
            rope_theta: keys.f32("rope.freq_base")?.unwrap_or(DEFAULT_THETA).into(),
            rope_scaling: keys.rope_scaling(max_context)?,
            rope_divisors: rope_divisors(file)?,
            rms_eps: keys.required_f32("attention.layer_norm_rms_epsilon")?,
            tied_embeddings: file.tensor(&TensorName::Output.gguf()).is_none(),
        };
        hparams.validate()
    }
}

/// Keys under the architecture's prefix.
struct Keys<'a> {
    file: &'a GgufFile,
    arch: Architecture,
    prefix: String,
}

impl<'a> Keys<'a> {
    fn new(file: &'a GgufFile) -> Result<Self, ModelError> {
        let key = "general.architecture";
        let name = file.metadata().try_string(key);
        let name = name.map_err(|error| wrong_type(file, error))?;
        let name = name.ok_or_else(|| missing(file, key))?;
        Ok(Self { file, arch: Architecture::from_gguf(name)?, prefix: name.to_owned() })
    }

    fn metadata(&self) -> &'a Metadata {
        self.file.metadata()
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn u32(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let value = self.metadata().try_u32(&self.key(name));
        let value = value.map_err(|error| wrong_type(self.file, error))?;
        Ok(value.map(|value| value as usize))
    }

    fn required_u32(&self, name: &str) -> Result<usize, ModelError> {
        self.u32(name)?.ok_or_else(|| missing(self.file, &self.key(name)))
    }

    fn f32(&self, name: &str) -> Result<Option<f32>, ModelError> {
        let value = self.metadata().try_f32(&self.key(name));
        value.map_err(|error| wrong_type(self.file, error))
    }

    fn required_f32(&self, name: &str) -> Result<f32, ModelError> {
        self.f32(name)?.ok_or_else(|| missing(self.file, &self.key(name)))
    }

    /// Some converters write one count a layer; layers that differ are not supported.
    fn num_kv_heads(&self) -> Result<Option<usize>, ModelError> {
        let key = self.key("attention.head_count_kv");
        let Some(Value::I32s(counts)) = self.metadata().get(&key) else {
            return self.u32("attention.head_count_kv");
        };
        match counts.first() {
            Some(&first) if first > 0 && counts.iter().all(|&count| count == first) => Ok(Some(first as usize)),
            _ => Err(ModelError::Unsupported {
                what: "attention.head_count_kv",
                value: format!("{} values that differ by layer", counts.len()),
                supported: "the same count in every layer".to_owned(),
            }),
        }
    }

    /// Settings that would change what the model computes and that the forward pass lacks.
    fn check_unsupported(&self, head_dim: usize) -> Result<(), ModelError> {
        let only = [("expert_count", 0), ("rope.dimension_count", head_dim), ("attention.value_length", head_dim)];
        for (name, supported) in only {
            match self.u32(name)? {
                Some(value) if value != supported => {
                    return Err(ModelError::Unsupported {
                        what: name,
                        value: value.to_string(),
                        supported: supported.to_string(),
                    })
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn rope_scaling(&self, max_context: usize) -> Result<RopeScaling, ModelError> {
        let key = self.key("rope.scaling.type");
        let kind = self.metadata().try_string(&key);
        let kind = kind.map_err(|error| wrong_type(self.file, error))?;
        let factor = self.f32("rope.scaling.factor")?;
        // Files from before `rope.scaling.type` state a linear factor only.
        let old_factor = self.f32("rope.scale_linear")?;
        let required = || factor.map(f64::from).ok_or_else(|| missing(self.file, &self.key("rope.scaling.factor")));
        match self.f32("rope.scaling.attn_factor")? {
            Some(factor) if factor != 1.0 => {
                return Err(ModelError::Unsupported {
                    what: "rope.scaling.attn_factor",
                    value: factor.to_string(),
                    supported: "1".to_owned(),
                })
            }
            _ => {}
        }
        match kind {
            None => Ok(match old_factor {
                Some(factor) if factor != 1.0 => RopeScaling::Linear { factor: factor.into() },
                _ => RopeScaling::None,
            }),
            Some("none") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: required()? }),
            Some("yarn") => Ok(RopeScaling::Yarn {
                factor: required()?,
                original_context: self.u32("rope.scaling.original_context_length")?.unwrap_or(max_context) as f64,
                beta_fast: self.f32("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0).into(),
                beta_slow: self.f32("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0).into(),
                attention_factor: None,
            }),
            Some(other) => Err(ModelError::Unsupported {
                what: "rope scaling",
                value: other.to_owned(),
                supported: "none, linear, yarn, rope_freqs.weight".to_owned(),
            }),
        }
    }
}

/// A model may be split over several files, of which this would be one.
fn check_whole(file: &GgufFile) -> Result<(), ModelError> {
    match file.metadata().u32("split.count") {
        Some(count) if count > 1 => Err(ModelError::Unsupported {
            what: "split.count",
            value: count.to_string(),
            supported: "whole files; join the parts with llama-gguf-split --merge".to_owned(),
        }),
        _ => Ok(()),
    }
}

fn rope_divisors(file: &GgufFile) -> Result<Option<Vec<f32>>, ModelError> {
    let name = TensorName::RopeFactors;
    let Some(tensor) = WeightSource::tensor(file, name)? else {
        return Ok(None);
    };
    tensor.to_f32s(&name.gguf()).map(Some)
}

fn missing(file: &GgufFile, key: &str) -> ModelError {
    ModelError::malformed(file.path(), format!("metadata key `{key}`"), "missing")
}

fn wrong_type(file: &GgufFile, error: WrongType) -> ModelError {
    ModelError::malformed(file.path(), "metadata", error.to_string())
}
