//! Qwen2 and Qwen2.5: Llama with biases on q, k and v.

use super::{llama, Design};

pub(super) const DESIGN: Design = Design { qkv_bias: true, ..llama::DESIGN };
