//! One set of tensor names for every source.

/// A tensor of a decoder-only transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorName {
    TokenEmbedding,
    OutputNorm,
    /// Absent when the output shares the token embedding's matrix.
    Output,
    /// Divisors of the rotary frequencies (GGUF's form of llama3 scaling).
    RopeFactors,
    Layer(usize, LayerTensor),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerTensor {
    AttentionNorm,
    Query,
    Key,
    Value,
    AttentionOutput,
    FfnNorm,
    Gate,
    Up,
    Down,
}

impl LayerTensor {
    pub const ALL: [Self; 9] = [
        Self::AttentionNorm,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::AttentionOutput,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];
}

impl TensorName {
    /// Every name that a model of this depth may have, in a fixed order.
    pub fn all(num_layers: usize) -> Vec<Self> {
        let mut names = vec![Self::TokenEmbedding, Self::OutputNorm, Self::Output, Self::RopeFactors];
        for layer in 0..num_layers {
            names.extend(LayerTensor::ALL.map(|tensor| Self::Layer(layer, tensor)));
        }
        names
    }

    pub fn gguf(self) -> String {
        let (layer, tensor) = match self {
            Self::TokenEmbedding => return "token_embd.weight".to_owned(),
            Self::OutputNorm => return "output_norm.weight".to_owned(),
            Self::Output => return "output.weight".to_owned(),
            Self::RopeFactors => return "rope_freqs.weight".to_owned(),
            Self::Layer(layer, tensor) => (layer, tensor),
        };
        let tensor = match tensor {
            LayerTensor::AttentionNorm => "attn_norm",
            LayerTensor::Query => "attn_q",
            LayerTensor::Key => "attn_k",
            LayerTensor::Value => "attn_v",
            LayerTensor::AttentionOutput => "attn_output",
            LayerTensor::FfnNorm => "ffn_norm",
            LayerTensor::Gate => "ffn_gate",
            LayerTensor::Up => "ffn_up",
            LayerTensor::Down => "ffn_down",
        };
        format!("blk.{layer}.{tensor}.weight")
    }

    pub fn hugging_face(self) -> String {
        let (layer, tensor) = match self {
            Self::TokenEmbedding => return "model.embed_tokens.weight".to_owned(),
            Self::OutputNorm => return "model.norm.weight".to_owned(),
            Self::Output => return "lm_head.weight".to_owned(),
            Self::RopeFactors => return "rope_freqs.weight".to_owned(),
            Self::Layer(layer, tensor) => (layer, tensor),
        };
        let tensor = match tensor {
            LayerTensor::AttentionNorm => "input_layernorm",
            LayerTensor::Query => "self_attn.q_proj",
            LayerTensor::Key => "self_attn.k_proj",
            LayerTensor::Value => "self_attn.v_proj",
            LayerTensor::AttentionOutput => "self_attn.o_proj",
            LayerTensor::FfnNorm => "post_attention_layernorm",
            LayerTensor::Gate => "mlp.gate_proj",
            LayerTensor::Up => "mlp.up_proj",
            LayerTensor::Down => "mlp.down_proj",
        };
        format!("model.layers.{layer}.{tensor}.weight")
    }
}
