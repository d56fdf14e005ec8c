//! Hyperparameters from a Hugging Face `config.json`.

use std::path::Path;

use keepsake_kernels::RopeScaling;
use serde::Deserialize;

use super::opt::OptJson;
use super::HParams;
use crate::arch::Architecture;
use crate::error::ModelError;

#[derive(Debug, Deserialize)]
struct ClassJson {
    architectures: Vec<String>,
}

/// The fields that the supported classes use; defaults are those of transformers' `LlamaConfig`.
#[derive(Debug, Deserialize)]
struct ConfigJson {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    sliding_window: Option<usize>,
    /// Qwen's: the window above is there but off.
    use_sliding_window: Option<bool>,
    #[serde(default = "default_rms_eps")]
    rms_norm_eps: f32,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeJson>,
    /// Newer files put theta and scaling together.
    rope_parameters: Option<RopeJson>,
    #[serde(default)]
    tie_word_embeddings: bool,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    partial_rotary_factor: Option<f64>,
    quantization_config: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
struct RopeJson {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
}

fn default_context() -> usize {
    2048
}

fn default_rms_eps() -> f32 {
    1e-6
}

impl HParams {
    /// `path` is for messages; `text` the content of `config.json`.
    pub(crate) fn from_config_json(path: &Path, text: &str) -> Result<Self, ModelError> {
        let malformed = |error: serde_json::Error| ModelError::malformed(path, "json", error.to_string());
        let ClassJson { architectures } = serde_json::from_str(text).map_err(malformed)?;
        let arch = match architectures.as_slice() {
            [class] => Architecture::from_class(class)?,
            classes => {
                return Err(ModelError::malformed(
                    path,
                    "`architectures`",
                    format!("{} classes, not one", classes.len()),
                ))
            }
        };
        if arch == Architecture::Opt {
            let config: OptJson = serde_json::from_str(text).map_err(malformed)?;
            return config.hparams();
        }
        let config: ConfigJson = serde_json::from_str(text).map_err(malformed)?;
        config.check_unsupported()?;
        let hparams = Self {
            arch,
            vocab_size: config.vocab_size,
            hidden: config.hidden_size,
            ffn: config.intermediate_size,
            num_layers: config.num_hidden_layers,
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads.unwrap_or(config.num_attention_heads),
            head_dim: config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads.max(1)),
            max_context: config.usable_context(),
            rope_theta: config.rope_theta(),
            rope_scaling: config.rope_scaling(path)?,
            rope_divisors: None,
            rms_eps: config.rms_norm_eps,
            tied_embeddings: config.tie_word_embeddings,
        };
        hparams.validate()
    }
}

impl ConfigJson {
    fn check_unsupported(&self) -> Result<(), ModelError> {
        let unsupported = |what, value: String, supported: &str| {
            Err(ModelError::Unsupported { what, value, supported: supported.to_owned() })
        };
        match self.hidden_act.as_deref() {
            None | Some("silu" | "swish") => {}
            Some(other) => return unsupported("hidden_act", other.to_owned(), "silu"),
        }
        if self.attention_bias {
            return unsupported("attention_bias", "true".to_owned(), "false");
        }
        if self.mlp_bias {
            return unsupported("mlp_bias", "true".to_owned(), "false");
        }
        match self.partial_rotary_factor {
            Some(factor) if factor != 1.0 => return unsupported("partial_rotary_factor", factor.to_string(), "1"),
            _ => {}
        }
        match &self.quantization_config {
            None | Some(serde_json::Value::Null) => Ok(()),
            Some(config) => {
                let method = config["quant_method"].as_str().unwrap_or("unnamed");
                unsupported(
                    "quantization_config",
                    method.to_owned(),
                    "F32, F16 and BF16 safetensors, or a quantised GGUF file",
                )
            }
        }
    }

    /// Inside its window sliding attention is full attention, which is what the kernels do.
    fn usable_context(&self) -> usize {
        let window = self.sliding_window.filter(|_| self.use_sliding_window != Some(false));
        match window {
            Some(window) if window < self.max_position_embeddings => {
                tracing::warn!(
                    window,
                    max_position_embeddings = self.max_position_embeddings,
                    "sliding-window attention is not supported, context limited to the window"
                );
                window
            }
            _ => self.max_position_embeddings,
        }
    }

    fn rope_theta(&self) -> f64 {
        let newer = self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
        newer.or(self.rope_theta).unwrap_or(10_000.0)
    }

    fn rope_scaling(&self, path: &Path) -> Result<RopeScaling, ModelError> {
        let Some(rope) = self.rope_scaling.as_ref().or(self.rope_parameters.as_ref()) else {
            return Ok(RopeScaling::None);
        };
        let required = |field: &str, value: Option<f64>| {
            value.ok_or_else(|| ModelError::malformed(path, format!("`rope_scaling.{field}`"), "missing"))
        };
        let original_context = rope.original_max_position_embeddings.unwrap_or(self.max_position_embeddings) as f64;
        match rope.rope_type.as_deref() {
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: required("factor", rope.factor)? }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: required("factor", rope.factor)?,
                low_freq_factor: required("low_freq_factor", rope.low_freq_factor)?,
                high_freq_factor: required("high_freq_factor", rope.high_freq_factor)?,
                original_context,
            }),
            Some("yarn") => Ok(RopeScaling::Yarn {
                factor: required("factor", rope.factor)?,
                original_context,
                beta_fast: rope.beta_fast.unwrap_or(32.0),
                beta_slow: rope.beta_slow.unwrap_or(1.0),
                attention_factor: rope.attention_factor,
            }),
            Some(other) => Err(ModelError::Unsupported {
                what: "rope scaling",
                value: other.to_owned(),
                supported: "default, linear, llama3, yarn".to_owned(),
            }),
        }
    }
}
