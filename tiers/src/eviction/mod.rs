//! Eviction policies: which chunks of a tier to give up first.
//!
//! A policy only orders; the runtime's core owns the chunks, tells every touch and removal, and asks for victims. Policies that
//! weigh chunks do it by one number, the *value*: what is lost, a unit of time, when the chunk goes. The device and each tier have a
//! policy of their own; a chunk that wants into a full tier is judged by that tier's. Time is the caller's clock.
//!
//! | name | value |
//! |---|---|
//! | `lru` | the time of the last activity |
//! | `retention` | `Cost(l) / T`: recompute cost over idle time (Pensieve, EuroSys'25, section 4.3) |
//! | `return_probability` | recompute cost times the rate at which conversations like this one come back ([`ReturnTimes`]) |
//! | `s3fifo` | none: three queues (S3-FIFO, SOSP'23) |
//!
//! Chunks idle for longer than a cut-off are worth nothing to a policy that has one, so long dead conversations go first.

mod cost;
mod lists;
mod ranked;
mod returns;
mod s3fifo;

use std::time::Duration;

pub use cost::{CostCurve, InvalidCurve};
pub use ranked::RankedPolicy;
pub use returns::{Class, ReturnTimes};
pub use s3fifo::S3FifoPolicy;

use crate::ChunkKey;

/// What policies know of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkUse {
    /// Position just after the chunk's last token: the context length that its tokens attend to.
    pub context_tokens: u32,
    /// When a conversation that holds the chunk was last active, on the caller's clock.
    pub last_activity: Duration,
    /// What kind of conversation that was.
    pub class: Class,
}

/// What values depend on besides the chunk.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Never before any `last_activity`.
    pub now: Duration,
    /// Seconds to compute one chunk, by context length.
    pub costs: &'a CostCurve,
    pub returns: &'a ReturnTimes,
}

/// A chunk to give up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Victim {
    pub key: ChunkKey,
    /// Comparable with [`EvictionPolicy::value`] of the same policy at the same time.
    pub value: f64,
}

/// Orders a tier's chunks by how little is lost when they go.
pub trait EvictionPolicy: Send {
    /// The name in configuration.
    fn name(&self) -> &'static str;

    /// A chunk came in, or a conversation that holds it was active.
    fn on_touch(&mut self, key: ChunkKey, chunk: ChunkUse);

    /// The chunk is no candidate any more: it left, or somebody uses it. Unknown keys are ignored.
    fn on_remove(&mut self, key: &ChunkKey);

    /// Up to `n` distinct chunks in the order in which to give them up. They stay known until `on_remove`.
    fn victims(&mut self, n: usize, view: &View) -> Vec<Victim>;

    /// What a chunk would be worth here that may not be here yet: more than a victim's value means that it should take its place.
    fn value(&self, key: &ChunkKey, chunk: &ChunkUse, view: &View) -> f64;

    /// Known chunks.
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Names of all policies.
pub const POLICIES: &[&str] = &["return_probability", "retention", "lru", "s3fifo"];

/// The policy of that name. Chunks idle for longer than `idle_cutoff` are worth nothing to it; `lru` and `s3fifo` need no cut-off, their
/// oldest go first anyway.
pub fn policy(name: &str, idle_cutoff: Option<Duration>) -> Option<Box<dyn EvictionPolicy>> {
    match name {
        "lru" => Some(Box::new(RankedPolicy::new(ranked::LeastRecentlyUsed))),
        "retention" => Some(Box::new(RankedPolicy::new(ranked::Retention { idle_cutoff }))),
        "return_probability" => Some(Box::new(RankedPolicy::new(ranked::ReturnProbability { idle_cutoff }))),
        "s3fifo" => Some(Box::new(S3FifoPolicy::default())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_gives_its_policy() {
        for name in POLICIES {
            assert_eq!(policy(name, None).unwrap().name(), *name);
        }
        assert!(policy("mru", None).is_none());
    }
}
