//! Eviction policies: which chunks of a tier to give up first.
//!
//! A policy only orders; the runtime's core owns the chunks, tells every touch and removal, and asks for victims. It
//! says for each proposal whether the chunk may go (unpinned, not in flight). Time is the caller's clock.
//!
//! The interface carries what retention values need (`V = Cost(l) / T`): the context length a chunk attends to, and the
//! last activity, which all conversations that share the chunk refresh.

mod cost;
mod lru;

use std::time::Duration;

pub use cost::{CostCurve, InvalidCurve};
pub use lru::LruPolicy;

use crate::ChunkKey;

/// One use of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// Position just after the chunk's last token: the context length that its tokens attend to.
    pub position_tokens: u32,
    /// The caller's clock, never running backwards.
    pub now: Duration,
}

/// Orders a tier's chunks by how little is lost when they go.
pub trait EvictionPolicy: Send {
    /// The name in configuration.
    fn name(&self) -> &'static str;

    /// A chunk came in, or a conversation that holds it was active.
    fn on_touch(&mut self, key: ChunkKey, touch: Touch);

    /// The chunk left the tier. Unknown keys are ignored.
    fn on_remove(&mut self, key: &ChunkKey);

    /// Up to `n` distinct chunks in the order in which to give them up at `now`, all allowed by `may_evict`. They stay known
    /// until `on_remove`.
    fn victims(&self, n: usize, now: Duration, may_evict: &mut dyn FnMut(&ChunkKey) -> bool) -> Vec<ChunkKey>;

    /// Known chunks.
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Names of all policies.
pub const POLICIES: &[&str] = &["lru"];

/// The policy of that name.
pub fn policy(name: &str) -> Option<Box<dyn EvictionPolicy>> {
    match name {
        "lru" => Some(Box::new(LruPolicy::default())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_gives_its_policy() {
        for name in POLICIES {
            assert_eq!(policy(name).unwrap().name(), *name);
        }
        assert!(policy("mru").is_none());
    }
}
