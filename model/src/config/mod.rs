//! A model's hyperparameters, from whichever file states them, validated once.

mod gguf;
mod hugging_face;
mod opt;
mod shapes;

pub use self::shapes::{DummyDType, DummyShape};
use keepsake_kernels::{RopeScaling, RopeSpec, RopeStyle};

use crate::arch::Architecture;
use crate::error::ModelError;

/// Caps that no supported model comes near; they bound what a hostile file can make us allocate.
const MAX_LAYERS: usize = 1024;
const MAX_WIDTH: usize = 1 << 18;
const MAX_VOCAB: usize = 1 << 22;
const MAX_HEAD_DIM: usize = 512;
const MAX_CONTEXT: usize = 1 << 24;

/// Everything that shapes a forward pass besides the weights themselves.
#[derive(Debug, Clone, PartialEq)]
pub struct HParams {
    pub arch: Architecture,
    pub vocab_size: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Positions are below this.
    pub max_context: usize,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// A divisor for every rotary frequency, head_dim / 2 of them (GGUF's `rope_freqs.weight`).
    pub rope_divisors: Option<Vec<f32>>,
    /// Of every norm, root-mean-square or not.
    pub rms_eps: f32,
    /// The output matrix is the token embedding.
    pub tied_embeddings: bool,
}

impl HParams {
    /// Width of all query heads.
    pub fn query_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all K (or V) heads.
    pub fn kv_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// What the kernels' table of angles is made from; weights are brought to half-split order.
    pub fn rope_spec(&self) -> RopeSpec {
        RopeSpec {
            style: RopeStyle::HalfSplit,
            rotary_dim: self.head_dim,
            theta: self.rope_theta,
            scaling: self.rope_scaling,
            freq_factors: self.rope_divisors.clone(),
            max_positions: self.max_context,
        }
    }

    pub(crate) fn validate(self) -> Result<Self, ModelError> {
        in_range("vocab_size", self.vocab_size, MAX_VOCAB)?;
        in_range("hidden", self.hidden, MAX_WIDTH)?;
        in_range("ffn", self.ffn, MAX_WIDTH)?;
        in_range("num_layers", self.num_layers, MAX_LAYERS)?;
        in_range("num_heads", self.num_heads, MAX_WIDTH)?;
        in_range("num_kv_heads", self.num_kv_heads, MAX_WIDTH)?;
        in_range("head_dim", self.head_dim, MAX_HEAD_DIM)?;
        in_range("max_context", self.max_context, MAX_CONTEXT)?;
        in_range("num_heads * head_dim", self.query_dim(), MAX_WIDTH)?;
        if !self.head_dim.is_multiple_of(2) {
            return refuse(format!("head_dim {} is odd", self.head_dim));
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return refuse(format!("num_kv_heads {} does not divide num_heads {}", self.num_kv_heads, self.num_heads));
        }
        if !(self.rms_eps > 0.0 && self.rms_eps < 1.0) {
            return refuse(format!("rms_eps {} is not between 0 and 1", self.rms_eps));
        }
        self.validate_rope()?;
        Ok(self)
    }

    fn validate_rope(&self) -> Result<(), ModelError> {
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return refuse(format!("rope_theta {} is not above 1", self.rope_theta));
        }
        match self.rope_scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive("rope scaling factor", factor)?,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("rope scaling factor", factor)?;
                positive("rope low_freq_factor", low_freq_factor)?;
                positive("rope original_context", original_context)?;
                if !(high_freq_factor.is_finite() && high_freq_factor > low_freq_factor) {
                    return refuse(format!(
                        "rope high_freq_factor {high_freq_factor} is not above low_freq_factor \
                         {low_freq_factor}"
                    ));
                }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, attention_factor } => {
                positive("rope scaling factor", factor)?;
                positive("rope beta_fast", beta_fast)?;
                positive("rope beta_slow", beta_slow)?;
                positive("rope original_context", original_context)?;
                positive("rope attention_factor", attention_factor.unwrap_or(1.0))?;
            }
        }
        let divisors = self.rope_divisors.as_deref().unwrap_or_default();
        for &divisor in divisors {
            positive("rope divisor", divisor.into())?;
        }
        if self.rope_divisors.is_some() && divisors.len() != self.head_dim / 2 {
            return refuse(format!("{} rope divisors for head_dim {}", divisors.len(), self.head_dim));
        }
        Ok(())
    }
}

fn refuse<T>(reason: String) -> Result<T, ModelError> {
    Err(ModelError::Shape(reason))
}

fn in_range(what: &str, value: usize, max: usize) -> Result<(), ModelError> {
    if value == 0 || value > max {
        return refuse(format!("{what} {value} is not between 1 and {max}"));
    }
    Ok(())
}

fn positive(what: &str, value: f64) -> Result<(), ModelError> {
    if !(value.is_finite() && value > 0.0) {
        return refuse(format!("{what} {value} is not a positive number"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
