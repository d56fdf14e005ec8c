//! Worlds small enough to be played in a moment.

use keepsake_tiers::eviction::POLICIES;

use std::time::Duration;

use crate::core::{QueueOrder, Rejected};

use super::log::Log;
use super::machine::{machine, MACHINES};
use super::report::Report;
use super::settings::Settings;
use super::traffic::{mooncake_requests, Pace, Shape, Workload};
use super::{simulate, simulate_with_ceiling, SimulateError};

fn chats(users: usize, long: f64, seconds: f64) -> Workload {
    Workload::Generated { shape: Shape::Chat { think: 5.0, long }, pace: Pace::Users { users, arrival: 5.0 }, seconds }
}

fn settings(device: usize, dram: usize, seconds: f64) -> Settings {
    let mut settings = Settings { device_chunks: device, seconds, ..Settings::default() };
    settings.tiers[0].chunks = dram;
    settings
}

fn trace(lines: &str) -> Workload {
    let conversations = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<_>>();
    Workload::Trace { conversations: conversations.into(), pace: Pace::Users { users: 8, arrival: 1.0 } }
}

fn assert_sources_sum_to_input(report: &Report) {
    let tokens = &report.tokens;
    let sum = tokens.device + tokens.loaded.iter().sum::<u64>() + tokens.recomputed + tokens.new;
    assert_eq!(sum, tokens.input, "{report:?}");
}

#[test]
fn one_seed_gives_one_result() {
    let settings = settings(600, 1_500, 40.0);
    for policy in POLICIES {
        let play = |seed| {
            let settings = Settings { seed, ..settings.with_policy(policy) };
            Report { wall_seconds: 0.0, ..simulate(&settings, &chats(40, 0.0, 40.0)).unwrap() }
        };
        let first = play(1);
        assert_eq!(first, play(1), "{policy}");
        assert_ne!(first, play(2), "{policy}");
        assert!(first.turns > 100 && first.tokens.loaded[0] > 0, "{first:?}");
        assert_sources_sum_to_input(&first);
    }
}

#[test]
fn without_pressure_nothing_is_computed_again() {
    let report = simulate(&settings(16_384, 0, 40.0), &chats(20, 0.0, 40.0)).unwrap();
    // A log that ends with a chunk computes the chunk again for its last token's logits.
    assert!(report.saved > 0.98, "{report:?}");
    assert_sources_sum_to_input(&report);
}

#[test]
fn foresight_saves_more_than_recency() {
    let tight = settings(2_500, 2_500, 40.0);
    let result = simulate_with_ceiling(&tight, &chats(60, 0.2, 40.0)).unwrap();
    assert!(result.ceiling_saved > result.report.saved, "{result:?}");
    assert!((0.0..1.0).contains(&result.share_of_ceiling), "{result:?}");
}

#[test]
fn overload_refuses_the_excess_and_ends_every_admitted_turn() {
    // Three times the turns a second that this machine finishes without a refusal, a fifth of them long.
    let mut settings = settings(3_000, 3_000, 60.0);
    settings.max_waiting = 20;
    settings.check_every = 50;
    settings.retries = 1;
    let shape = Shape::Chat { think: 1.0, long: 0.2 };
    let play = |rate| {
        let workload = Workload::Generated { shape, pace: Pace::TurnsPerSecond(rate), seconds: 60.0 };
        simulate(&settings, &workload).unwrap()
    };
    let overload = play(30.0);
    // `simulate` fails when a sequence has not ended or an invariant does not hold.
    assert!(overload.turns > 100 && overload.rejected > 100 && overload.given_up > 10, "{overload:?}");
    assert!(overload.turns_per_second < 10.0, "no overload: {overload:?}");
    assert_sources_sum_to_input(&overload);
}

#[test]
fn a_conversation_larger_than_dram_runs_on_the_device() {
    let line =
        r#"{"turns": [{"input": 40000, "output": 10, "think_s": 0}, {"input": 20, "output": 10, "think_s": 3}]}"#;
    let mut settings = settings(1_500, 500, 100.0);
    settings.check_every = 1;
    let report = simulate(&settings, &trace(&[line; 4].join("\n"))).unwrap();
    assert_eq!((report.turns, report.too_long), (8, 0));
    assert_sources_sum_to_input(&report);
}

#[test]
fn a_turn_larger_than_the_device_is_refused_at_once() {
    let line =
        r#"{"turns": [{"input": 40000, "output": 10, "think_s": 0}, {"input": 20, "output": 10, "think_s": 3}]}"#;
    let report = simulate(&settings(1_000, 5_000, 100.0), &trace(&[line; 3].join("\n"))).unwrap();
    assert_eq!(
        (report.turns, report.too_long, report.rejected),
        (0, 3, 0),
        "not one of them is {:?}",
        Rejected::QueueFull
    );
}

