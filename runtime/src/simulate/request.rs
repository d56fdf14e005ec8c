//! A turn as the core wants it: the one place that knows all fields of a request.

use std::collections::HashSet;
use std::sync::Arc;

use keepsake_model::sampler::SamplingParams;
use keepsake_tiers::ChunkKey;

use crate::core::{SequenceId, SequenceRequest};

use super::traffic::Turn;

/// Where all chains of chunk keys begin: one tenant.
pub(super) const ROOT: ChunkKey = ChunkKey([7; 16]);

pub(super) struct Requests {
    /// No token ends a reply: its length is the traffic's.
    end_tokens: Arc<HashSet<u32>>,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self { end_tokens: Arc::default() }
    }

    pub(super) fn request(&self, id: SequenceId, turn: &Turn) -> SequenceRequest {
        SequenceRequest {
            id,
            root: ROOT,
            weight: 1.0,
            tokens: turn.log.tokens(0..turn.prompt),
            num_past: turn.num_past,
            durable: true,
            max_new_tokens: turn.output,
            end_tokens: self.end_tokens.clone(),
            min_new_tokens: 0,
            sampling: SamplingParams::default(),
        }
    }
}
