//! `[scheduler]`: what one step may hold, and when memory is freed ahead of need.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::check::{duration_in, fraction, number_in};
use crate::ConfigError;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// Tokens of a chunk, the unit of sharing, eviction and movement. Default 32; a power of two, 8 to 256.
    pub chunk_tokens: usize,
    /// Sequences that run at the same time. Default 32, 1 to 4096.
    pub max_running: usize,
    /// Tokens of one step: decode rows first, the rest prefill. Default 512, `max_running` to 65536.
    pub step_tokens: usize,
    /// Share of device blocks that admission keeps free for the sequences that already run. Default 0.10, 0 to 0.9.
    pub reserve: f64,
    /// When fewer than this share of device blocks is available, chunks are copied down ahead of need. Default 0.25,
    /// 0 to 1.
    pub swap_out_below: f64,
    /// Steps planned before the first one's tokens are known. Default 1, 1 to 2.
    pub steps_in_flight: usize,
    /// A chunk that takes longer than this to come up from a tier is recomputed. Default `5s`, 1ms to 1h.
    #[serde(with = "crate::units::duration")]
    pub load_timeout: Duration,
    /// Who goes first when requests wait. Default `"cache-aware"`.
    pub queue: QueueOrder,
    /// With a cache-aware queue, a request that has waited for this long is not overtaken any more. Default `25s`, 0s to 1h.
    #[serde(with = "crate::units::duration")]
    pub queue_age_bound: Duration,
    /// Keep K/V for later turns. `false` computes every turn from its first token, as a stateless server does. Default true.
    pub reuse: bool,
    /// What queued requests will use is evicted after everything else. Default true.
    pub protect_queued: bool,
    /// `"auto"`: what work costs on this machine is measured at the first start and read at later ones; `"off"`: it is guessed.
    /// Default `"auto"`.
    pub calibrate: CalibrateMode,
}

/// The order of waiting requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueueOrder {
    /// The request that costs the device least goes first: what is cached costs nothing.
    #[default]
    CacheAware,
    /// First come, first served.
    Arrival,
}

/// Where the scheduler's costs come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CalibrateMode {
    #[default]
    Auto,
    Off,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            chunk_tokens: 32,
            max_running: 32,
            step_tokens: 512,
            reserve: 0.10,
            swap_out_below: 0.25,
            steps_in_flight: 1,
            load_timeout: Duration::from_secs(5),
            queue: QueueOrder::CacheAware,
            queue_age_bound: Duration::from_secs(25),
            reuse: true,
            protect_queued: true,
            calibrate: CalibrateMode::Auto,
        }
    }
}

impl SchedulerConfig {
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        number_in("scheduler.chunk_tokens", self.chunk_tokens, 8, 256)?;
        if !self.chunk_tokens.is_power_of_two() {
            let value = self.chunk_tokens.to_string();
            return Err(ConfigError::invalid("scheduler.chunk_tokens", value, "not a power of two"));
        }
        number_in("scheduler.max_running", self.max_running, 1, 4096)?;
        number_in("scheduler.step_tokens", self.step_tokens, 1, 65_536)?;
        if self.step_tokens < self.max_running {
            let reason =
                format!("less than scheduler.max_running ({}): every running sequence needs a row", self.max_running);
            let value = self.step_tokens.to_string();
            return Err(ConfigError::invalid("scheduler.step_tokens", value, reason));
        }
        fraction("scheduler.reserve", self.reserve, 0.9)?;
        fraction("scheduler.swap_out_below", self.swap_out_below, 1.0)?;
        number_in("scheduler.steps_in_flight", self.steps_in_flight, 1, 2)?;
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(3600));
        duration_in("scheduler.load_timeout", self.load_timeout, least, most)?;
        duration_in("scheduler.queue_age_bound", self.queue_age_bound, Duration::ZERO, most)
    }
}
