//! Closed-loop replay of a trace: each user plays one conversation after another, with think time, for a window of
//! time. The same accounting as the project's HTTP replay client, with random token ids instead of words.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use futures_util::future::join_all;
use keepsake_config::TierConfig;
use rand::rngs::StdRng;
use rand::SeedableRng;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::trace::{Conversation, TraceTurn};

use super::measure::{Bench, Play, Played};
use super::report::{mean, percentile, print, round};

/// Users start this far apart.
const STAGGER: Duration = Duration::from_millis(20);
/// Thinking that would outlast the window ends this much after it.
const GRACE: Duration = Duration::from_millis(10);

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Replay this trace (JSON lines as chat_trace.py writes them) instead of measuring rates
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Users of the replay, each in one conversation at a time
    #[arg(long, value_name = "N", default_value_t = 8, requires = "trace", value_parser = clap::value_parser!(u32).range(1..))]
    pub users: u32,
    /// Seconds of replay before anything is counted
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0, requires = "trace", value_parser = seconds)]
    pub warm: f64,
    /// Seconds that are counted
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, requires = "trace", value_parser = seconds)]
    pub window: f64,
    /// Cap on a turn's output tokens; without it, the trace's own
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_output: Option<u32>,
    /// Label copied into the output
    #[arg(long, value_name = "TEXT", requires = "trace")]
    pub label: Option<String>,
}

/// Any time that makes sense, and none that a `Duration` cannot hold.
fn seconds(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match (0.0..=1e6).contains(&value) {
        true => Ok(value),
        false => Err("must be 0 to 1e6".to_owned()),
    }
}

pub(super) async fn run(
    bench: &Bench,
    args: &ReplayArgs,
    seed: u64,
    trace: Vec<Conversation>,
    tiers: &[TierConfig],
) -> anyhow::Result<()> {
    let from = Instant::now() + Duration::from_secs_f64(args.warm);
    let replay = Replay {
        bench,
        max_output: args.max_output.unwrap_or(u32::MAX),
        window: Window { from, to: from + Duration::from_secs_f64(args.window) },
        queue: RefCell::new(trace.into()),
        tally: RefCell::default(),
    };
    join_all((0..args.users).map(|number| replay.play_user(number, seed))).await;
    if Instant::now() < replay.window.to {
        tracing::warn!("the trace ended before the window: use a longer one");
    }
    print(&Report::new(args, &replay.tally.into_inner(), tiers))
}

#[derive(Clone, Copy)]
struct Window {
    from: Instant,
    to: Instant,
}

struct Replay<'a> {
    bench: &'a Bench,
    max_output: u32,
    window: Window,
    queue: RefCell<VecDeque<Conversation>>,
    tally: RefCell<Tally>,
}

/// What is counted, over all users.
#[derive(Default)]
struct Tally {
    turns: Vec<CountedTurn>,
    /// Output tokens that came within the window, also of turns that lie partly outside.
    tokens_in_window: f64,
    short: usize,
    errors: Vec<String>,
}

/// A turn that lies wholly in the window.
#[derive(Clone, Debug, Default)]
struct CountedTurn {
    is_later: bool,
    ttft: f64,
    seconds_per_token: f64,
    input: u64,
    cached: u64,
    recomputed: u64,
    cached_by_tier: Vec<(String, u32)>,
}

impl Replay<'_> {
    async fn play_user(&self, number: u32, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed.wrapping_mul(1000).wrapping_add(u64::from(number)));
        actix::clock::sleep(STAGGER * number).await;
        while Instant::now() < self.window.to {
            let next = self.queue.borrow_mut().pop_front();
            let Some(conversation) = next else { return };
            self.play_conversation(&conversation, &mut random).await;
        }
    }

    /// Until its end, an error, or the window's end.
    async fn play_conversation(&self, conversation: &Conversation, random: &mut StdRng) {
        let mut parent = None;
        for (index, turn) in conversation.turns.iter().enumerate() {
            self.think(turn).await;
            if Instant::now() >= self.window.to {
                return;
            }
            let output = turn.output.min(self.max_output);
            let prompt = self.bench.random_tokens(random, turn.input as usize);
            match self.bench.play(Play { parent, prompt, output, store: true }).await {
                Ok(played) => {
                    parent = Some(played.id);
                    self.tally.borrow_mut().count(&played, index > 0, output, self.window);
                }
                Err(error) => {
                    self.tally.borrow_mut().errors.push(error.to_string());
                    return;
                }
            }
        }
    }

    async fn think(&self, turn: &TraceTurn) {
        if turn.think_s > 0.0 {
            let rest = self.window.to.saturating_duration_since(Instant::now()) + GRACE;
            actix::clock::sleep(Duration::from_secs_f64(turn.think_s).min(rest)).await;
        }
    }
}

