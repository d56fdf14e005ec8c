//! Hyperparameters of OPT from its `config.json`, whose fields have names of their own.

use keepsake_kernels::RopeScaling;
use serde::Deserialize;

use super::HParams;
use crate::arch::Architecture;
use crate::error::ModelError;

/// Layer norms' epsilon: PyTorch's default, which OPT's code leaves as it is.
const NORM_EPS: f32 = 1e-5;

/// The fields that matter; defaults are those of transformers' `OPTConfig`.
#[derive(Debug, Deserialize)]
pub(super) struct OptJson {
    vocab_size: usize,
    hidden_size: usize,
    ffn_dim: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    word_embed_proj_dim: Option<usize>,
    activation_function: Option<String>,
    #[serde(default = "yes")]
    do_layer_norm_before: bool,
    #[serde(default = "yes")]
    enable_bias: bool,
    #[serde(default = "yes")]
    layer_norm_elementwise_affine: bool,
    #[serde(rename = "_remove_final_layer_norm", default)]
    remove_final_layer_norm: bool,
    #[serde(default = "yes")]
    tie_word_embeddings: bool,
}

fn default_context() -> usize {
    2048
}

fn yes() -> bool {
    true
}

impl OptJson {
    pub fn hparams(self) -> Result<HParams, ModelError> {
        self.check_unsupported()?;
        let hparams = HParams {
            arch: Architecture::Opt,
            vocab_size: self.vocab_size,
            hidden: self.hidden_size,
            ffn: self.ffn_dim,
            num_layers: self.num_hidden_layers,
            num_heads: self.num_attention_heads,
            num_kv_heads: self.num_attention_heads,
            head_dim: self.hidden_size / self.num_attention_heads.max(1),
            max_context: self.max_position_embeddings,
            // Nothing rotates; the value has to be a valid one.
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::None,
            rope_divisors: None,
            rms_eps: NORM_EPS,
            tied_embeddings: self.tie_word_embeddings,
        };
        hparams.validate()
    }

    fn check_unsupported(&self) -> Result<(), ModelError> {
        let projection = self.word_embed_proj_dim.unwrap_or(self.hidden_size);
        let only = [
            ("do_layer_norm_before", self.do_layer_norm_before, true),
            ("enable_bias", self.enable_bias, true),
            ("layer_norm_elementwise_affine", self.layer_norm_elementwise_affine, true),
            ("_remove_final_layer_norm", self.remove_final_layer_norm, false),
            ("word_embed_proj_dim other than hidden_size", projection != self.hidden_size, false),
        ];
        for (what, value, supported) in only {
            if value != supported {
                return Err(ModelError::Unsupported {
                    what,
                    value: value.to_string(),
                    supported: supported.to_string(),
                });
            }
        }
        match self.activation_function.as_deref() {
            None | Some("relu") => Ok(()),
            Some(other) => Err(ModelError::Unsupported {
                what: "activation_function",
                value: other.to_owned(),
                supported: "relu".to_owned(),
            }),
        }
    }
}
