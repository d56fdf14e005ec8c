//! Llama: RMS norm, rotary attention with grouped K/V heads, SiLU-gated feed-forward, no biases.

use super::{Design, FeedForwardKind, NormKind, Positions};

pub(super) const DESIGN: Design = Design {
    norm: NormKind::Rms,
    qkv_bias: false,
    head_norms: false,
    output_bias: false,
    feed_forward: FeedForwardKind::SiluGated,
    positions: Positions::Rotary,
};
