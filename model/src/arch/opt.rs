//! OPT (arXiv 2205.01068): learned positions, layer norms, ReLU, biases everywhere. Hugging Face folders only.

use super::{Design, FeedForwardKind, NormKind, Positions};
use crate::weights::{LayerTensor, TensorName};

pub(super) const DESIGN: Design = Design {
    norm: NormKind::Layer,
    qkv_bias: true,
    head_norms: false,
    output_bias: true,
    feed_forward: FeedForwardKind::Relu,
    // The first two rows of the table were meant for padding.
    positions: Positions::Learned { offset: 2 },
};

/// The names of OPT's checkpoints, which are older than the usual ones.
pub(super) fn hugging_face_name(name: TensorName) -> String {
    let (layer, tensor) = match name {
        TensorName::TokenEmbedding => return "model.decoder.embed_tokens.weight".to_owned(),
        TensorName::PositionEmbedding => return "model.decoder.embed_positions.weight".to_owned(),
        TensorName::OutputNorm => return "model.decoder.final_layer_norm.weight".to_owned(),
        TensorName::OutputNormShift => return "model.decoder.final_layer_norm.bias".to_owned(),
        TensorName::Output | TensorName::RopeFactors => return name.hugging_face(),
        TensorName::Layer(layer, tensor) => (layer, tensor),
    };
    let tensor = match tensor {
        LayerTensor::AttentionNorm => "self_attn_layer_norm.weight",
        LayerTensor::AttentionNormShift => "self_attn_layer_norm.bias",
        LayerTensor::Query => "self_attn.q_proj.weight",
        LayerTensor::QueryBias => "self_attn.q_proj.bias",
        LayerTensor::Key => "self_attn.k_proj.weight",
        LayerTensor::KeyBias => "self_attn.k_proj.bias",
        LayerTensor::Value => "self_attn.v_proj.weight",
        LayerTensor::ValueBias => "self_attn.v_proj.bias",
        LayerTensor::AttentionOutput => "self_attn.out_proj.weight",
        LayerTensor::AttentionOutputBias => "self_attn.out_proj.bias",
        LayerTensor::FfnNorm => "final_layer_norm.weight",
        LayerTensor::FfnNormShift => "final_layer_norm.bias",
        LayerTensor::Up => "fc1.weight",
        LayerTensor::UpBias => "fc1.bias",
        LayerTensor::Down => "fc2.weight",
        LayerTensor::DownBias => "fc2.bias",
        LayerTensor::Gate | LayerTensor::QueryNorm | LayerTensor::KeyNorm => return name.hugging_face(),
    };
    format!("model.decoder.layers.{layer}.{tensor}")
}
