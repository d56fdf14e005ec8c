//! Every metric of the server, on its own Prometheus registry. vLLM's names under our prefix where vLLM has the metric, so that
//! its dashboards work after one search and replace; the glossary's words otherwise.
//!
//! Gauges are set by whoever owns the number (the core once a step); counters only go up. All calls are cheap and lock-free,
//! except the first with a new label value.

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::messages::session::{FinishReason, TurnUsage};

pub struct Metrics {
    registry: Registry,

    /// Sequences in the running batch.
    pub num_requests_running: IntGauge,
    /// Turns that were accepted and wait for blocks, budget or loads.
    pub num_requests_waiting: IntGauge,
    /// Share of device blocks that are neither free nor clean, 0 to 1.
    pub kv_cache_usage_perc: Gauge,
    /// Sequences suspended because decode ran out of blocks.
    pub num_preemptions: IntCounter,
    /// Requests refused with 429.
    pub queue_rejections: IntCounter,
    /// Turns whose client went away.
    pub aborted_requests: IntCounter,

    /// Chunk loads that failed, timed out or were damaged; each became a hole.
    pub kv_load_failures: IntCounter,
    /// Chunks whose K/V was given up; their tokens are kept.
    pub chunks_dropped: IntCounter,
    pub chunks_prefetched: IntCounter,
    load_decisions: IntCounterVec,
    /// Chunks that went with deleted or expired turns.
    pub chunks_forgotten: IntCounter,
    /// Conversations that needed a new root: changed instructions, or a template that is not prefix-stable.
    pub rebased_conversations: IntCounter,
    /// Turns made durable.
    pub turns_stored: IntCounter,
    /// 1 while a durable tier or the turn store refuses writes.
    pub store_read_only: IntGauge,
    /// Pins held on chunks of any tier.
    pub pins: IntGauge,

    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    tokens: IntCounterVec,
    request_success: IntCounterVec,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    e2e_request_latency: Histogram,
    tier_capacity_bytes: IntGaugeVec,
    tier_used_bytes: IntGaugeVec,
    tier_chunks: IntGaugeVec,
    blocks: IntGaugeVec,
    moves: IntCounterVec,
    move_bytes: IntCounterVec,
    http_responses: IntCounterVec,
    resident_memory_bytes: IntGauge,
}

