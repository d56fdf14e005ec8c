//! What is counted while a world runs.

use std::time::Duration;

use crate::core::SequenceUsage;

/// Counts of turns that were sent after the warm-up, and of the world's time after it.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) num_turns: u64,
    /// Of those, ended before the last moment at which turns are sent.
    pub(super) num_turns_in_time: u64,
    /// Refusals because the queue was full, of the same turn again included.
    pub(super) num_rejected: u64,
    /// Turns that were given up after their last refusal.
    pub(super) num_given_up: u64,
    /// Turns that could never run on this device.
    pub(super) num_too_long: u64,
    pub(super) input: u64,
    pub(super) sampled: u64,
    pub(super) device: u64,
    pub(super) loaded: Vec<u64>,
    pub(super) recomputed: u64,
    pub(super) new: u64,
    /// Seconds of computing K/V again.
    pub(super) recomputed_seconds: f64,
    /// Seconds that computing all past K/V of the same turns again would have taken.
    pub(super) past_seconds: f64,
    pub(super) stall: Duration,
    pub(super) busy: Duration,
    pub(super) num_steps: u64,
    pub(super) num_victims: u64,
    pub(super) ttft: Vec<f64>,
    pub(super) queued: Vec<f64>,
}

impl Tally {
    pub(super) fn new(num_tiers: usize) -> Self {
        Self { loaded: vec![0; num_tiers], ..Self::default() }
    }

    pub(super) fn count_sources(&mut self, usage: &SequenceUsage) {
        self.device += usage.device as u64;
        for (total, loaded) in self.loaded.iter_mut().zip(&usage.loaded) {
            *total += *loaded as u64;
        }
        self.recomputed += usage.recomputed as u64;
        self.new += usage.new as u64;
        self.queued.push(usage.queued.as_secs_f64());
    }
}

/// The value with a share of `rank` of the values below it, as the bench prints it; 0 without values.
pub(super) fn percentile(sorted: &[f64], rank: f64) -> f64 {
    let index = (sorted.len() as f64 * rank) as usize;
    sorted.get(index.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}