impl Tally {
    fn count(&mut self, played: &Played, is_later: bool, wanted: u32, window: Window) {
        let usage = &played.usage;
        let is_inside = |time: &&Instant| (window.from..window.to).contains(*time);
        // Tokens are not events: a piece of text may be several. They count as spread evenly over the pieces.
        let pieces = match played.pieces.as_slice() {
            [] => std::slice::from_ref(&played.ended),
            pieces => pieces,
        };
        let share = pieces.iter().filter(is_inside).count() as f64 / pieces.len() as f64;
        self.tokens_in_window += f64::from(usage.output_tokens) * share;
        self.short += usize::from(usage.output_tokens < wanted);
        if played.started >= window.from && played.ended <= window.to {
            self.turns.push(CountedTurn {
                is_later,
                ttft: played.ttft().as_secs_f64(),
                seconds_per_token: played.elapsed().as_secs_f64() / f64::from(usage.output_tokens.max(1)),
                input: u64::from(usage.input_tokens),
                cached: u64::from(usage.cached_tokens),
                recomputed: u64::from(usage.recomputed_tokens),
                cached_by_tier: usage.cached_by_tier.clone(),
            });
        }
    }
}

/// The line that is printed: the fields of the HTTP replay client in its order, then this client's own.
#[derive(Debug, Serialize)]
struct Report {
    label: String,
    api: &'static str,
    users: u32,
    turns: usize,
    turns_s: f64,
    out_tok_s: f64,
    ttft_p50: Option<f64>,
    ttft_p90: Option<f64>,
    ttft_p99: Option<f64>,
    later_ttft_p50: Option<f64>,
    later_ttft_p90: Option<f64>,
    norm_ms_p50: f64,
    norm_ms_p90: f64,
    norm_ms_mean: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    short: usize,
    errors: usize,
    /// At most one.
    first_error: Vec<String>,
    /// Prompt tokens of the counted turns by where their K/V came from: each tier, `recomputed`, `new`.
    tokens: Map<String, Value>,
}

impl Report {
    fn new(args: &ReplayArgs, tally: &Tally, tiers: &[TierConfig]) -> Self {
        let turns = &tally.turns;
        let ttfts: Vec<f64> = turns.iter().map(|turn| turn.ttft).collect();
        let later: Vec<f64> = turns.iter().filter(|turn| turn.is_later).map(|turn| turn.ttft).collect();
        let norms: Vec<f64> = turns.iter().map(|turn| turn.seconds_per_token).collect();
        let seconds = |value: Option<f64>| value.map(|value| round(value, 4));
        let milliseconds = |value: Option<f64>| round(1e3 * value.unwrap_or(0.0), 2);
        // A window of no length has no rate.
        let per_second = |count: f64, digits| round(count / args.window.max(f64::MIN_POSITIVE), digits);
        Self {
            label: args.label.clone().unwrap_or_default(),
            api: "in-process",
            users: args.users,
            turns: turns.len(),
            turns_s: per_second(turns.len() as f64, 3),
            out_tok_s: per_second(tally.tokens_in_window, 1),
            ttft_p50: seconds(percentile(&ttfts, 0.5)),
            ttft_p90: seconds(percentile(&ttfts, 0.9)),
            ttft_p99: seconds(percentile(&ttfts, 0.99)),
            later_ttft_p50: seconds(percentile(&later, 0.5)),
            later_ttft_p90: seconds(percentile(&later, 0.9)),
            norm_ms_p50: milliseconds(percentile(&norms, 0.5)),
            norm_ms_p90: milliseconds(percentile(&norms, 0.9)),
            norm_ms_mean: milliseconds(mean(&norms)),
            prompt_tokens: turns.iter().map(|turn| turn.input).sum(),
            cached_tokens: turns.iter().map(|turn| turn.cached).sum(),
            short: tally.short,
            errors: tally.errors.len(),
            first_error: tally.errors.first().cloned().into_iter().collect(),
            tokens: tokens_by_source(turns, tiers),
        }
    }
}

