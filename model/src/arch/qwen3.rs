//! Qwen3 (dense): Llama with an RMS norm over each head of q and k before the rotation.

use super::{llama, Design};

pub(super) const DESIGN: Design = Design { head_norms: true, ..llama::DESIGN };