#[test]
fn a_saturated_first_come_queue_defeats_lru() {
    let shape = Shape::Saturation { context: 3_000, think: 2.0 };
    let workload = Workload::Generated { shape, pace: Pace::Users { users: 128, arrival: 10.0 }, seconds: 100.0 };
    // Users whose conversations hold 12,000 chunks; the tiers hold half of them.
    let play = |dram: usize| {
        let mut settings = settings(1_500, dram, 100.0);
        settings.costs = machine("saturation", 32).unwrap();
        settings.queue = QueueOrder::Arrival;
        settings.protect_queued = false;
        simulate(&settings, &workload).unwrap()
    };
    let (half, all) = (play(4_500), play(16_000));
    assert!(half.hit_rate < 0.1, "{half:?}");
    assert!(all.hit_rate > 0.9, "{all:?}");
    assert!(all.turns_per_second > half.turns_per_second, "{all:?}");
}

/// What a first-come queue under LRU makes of tiers that hold half of the conversations, and what the defaults make of them: the model
/// serves one turn at a time, so the ideal is that half of the users always find their state.
#[test]
fn the_defaults_keep_a_saturated_server_useful() {
    let shape = Shape::Saturation { context: 3_000, think: 4.0 };
    let workload = Workload::Generated { shape, pace: Pace::Users { users: 96, arrival: 4.0 }, seconds: 120.0 };
    let chunks = 96 * 3_000 / 32;
    let play = |queue, protect_queued| {
        let mut settings = settings(chunks / 8, chunks * 54 / 100 - chunks / 8, 120.0);
        settings.costs = machine("saturation", 32).unwrap();
        settings.max_running = 1;
        settings.warmup = 20.0;
        settings.queue = queue;
        settings.protect_queued = protect_queued;
        simulate(&settings, &workload).unwrap()
    };
    let first_come = play(QueueOrder::Arrival, false);
    let default = play(QueueOrder::CacheAware { age_bound: Duration::from_secs(15) }, true);
    assert!(first_come.hit_rate < 0.1, "{first_come:?}");
    assert!(default.hit_rate > 0.55, "{default:?}");
    assert!(default.turns_per_second > 1.5 * first_come.turns_per_second, "{first_come:?} {default:?}");
    // Nobody starves: past the age bound a turn waits for those before it only.
    assert!(default.queued_seconds.p99 < 2.0 * first_come.queued_seconds.p99, "{first_come:?} {default:?}");
}

#[test]
fn sessions_are_rebuilt_from_hash_ids() {
    // A system prompt in block 0; one conversation of three turns, and another request between them.
    let text = r#"{"timestamp": 0, "input_length": 1200, "output_length": 100, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 3, 4]}
{"timestamp": 9000, "input_length": 1400, "output_length": 200, "hash_ids": [0, 1, 5]}
{"timestamp": 20000, "input_length": 2000, "output_length": 10, "hash_ids": [0, 1, 6, 7]}
"#;
    let requests = mooncake_requests(text).unwrap();
    let sessions: Vec<_> = requests.iter().map(|r| r.session).collect();
    assert_eq!(sessions, [0, 1, 0, 0]);
    let pasts: Vec<_> = requests.iter().map(|r| r.num_past).collect();
    assert_eq!(pasts, [0, 512, 1299, 1599]);
    let tokens = |index: usize, range: std::ops::Range<usize>| requests[index].log.tokens(range);
    // A turn's prompt begins with the prompt and the reply before it.
    assert_eq!(tokens(0, 0..1300), tokens(2, 0..1300));
    assert_eq!(tokens(2, 0..1600), tokens(3, 0..1600));
    assert_eq!(tokens(0, 0..512), tokens(1, 0..512));
    assert_ne!(tokens(0, 512..1100), tokens(1, 512..1100));
    let report = simulate(
        &settings(1_000, 1_000, 100.0),
        &Workload::Requests { requests: requests.into(), speed: 1.0, share: 1.0, seconds: 100.0 },
    )
    .unwrap();
    assert_eq!((report.turns, report.tokens.new), (4, 1200 + 1100 - 512 + 101 + 401), "{report:?}");
    assert_sources_sum_to_input(&report);
}

#[test]
fn a_hash_id_missing_is_refused() {
    let refusal = mooncake_requests(r#"{"timestamp": 0, "input_length": 1200, "output_length": 1, "hash_ids": [0]}"#);
    assert_eq!(format!("{:#}", refusal.unwrap_err()), "line 1: 1 hash ids for 1200 tokens");
}

#[test]
fn logs_of_different_conversations_differ() {
    let (one, other) = (Log::Own { seed: 1 }, Log::Own { seed: 2 });
    assert_eq!(one.tokens(0..100), one.tokens(0..100));
    assert_ne!(one.tokens(0..32), other.tokens(0..32));
}

#[test]
fn what_cannot_be_simulated_names_its_flag() {
    let refusal = |settings: Settings| simulate(&settings, &chats(1, 0.0, 1.0)).unwrap_err().to_string();
    assert!(refusal(settings(0, 1, 1.0)).starts_with("--device-chunks 0"));
    assert!(refusal(settings(100, 1, 1.0).with_policy("mru"))
        .starts_with("--policy mru: must be one of return_probability, "));
    assert!(refusal(Settings { step_tokens: 8, ..settings(100, 1, 1.0) }).starts_with("--step-tokens 8"));
    for name in MACHINES {
        assert_eq!(machine(name, 32).unwrap().tiers.len(), 2);
    }
    assert!(matches!(machine("abacus", 32), Err(SimulateError::Settings(_))));
}
