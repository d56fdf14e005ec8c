//! A run's result, as it is printed: one line of JSON.

use std::time::Duration;

use serde::Serialize;

use super::settings::Settings;
use super::tally::{percentile, Tally};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub policies: Vec<String>,
    /// Chunks of the device and of each tier below it.
    pub chunks: Vec<usize>,
    pub chunk_tokens: usize,
    pub seed: u64,
    pub turns: u64,
    pub rejected: u64,
    pub given_up: u64,
    pub too_long: u64,
    pub suspended: u64,
    pub tokens: Tokens,
    /// Of the tokens that earlier turns computed, those that were not computed again.
    pub hit_rate: f64,
    /// Seconds of computing K/V of earlier turns again.
    pub recomputed_seconds: f64,
    /// The same without any cache, for the same turns.
    pub no_cache_seconds: f64,
    /// `1 - recomputed_seconds / no_cache_seconds`.
    pub saved: f64,
    /// The device was idle while sequences waited for loads.
    pub stall_seconds: f64,
    pub busy_seconds: f64,
    pub num_steps: u64,
    /// Turns that ended while users were sending, by that time.
    pub turns_per_second: f64,
    pub ttft_seconds: Percentiles,
    pub queued_seconds: Percentiles,
    pub victims_per_second: f64,
    pub virtual_seconds: f64,
    pub wall_seconds: f64,
}

/// A run beside the best that eviction could have done.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WithCeiling {
    #[serde(flatten)]
    pub report: Report,
    /// What the better of the two policies that know the future saved.
    pub ceiling_saved: f64,
    /// `saved / ceiling_saved`.
    pub share_of_ceiling: f64,
}

/// Input tokens by where their K/V came from, and sampled ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tokens {
    pub input: u64,
    pub device: u64,
    /// By tier below the device.
    pub loaded: Vec<u64>,
    pub recomputed: u64,
    pub new: u64,
    pub sampled: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Report {
    pub(super) fn new(settings: &Settings, mut tally: Tally, suspended: u64, end: Duration, wall: Duration) -> Self {
        let existing = settings.tiers.iter().filter(|t| t.chunks > 0);
        let end = end.as_secs_f64();
        let counted = (end - settings.warmup).max(f64::MIN_POSITIVE);
        // Without a limit of time, users send until the end.
        let sending = (end.min(settings.seconds) - settings.warmup).max(f64::MIN_POSITIVE);
        let reused = tally.device + tally.loaded.iter().sum::<u64>();
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        Self {
            policies: [&settings.device_policy]
                .into_iter()
                .chain(existing.clone().map(|t| &t.policy))
                .cloned()
                .collect(),
            chunks: [settings.device_chunks].into_iter().chain(existing.map(|t| t.chunks)).collect(),
            chunk_tokens: settings.chunk_tokens,
            seed: settings.seed,
            turns: tally.num_turns,
            rejected: tally.num_rejected,
            given_up: tally.num_given_up,
            too_long: tally.num_too_long,
            suspended,
            hit_rate: round(share(reused as f64, (reused + tally.recomputed) as f64)),
            recomputed_seconds: round(tally.recomputed_seconds),
            no_cache_seconds: round(tally.past_seconds),
            saved: round(share(tally.past_seconds - tally.recomputed_seconds, tally.past_seconds)),
            stall_seconds: round(tally.stall.as_secs_f64()),
            busy_seconds: round(tally.busy.as_secs_f64()),
            num_steps: tally.num_steps,
            turns_per_second: round(tally.num_turns_in_time as f64 / sending),
            ttft_seconds: Percentiles::of(&mut tally.ttft),
            queued_seconds: Percentiles::of(&mut tally.queued),
            victims_per_second: round(tally.num_victims as f64 / counted),
            virtual_seconds: round(end),
            wall_seconds: round(wall.as_secs_f64()),
            tokens: Tokens {
                input: tally.input,
                device: tally.device,
                loaded: tally.loaded,
                recomputed: tally.recomputed,
                new: tally.new,
                sampled: tally.sampled,
            },
        }
    }

    /// Recompute cost beside that of the same turns without a cache: runs of one workload send different turns when users wait for
    /// replies, so seconds alone cannot be compared.
    pub fn recomputed_share(&self) -> f64 {
        1.0 - self.saved
    }
}

impl Percentiles {
    fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |rank| round(percentile(values, rank));
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

fn round(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}
