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
    /// Layer norms only, here and in layers.
    OutputNormShift,
    /// Learned positions only.
    PositionEmbedding,
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
    QueryBias,
    KeyBias,
    ValueBias,
    QueryNorm,
    KeyNorm,
    AttentionNormShift,
    AttentionOutputBias,
    FfnNormShift,
    UpBias,
    DownBias,
}

impl LayerTensor {
    pub const ALL: [Self; 19] = [
        Self::AttentionNorm,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::AttentionOutput,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::QueryBias,
        Self::KeyBias,
        Self::ValueBias,
        Self::QueryNorm,
        Self::KeyNorm,
        Self::AttentionNormShift,
        Self::AttentionOutputBias,
        Self::FfnNormShift,
        Self::UpBias,
        Self::DownBias,
    ];
}

impl TensorName {
    /// Every name that a model of this depth may have, in a fixed order.
    pub fn all(num_layers: usize) -> Vec<Self> {
        let mut names = vec![Self::TokenEmbedding, Self::OutputNorm, Self::Output, Self::RopeFactors];
        names.extend([Self::OutputNormShift, Self::PositionEmbedding]);
        for layer in 0..num_layers {
            names.extend(LayerTensor::ALL.map(|tensor| Self::Layer(layer, tensor)));
        }
        names
    }

    /// What is added, as opposed to what multiplies.
    pub fn is_bias(self) -> bool {
        match self {
            Self::OutputNormShift => true,
            Self::Layer(_, tensor) => matches!(
                tensor,
                LayerTensor::QueryBias
                    | LayerTensor::KeyBias
                    | LayerTensor::ValueBias
                    | LayerTensor::AttentionNormShift
                    | LayerTensor::AttentionOutputBias
                    | LayerTensor::FfnNormShift
                    | LayerTensor::UpBias
                    | LayerTensor::DownBias
            ),
            _ => false,
        }
    }

    pub fn gguf(self) -> String {
        let (layer, tensor) = match self {
            Self::TokenEmbedding => return "token_embd.weight".to_owned(),
            Self::OutputNorm => return "output_norm.weight".to_owned(),
            Self::Output => return "output.weight".to_owned(),
            Self::RopeFactors => return "rope_freqs.weight".to_owned(),
            Self::OutputNormShift => return "output_norm.bias".to_owned(),
            Self::PositionEmbedding => return "position_embd.weight".to_owned(),
            Self::Layer(layer, tensor) => (layer, tensor),
        };
        let tensor = match tensor {
            LayerTensor::AttentionNorm => "attn_norm.weight",
            LayerTensor::Query => "attn_q.weight",
            LayerTensor::Key => "attn_k.weight",
            LayerTensor::Value => "attn_v.weight",
            LayerTensor::AttentionOutput => "attn_output.weight",
            LayerTensor::FfnNorm => "ffn_norm.weight",
            LayerTensor::Gate => "ffn_gate.weight",
            LayerTensor::Up => "ffn_up.weight",
            LayerTensor::Down => "ffn_down.weight",
            LayerTensor::QueryBias => "attn_q.bias",
            LayerTensor::KeyBias => "attn_k.bias",
            LayerTensor::ValueBias => "attn_v.bias",
            LayerTensor::QueryNorm => "attn_q_norm.weight",
            LayerTensor::KeyNorm => "attn_k_norm.weight",
            LayerTensor::AttentionNormShift => "attn_norm.bias",
            LayerTensor::AttentionOutputBias => "attn_output.bias",
            LayerTensor::FfnNormShift => "ffn_norm.bias",
            LayerTensor::UpBias => "ffn_up.bias",
            LayerTensor::DownBias => "ffn_down.bias",
        };
        format!("blk.{layer}.{tensor}")
    }

    pub fn hugging_face(self) -> String {
        let (layer, tensor) = match self {
            Self::TokenEmbedding => return "model.embed_tokens.weight".to_owned(),
            Self::OutputNorm => return "model.norm.weight".to_owned(),
            Self::Output => return "lm_head.weight".to_owned(),
            Self::RopeFactors => return "rope_freqs.weight".to_owned(),
            Self::OutputNormShift => return "model.norm.bias".to_owned(),
            Self::PositionEmbedding => return "model.embed_positions.weight".to_owned(),
            Self::Layer(layer, tensor) => (layer, tensor),
        };
        let tensor = match tensor {
            LayerTensor::AttentionNorm => "input_layernorm.weight",
            LayerTensor::Query => "self_attn.q_proj.weight",
            LayerTensor::Key => "self_attn.k_proj.weight",
            LayerTensor::Value => "self_attn.v_proj.weight",
            LayerTensor::AttentionOutput => "self_attn.o_proj.weight",
            LayerTensor::FfnNorm => "post_attention_layernorm.weight",
            LayerTensor::Gate => "mlp.gate_proj.weight",
            LayerTensor::Up => "mlp.up_proj.weight",
            LayerTensor::Down => "mlp.down_proj.weight",
            LayerTensor::QueryBias => "self_attn.q_proj.bias",
            LayerTensor::KeyBias => "self_attn.k_proj.bias",
            LayerTensor::ValueBias => "self_attn.v_proj.bias",
            LayerTensor::QueryNorm => "self_attn.q_norm.weight",
            LayerTensor::KeyNorm => "self_attn.k_norm.weight",
            LayerTensor::AttentionNormShift => "input_layernorm.bias",
            LayerTensor::AttentionOutputBias => "self_attn.o_proj.bias",
            LayerTensor::FfnNormShift => "post_attention_layernorm.bias",
            LayerTensor::UpBias => "mlp.up_proj.bias",
            LayerTensor::DownBias => "mlp.down_proj.bias",
        };
        format!("model.layers.{layer}.{tensor}")
    }
}