/// Device blocks by state; `free + clean + used == total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub free: usize,
    pub clean: usize,
    pub used: usize,
    pub total: usize,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let registry = Registry::new();
        let r = &registry;
        let metrics = Self {
            num_requests_running: gauge(r, "keepsake_num_requests_running", "Sequences in the running batch."),
            num_requests_waiting: gauge(r, "keepsake_num_requests_waiting", "Accepted turns that wait to run."),
            kv_cache_usage_perc: register(
                r,
                Gauge::new("keepsake_kv_cache_usage_perc", "Share of device blocks in use, 0 to 1."),
            ),
            num_preemptions: counter(r, "keepsake_num_preemptions_total", "Sequences suspended for lack of blocks."),
            queue_rejections: counter(r, "keepsake_queue_rejections_total", "Requests refused with 429."),
            aborted_requests: counter(r, "keepsake_aborted_requests_total", "Turns whose client went away."),
            kv_load_failures: counter(r, "keepsake_kv_load_failures_total", "Chunk loads that became holes."),
            chunks_dropped: counter(r, "keepsake_chunks_dropped_total", "Chunks whose K/V was given up."),
            chunks_prefetched: counter(
                r,
                "keepsake_chunks_prefetched_total",
                "Chunks copied from disk to host memory while their request was queued.",
            ),
            load_decisions: counters(
                r,
                "keepsake_load_decisions_total",
                "Chunks that a tier held and admission decided to load, or to compute all the same.",
                &["tier", "decision"],
            ),
            chunks_forgotten: counter(
                r,
                "keepsake_chunks_forgotten_total",
                "Chunks that went with deleted or expired turns.",
            ),
            rebased_conversations: counter(
                r,
                "keepsake_rebased_conversations_total",
                "Conversations that needed a new root.",
            ),
            turns_stored: counter(r, "keepsake_turns_stored_total", "Turns made durable."),
            store_read_only: gauge(r, "keepsake_store_read_only", "1 while a store refuses writes."),
            pins: gauge(r, "keepsake_pins", "Pins held on chunks of any tier."),
            prompt_tokens: counter(
                r,
                "keepsake_prompt_tokens_total",
                "Input tokens of finished turns, cached ones included.",
            ),
            generation_tokens: counter(r, "keepsake_generation_tokens_total", "Output tokens of finished turns."),
            tokens: counters(
                r,
                "keepsake_tokens_total",
                "Input tokens of finished turns by where their K/V came from: a tier, recomputed, or new.",
                &["source"],
            ),
            request_success: counters(r, "keepsake_request_success_total", "Finished turns.", &["finished_reason"]),
            time_to_first_token: histogram(
                r,
                "keepsake_time_to_first_token_seconds",
                "From a turn's arrival to its first sampled token.",
                &[
                    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                    40.0, 80.0, 160.0,
                ],
            ),
            inter_token_latency: histogram(
                r,
                "keepsake_inter_token_latency_seconds",
                "Between two sampled tokens of a turn.",
                &[
                    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                    10.0,
                ],
            ),
            e2e_request_latency: histogram(
                r,
                "keepsake_e2e_request_latency_seconds",
                "From a turn's arrival to its last event.",
                &[
                    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
                    240.0, 480.0, 960.0,
                ],
            ),
            tier_capacity_bytes: gauges(r, "keepsake_tier_capacity_bytes", "Configured size of a tier.", &["tier"]),
            tier_used_bytes: gauges(r, "keepsake_tier_used_bytes", "Bytes in use in a tier.", &["tier"]),
            tier_chunks: gauges(r, "keepsake_tier_chunks", "Chunks in a tier.", &["tier"]),
            blocks: gauges(r, "keepsake_blocks", "Device blocks: free, clean (copied below), used, total.", &["state"]),
            moves: counters(r, "keepsake_moves_total", "Chunk copies between tiers.", &["from", "to", "result"]),
            move_bytes: counters(r, "keepsake_move_bytes_total", "Bytes copied between tiers.", &["from", "to"]),
            http_responses: counters(r, "keepsake_http_responses_total", "HTTP responses by status.", &["status"]),
            resident_memory_bytes: gauge(r, "process_resident_memory_bytes", "Resident memory of this process."),
            registry,
        };
        metrics.create_known_labels();
        metrics
    }

    /// A turn ended well. `elapsed` is from its arrival to its last event.
    pub fn turn_finished(&self, usage: &TurnUsage, reason: FinishReason, elapsed: Duration) {
        self.prompt_tokens.inc_by(usage.input_tokens.into());
        self.generation_tokens.inc_by(usage.output_tokens.into());
        for (tier, tokens) in &usage.cached_by_tier {
            self.tokens.with_label_values(&[tier.as_str()]).inc_by((*tokens).into());
        }
        let new = usage.input_tokens.saturating_sub(usage.cached_tokens).saturating_sub(usage.recomputed_tokens);
        self.tokens.with_label_values(&["recomputed"]).inc_by(usage.recomputed_tokens.into());
        self.tokens.with_label_values(&["new"]).inc_by(new.into());
        let reason = match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        };
        self.request_success.with_label_values(&[reason]).inc();
        self.time_to_first_token.observe(usage.ttft.as_secs_f64());
        self.e2e_request_latency.observe(elapsed.as_secs_f64());
    }

    /// Time between two sampled tokens of one turn.
    pub fn token_interval(&self, interval: Duration) {
        self.inter_token_latency.observe(interval.as_secs_f64());
    }

    pub fn set_tier(&self, tier: &str, capacity_bytes: u64, used_bytes: u64, num_chunks: usize) {
        self.tier_capacity_bytes.with_label_values(&[tier]).set(saturate(capacity_bytes));
        self.tier_used_bytes.with_label_values(&[tier]).set(saturate(used_bytes));
        self.tier_chunks.with_label_values(&[tier]).set(saturate(num_chunks as u64));
    }

    /// Also sets the usage share.
    pub fn set_blocks(&self, counts: BlockCounts) {
        let states = [("free", counts.free), ("clean", counts.clean), ("used", counts.used), ("total", counts.total)];
        for (state, count) in states {
            self.blocks.with_label_values(&[state]).set(saturate(count as u64));
        }
        self.kv_cache_usage_perc.set(counts.used as f64 / counts.total.max(1) as f64);
    }

    /// Chunks that admission chose to load from a tier, and to compute although the tier holds them.
    pub fn load_decisions(&self, tier: &str, loaded: u64, computed: u64) {
        self.load_decisions.with_label_values(&[tier, "load"]).inc_by(loaded);
        self.load_decisions.with_label_values(&[tier, "compute"]).inc_by(computed);
    }

    /// One chunk's copy ended. `result` is "ok" or the fault's short name; bytes count only for "ok".
    pub fn moved(&self, from: &str, to: &str, result: &str, bytes: u64) {
        self.moves.with_label_values(&[from, to, result]).inc();
        if result == "ok" {
            self.move_bytes.with_label_values(&[from, to]).inc_by(bytes);
        }
    }

    pub(crate) fn http_response(&self, status: u16) {
        self.http_responses.with_label_values(&[status.to_string()]).inc();
    }

    /// The text exposition format.
    pub fn render(&self) -> Vec<u8> {
        if let Some(bytes) = resident_memory_bytes() {
            self.resident_memory_bytes.set(saturate(bytes));
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text).expect("writing to memory cannot fail");
        text
    }

    /// Series that dashboards divide by exist from the start, at zero.
    fn create_known_labels(&self) {
        for source in ["device", "dram", "rocks", "recomputed", "new"] {
            self.tokens.with_label_values(&[source]);
        }
        for reason in ["stop", "length"] {
            self.request_success.with_label_values(&[reason]);
        }
        self.set_blocks(BlockCounts::default());
    }
}

