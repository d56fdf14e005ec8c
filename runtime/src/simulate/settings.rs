//! What is simulated: sizes, policies, limits and costs.

use std::time::Duration;

use keepsake_tiers::eviction::{policy, POLICIES};

use crate::core::{CoreConfig, Costs, PolicyChoice, QueueOrder, TierSpec};

use super::machine::machine;
use super::SimulateError;

/// The policy that knows each chunk's next use: the least recompute cost a second until then goes first.
pub const CLAIRVOYANT: &str = "clairvoyant";
/// The policy that knows each chunk's next use: the farthest goes first.
pub const BELADY: &str = "belady";

/// A tier below the device.
#[derive(Clone, Debug, PartialEq)]
pub struct TierSettings {
    pub name: &'static str,
    /// Chunks that fit; a tier without any does not exist.
    pub chunks: usize,
    pub policy: String,
    /// Survives a restart, and is filled to four fifths only.
    pub durable: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub chunk_tokens: usize,
    pub device_chunks: usize,
    pub device_policy: String,
    /// In the order of `costs.tiers`.
    pub tiers: Vec<TierSettings>,
    pub costs: Costs,
    pub max_context: usize,
    pub max_running: usize,
    pub max_waiting: usize,
    pub step_tokens: usize,
    pub steps_in_flight: usize,
    pub reserve: f64,
    pub swap_out_below: f64,
    pub load_timeout: Duration,
    pub queue: QueueOrder,
    pub protect_queued: bool,
    /// Chunks idle for longer go first, of every policy that has a cut-off.
    pub idle_cutoff: Option<Duration>,
    pub moves_in_flight: usize,
    pub seed: u64,
    /// No turn is sent later; what was sent by then is played to its end.
    pub seconds: f64,
    /// Turns sent earlier are played and not counted.
    pub warmup: f64,
    /// How often a refused user tries again before giving the conversation up.
    pub retries: u32,
    /// Seconds between a refusal and the next try.
    pub retry_after: f64,
    /// Check all invariants of the core after so many events; 0: never.
    pub check_every: u64,
}

impl Default for Settings {
    /// A device and DRAM of an 8B model under LRU.
    fn default() -> Self {
        let tier = |name, chunks, durable| TierSettings { name, chunks, durable, policy: "lru".to_owned() };
        let chunk_tokens = 32;
        Self {
            chunk_tokens,
            device_chunks: 4_096,
            device_policy: "lru".to_owned(),
            tiers: vec![tier("dram", 16_384, false), tier("rocks", 0, true)],
            costs: machine("h200-8b", chunk_tokens).expect("a preset"),
            max_context: 131_072,
            max_running: 256,
            max_waiting: 1_000,
            step_tokens: 2_048,
            steps_in_flight: 1,
            reserve: 0.1,
            swap_out_below: 0.25,
            load_timeout: Duration::from_secs(5),
            protect_queued: true,
            idle_cutoff: None,
            queue: QueueOrder::CacheAware { age_bound: Duration::from_secs(25) },
            moves_in_flight: 64,
            seed: 1,
            seconds: 600.0,
            warmup: 0.0,
            retries: 0,
            retry_after: 1.0,
            check_every: 0,
        }
    }
}

impl Settings {
    pub(super) fn validate(&self) -> Result<(), SimulateError> {
        let refuse = |message: String| Err(SimulateError::Settings(message));
        let sizes = [
            ("--chunk-tokens", self.chunk_tokens),
            ("--device-chunks", self.device_chunks),
            ("--max-running", self.max_running),
            ("--max-waiting", self.max_waiting),
            ("--step-tokens", self.step_tokens),
            ("--steps-in-flight", self.steps_in_flight),
        ];
        if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return refuse(format!("{flag} 0: must be at least 1"));
        }
        if self.step_tokens < self.max_running {
            return refuse(format!(
                "--step-tokens {}: less than --max-running {}: every running sequence needs a row",
                self.step_tokens, self.max_running
            ));
        }
        for (flag, value) in
            [("--seconds", self.seconds), ("--warmup", self.warmup), ("--retry-after", self.retry_after)]
        {
            if !(0.0..=1e9).contains(&value) {
                return refuse(format!("{flag} {value}: must be 0 to 1e9"));
            }
        }
        if self.costs.tiers.len() < self.tiers.len() {
            return refuse(format!("the costs name {} tiers of {}", self.costs.tiers.len(), self.tiers.len()));
        }
        let names = self.tiers.iter().map(|t| &t.policy).chain([&self.device_policy]);
        match names.into_iter().find(|name| !is_policy(name)) {
            Some(name) => refuse(format!("--policy {name}: must be one of {}", policy_names().join(", "))),
            None => Ok(()),
        }
    }

    /// The device and all tiers under one policy.
    pub fn with_policy(&self, name: &str) -> Self {
        let mut settings = self.clone();
        settings.device_policy = name.to_owned();
        for tier in &mut settings.tiers {
            tier.policy = name.to_owned();
        }
        settings
    }

    /// Does any policy look ahead?
    pub(super) fn is_clairvoyant(&self) -> bool {
        self.tiers.iter().map(|t| &t.policy).chain([&self.device_policy]).any(|p| p == CLAIRVOYANT || p == BELADY)
    }

    /// Tiers that exist, with their costs in the same order.
    pub(super) fn existing_tiers(&self) -> (Vec<TierSpec>, Costs) {
        let mut costs = self.costs.clone();
        let exists: Vec<_> = self.tiers.iter().zip(&self.costs.tiers).filter(|(tier, _)| tier.chunks > 0).collect();
        costs.tiers = exists.iter().map(|(_, costs)| **costs).collect();
        let spec = |tier: &TierSettings| TierSpec {
            name: tier.name.to_owned(),
            capacity: tier.chunks,
            durable: tier.durable,
            policy: self.choice(&tier.policy),
        };
        (exists.iter().map(|(tier, _)| spec(tier)).collect(), costs)
    }

    fn choice(&self, name: &str) -> PolicyChoice {
        PolicyChoice { name: name.to_owned(), idle_cutoff: self.idle_cutoff }
    }

    pub(super) fn core_config(&self, costs: Costs) -> CoreConfig {
        CoreConfig {
            chunk_tokens: self.chunk_tokens,
            max_context: self.max_context,
            max_running: self.max_running,
            max_waiting: self.max_waiting,
            step_tokens: self.step_tokens,
            reserve: self.reserve,
            swap_out_below: self.swap_out_below,
            steps_in_flight: self.steps_in_flight,
            load_timeout: self.load_timeout,
            moves_in_flight: self.moves_in_flight,
            reuse: true,
            queue: self.queue,
            protect_queued: self.protect_queued,
            device_policy: self.choice(&self.device_policy),
            costs,
        }
    }
}

fn is_policy(name: &str) -> bool {
    name == CLAIRVOYANT || name == BELADY || policy(name, None).is_some()
}

/// All that `--policy` takes.
pub fn policy_names() -> Vec<&'static str> {
    POLICIES.iter().copied().chain([CLAIRVOYANT, BELADY]).collect()
}