fn tokens_by_source(turns: &[CountedTurn], tiers: &[TierConfig]) -> Map<String, Value> {
    let mut tokens = Map::new();
    // A tier that held nothing is a 0, not an absence.
    for tier in tiers {
        let in_tier = turns.iter().flat_map(|turn| &turn.cached_by_tier).filter(|(name, _)| name == tier.name());
        let sum: u64 = in_tier.map(|(_, count)| u64::from(*count)).sum();
        tokens.insert(tier.name().to_owned(), sum.into());
    }
    let recomputed: u64 = turns.iter().map(|turn| turn.recomputed).sum();
    let new: u64 = turns.iter().map(|turn| turn.input.saturating_sub(turn.cached + turn.recomputed)).sum();
    tokens.insert("recomputed".to_owned(), recomputed.into());
    tokens.insert("new".to_owned(), new.into());
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::session::{TurnId, TurnUsage};
    use keepsake_config::Config;

    fn args(window: f64) -> ReplayArgs {
        ReplayArgs { trace: None, users: 2, warm: 0.0, window, max_output: None, label: None }
    }

    fn played(started: Instant, seconds: &[u64], output_tokens: u32) -> Played {
        let at = |&second: &u64| started + Duration::from_secs(second);
        let pieces: Vec<Instant> = seconds.iter().map(at).collect();
        let usage = TurnUsage {
            input_tokens: 100,
            cached_tokens: 64,
            output_tokens,
            cached_by_tier: vec![("device".into(), 32), ("rocks".into(), 32)],
            recomputed_tokens: 16,
            ttft: Duration::from_secs(1),
        };
        let ended = pieces.last().copied().unwrap_or(started);
        Played { id: TurnId([0; 16]), started, ended, pieces, usage }
    }

    #[test]
    fn a_turn_counts_whole_and_its_tokens_by_when_they_came() {
        let from = Instant::now();
        let window = Window { from, to: from + Duration::from_secs(10) };
        let mut tally = Tally::default();
        tally.count(&played(from, &[1, 2, 3, 4], 8), true, 8, window);
        // Half of this one's tokens came after the window, and it ended short.
        tally.count(&played(from, &[8, 9, 10, 11], 8), false, 9, window);
        let report = Report::new(&args(10.0), &tally, &Config::default().tiers);
        assert_eq!((report.turns, report.turns_s, report.out_tok_s, report.short), (1, 0.1, 1.2, 1));
        assert_eq!((report.ttft_p50, report.later_ttft_p90), (Some(1.0), Some(1.0)));
        assert_eq!((report.norm_ms_p50, report.norm_ms_mean), (500.0, 500.0));
        let expected = r#"{"device":32,"dram":0,"rocks":32,"recomputed":16,"new":20}"#;
        assert_eq!(Value::Object(report.tokens).to_string(), expected);
    }

    #[test]
    fn a_replay_without_turns_is_a_line_of_nothing() {
        let tally = Tally { errors: vec!["a".into(), "b".into()], ..Tally::default() };
        let report = serde_json::to_value(Report::new(&args(0.0), &tally, &Config::default().tiers)).unwrap();
        assert_eq!((&report["ttft_p50"], &report["norm_ms_p50"]), (&Value::Null, &0.0.into()));
        assert_eq!((&report["out_tok_s"], &report["errors"]), (&0.0.into(), &2.into()));
        assert_eq!(report["first_error"], serde_json::json!(["a"]));
    }

    #[test]
    fn times_of_the_command_line() {
        assert_eq!(seconds("2.5"), Ok(2.5));
        for text in ["-1", "nan", "inf", "1e9", "x"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