/// From `/proc/self/statm`; `None` where there is no such file.
fn resident_memory_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    // SAFETY: sysconf reads a constant of the system and touches no memory of ours.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Some(pages * u64::try_from(page_bytes).ok()?)
}

fn saturate(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn register<C: Collector + Clone + 'static>(registry: &Registry, metric: prometheus::Result<C>) -> C {
    let metric = metric.expect("names and labels are constants that Prometheus accepts");
    registry.register(Box::new(metric.clone())).expect("each name is registered once");
    metric
}

fn gauge(registry: &Registry, name: &str, help: &str) -> IntGauge {
    register(registry, IntGauge::new(name, help))
}

fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    register(registry, IntGaugeVec::new(Opts::new(name, help), labels))
}

fn counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    register(registry, IntCounter::new(name, help))
}

fn counters(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    register(registry, IntCounterVec::new(Opts::new(name, help), labels))
}

fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Histogram {
    register(registry, Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, series: &str) -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no series {series} in\n{text}")).parse().expect("a number")
    }

    #[test]
    fn a_turn_counts_its_tokens_by_source() {
        let metrics = Metrics::new();
        let usage = TurnUsage {
            input_tokens: 100,
            cached_tokens: 64,
            output_tokens: 7,
            cached_by_tier: vec![("device".into(), 32), ("my_tier".into(), 32)],
            recomputed_tokens: 16,
            ttft: Duration::from_millis(30),
        };
        metrics.turn_finished(&usage, FinishReason::Length, Duration::from_secs(1));
        let text = String::from_utf8(metrics.render()).expect("text");
        for (series, expected) in [
            ("keepsake_tokens_total{source=\"device\"}", 32.0),
            ("keepsake_tokens_total{source=\"my_tier\"}", 32.0),
            ("keepsake_tokens_total{source=\"rocks\"}", 0.0),
            ("keepsake_tokens_total{source=\"recomputed\"}", 16.0),
            ("keepsake_tokens_total{source=\"new\"}", 20.0),
            ("keepsake_prompt_tokens_total", 100.0),
            ("keepsake_generation_tokens_total", 7.0),
            ("keepsake_request_success_total{finished_reason=\"length\"}", 1.0),
            ("keepsake_time_to_first_token_seconds_bucket{le=\"0.02\"}", 0.0),
            ("keepsake_time_to_first_token_seconds_bucket{le=\"0.04\"}", 1.0),
            ("keepsake_e2e_request_latency_seconds_sum", 1.0),
        ] {
            assert_eq!(value(&text, series), expected, "{series}");
        }
        assert!(value(&text, "process_resident_memory_bytes") > 1e5);
    }

    #[test]
    fn gauges_and_moves() {
        let metrics = Metrics::new();
        metrics.set_blocks(BlockCounts { free: 1, clean: 2, used: 5, total: 8 });
        metrics.set_tier("dram", 1000, 96, 3);
        metrics.moved("device", "dram", "ok", 32);
        metrics.moved("device", "dram", "timed_out", 32);
        let text = String::from_utf8(metrics.render()).expect("text");
        for (series, expected) in [
            ("keepsake_kv_cache_usage_perc", 0.625),
            ("keepsake_blocks{state=\"clean\"}", 2.0),
            ("keepsake_tier_used_bytes{tier=\"dram\"}", 96.0),
            ("keepsake_moves_total{from=\"device\",result=\"ok\",to=\"dram\"}", 1.0),
            ("keepsake_moves_total{from=\"device\",result=\"timed_out\",to=\"dram\"}", 1.0),
            ("keepsake_move_bytes_total{from=\"device\",to=\"dram\"}", 32.0),
        ] {
            assert_eq!(value(&text, series), expected, "{series}");
        }
    }
}
