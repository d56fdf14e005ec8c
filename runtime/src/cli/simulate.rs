//! `keepsake simulate`: traffic played against the server's own core, on a virtual clock.
//!
//! Needs no model and no device. Results go to standard output: one JSON object, or a table of many runs.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{bail, Context};
use clap::{Args, Subcommand, ValueEnum};

use crate::core::{Costs, QueueOrder};
use crate::simulate::machine::{machine, MACHINES};
use crate::simulate::settings::{policy_names, Settings, TierSettings, BELADY, CLAIRVOYANT};
use crate::simulate::sweep::{sweep, Sweep};
use crate::simulate::table::{table, Table};
use crate::simulate::traffic::{Pace, Shape, Workload};
use crate::simulate::{simulate, simulate_with_ceiling};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SimulateArgs {
    #[command(subcommand)]
    command: Option<SimulateCommand>,
    #[command(flatten)]
    run: RunArgs,
    /// Also play the two policies that know the future, and print what share of the better one's savings this policy reaches
    #[arg(long)]
    ceiling: bool,
}

#[derive(Debug, Subcommand)]
enum SimulateCommand {
    /// Policies by tier sizes by seeds: a CSV file, and a plot of recompute cost against tier size
    Sweep(Box<SweepArgs>),
    /// Four workloads by three tier sizes by policies by seeds: a Markdown table of recompute cost relative to LRU
    Table(TableArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A conversation a line, as `chat_trace.py` writes it
    Chat,
    /// A request a line, with hash ids of 512-token blocks
    Mooncake,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Generated {
    /// Chats of up to 4K tokens
    Short,
    /// The same, of which every fifth begins with a document of 4-60K tokens
    Long,
    /// Conversations of `--context` tokens that never end: the same as `--saturation`
    Saturation,
}

#[derive(Clone, Debug, Args)]
struct RunArgs {
    /// Play the conversations or requests of this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t = Format::Chat)]
    format: Format,
    /// Play made-up conversations
    #[arg(long, value_enum, conflicts_with = "trace")]
    workload: Option<Generated>,
    /// Play a closed loop of users whose conversations do not fit: short for `--workload saturation --machine saturation`
    #[arg(long, conflicts_with_all = ["trace", "workload"])]
    saturation: bool,
    /// Users, each with one conversation at a time
    #[arg(long, value_name = "N", default_value_t = 128, conflicts_with = "turns_per_second")]
    users: usize,
    /// Seconds over which the users' first turns are spread
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    arrival: f64,
    /// Instead of users: conversations that begin at random moments, at this rate of turns
    #[arg(long, value_name = "RATE")]
    turns_per_second: Option<f64>,
    /// Mean of the exponential pauses in made-up conversations, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    think: f64,
    /// Tokens of a conversation of the saturation workload
    #[arg(long, value_name = "TOKENS", default_value_t = 7_000)]
    context: usize,
    /// A request trace is played so many times as fast
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speed: f64,
    /// Share of a request trace's sessions that are played; which ones depends on the seed
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    share: f64,
    /// Virtual seconds in which turns are sent; without it, 600, or a trace to its end
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Turns sent in the first seconds are played and not counted
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    warmup: f64,
    /// Eviction policy of the device and of all tiers
    #[arg(long, value_name = "NAME", default_value = "lru")]
    policy: String,
    #[arg(long, value_name = "NAME")]
    device_policy: Option<String>,
    #[arg(long, value_name = "NAME")]
    dram_policy: Option<String>,
    #[arg(long, value_name = "NAME")]
    rocks_policy: Option<String>,
    #[arg(long, value_name = "N", default_value_t = 4_096)]
    device_chunks: usize,
    /// 0: no such tier
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    dram_chunks: usize,
    /// 0: no such tier. Four fifths of it are used
    #[arg(long, value_name = "N", default_value_t = 0)]
    rocks_chunks: usize,
    #[arg(long, value_name = "TOKENS", default_value_t = 32)]
    chunk_tokens: usize,
    /// Costs of a preset machine: cpu, h200-13b, h200-8b or saturation
    #[arg(long, value_name = "NAME", conflicts_with = "costs")]
    machine: Option<String>,
    /// Costs as `keepsake calibrate` writes them, for chunks of `--chunk-tokens`
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    #[arg(long, value_name = "TOKENS", default_value_t = 131_072)]
    max_context: usize,
    #[arg(long, value_name = "N")]
    max_running: Option<usize>,
    /// Turns that may wait; further ones are refused
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    max_waiting: usize,
    #[arg(long, value_name = "TOKENS", default_value_t = 2_048)]
    step_tokens: usize,
    #[arg(long, value_name = "N", default_value_t = 1)]
    steps_in_flight: usize,
    /// Fraction of device chunks that admission leaves for replies
    #[arg(long, value_name = "FRACTION", default_value_t = 0.1)]
    reserve: f64,
    /// Copy chunks down ahead of time below this fraction of available device chunks
    #[arg(long, value_name = "FRACTION", default_value_t = 0.25)]
    swap_out_below: f64,
    /// A load that takes longer is computed
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    load_timeout: f64,
    #[arg(long, value_name = "N", default_value_t = 64)]
    moves_in_flight: usize,
    /// Who goes first when turns wait
    #[arg(long, value_name = "ORDER", default_value = "cache-aware")]
    queue: Order,
    /// Chunks idle for so many seconds go first, whatever they cost
    #[arg(long, value_name = "SECONDS")]
    idle_cutoff: Option<f64>,
    /// Evict what queued turns will use like everything else
    #[arg(long)]
    unprotected: bool,
    /// With a cache-aware queue: a turn that has waited for so many seconds is not overtaken any more
    #[arg(long, value_name = "SECONDS", default_value_t = 25.0)]
    age_bound: f64,
    /// How often a refused user tries again
    #[arg(long, value_name = "N", default_value_t = 0)]
    retries: u32,
    /// Seconds between a refusal and the next try
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    retry_after: f64,
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Check all invariants of the core at every Nth moment; 0: at the end only
    #[arg(long, value_name = "N", default_value_t = 0)]
    check_every: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Order {
    Fcfs,
    CacheAware,
}

#[derive(Debug, Args)]
struct SweepArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Policies to compare; without it, all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    policies: Vec<String>,
    /// Sizes of the first tier below the device, in chunks
    #[arg(long, value_name = "CHUNKS", value_delimiter = ',', required = true)]
    sizes: Vec<usize>,
    /// Seeds, counted from `--seed`
    #[arg(long, value_name = "N", default_value_t = 3)]
    seeds: u64,
    #[arg(long, value_name = "FILE")]
    csv: PathBuf,
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
}

#[derive(Debug, Args)]
struct TableArgs {
    /// The request trace of the third workload; without it, that workload is left out
    #[arg(long, value_name = "FILE")]
    mooncake: Option<PathBuf>,
    /// Policies to compare; without it, all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    policies: Vec<String>,
    #[arg(long, value_name = "N", default_value_t = 5)]
    seeds: u64,
}

pub(super) fn run(args: SimulateArgs) -> anyhow::Result<()> {
    match args.command {
        None => run_once(&args.run, args.ceiling),
        Some(SimulateCommand::Sweep(args)) => {
            let (settings, workload) = args.run.read()?;
            let Sweep { csv, svg } = sweep(&settings, &workload, &policies(args.policies), &args.sizes, args.seeds)?;
            write(&args.csv, &csv)?;
            write(&args.svg, &svg)
        }
        Some(SimulateCommand::Table(args)) => {
            let Table { markdown } = table(args.mooncake.as_deref(), &policies(args.policies), args.seeds)?;
            print(&markdown)
        }
    }
}

fn run_once(args: &RunArgs, ceiling: bool) -> anyhow::Result<()> {
    let (settings, workload) = args.read()?;
    let line = match ceiling {
        true => serde_json::to_string(&simulate_with_ceiling(&settings, &workload)?),
        false => serde_json::to_string(&simulate(&settings, &workload)?),
    };
    print(&format!("{}\n", line.context("a result could not be written as JSON")?))
}

/// All that a server can run, unless some were named.
fn policies(named: Vec<String>) -> Vec<String> {
    match named.is_empty() {
        true => policy_names().into_iter().filter(|p| *p != CLAIRVOYANT && *p != BELADY).map(str::to_owned).collect(),
        false => named,
    }
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write the result")
}

fn write(file: &std::path::Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

impl RunArgs {
    fn read(&self) -> anyhow::Result<(Settings, Workload)> {
        let is_saturation = self.saturation || self.workload == Some(Generated::Saturation);
        let seconds = self.seconds.unwrap_or(if self.trace.is_some() { 1e9 } else { 600.0 });
        let pace = match self.turns_per_second {
            Some(rate) => Pace::TurnsPerSecond(rate),
            None => Pace::Users { users: self.users, arrival: self.arrival },
        };
        let generated = |shape| Workload::Generated { shape, pace, seconds };
        let workload = match (&self.trace, self.workload) {
            (Some(file), _) if self.format == Format::Mooncake => {
                Workload::mooncake(file, self.speed, self.share, seconds)?
            }
            (Some(file), _) => Workload::chat_trace(file, pace)?,
            _ if is_saturation => generated(Shape::Saturation { context: self.context, think: self.think }),
            (_, Some(Generated::Long)) => generated(Shape::Chat { think: self.think, long: 0.2 }),
            (_, Some(_)) => generated(Shape::Chat { think: self.think, long: 0.0 }),
            (None, None) => bail!("nothing to play: give --trace, --workload or --saturation"),
        };
        if !(self.think > 0.0 && self.think <= 1e9) {
            bail!("--think {}: must be above 0, at most 1e9", self.think);
        }
        if self.chunk_tokens == 0 {
            bail!("--chunk-tokens 0: must be at least 1");
        }
        Ok((self.settings(is_saturation, seconds)?, workload))
    }

    fn settings(&self, is_saturation: bool, seconds: f64) -> anyhow::Result<Settings> {
        let default_machine = if is_saturation { "saturation" } else { "h200-8b" };
        debug_assert!(MACHINES.contains(&default_machine));
        let costs = match &self.costs {
            Some(file) => read_costs(file)?,
            None => machine(self.machine.as_deref().unwrap_or(default_machine), self.chunk_tokens)?,
        };
        let policy = |own: &Option<String>| own.as_ref().unwrap_or(&self.policy).clone();
        let tier = |name, chunks, own, durable| TierSettings { name, chunks, policy: policy(own), durable };
        Ok(Settings {
            chunk_tokens: self.chunk_tokens,
            device_chunks: self.device_chunks,
            device_policy: policy(&self.device_policy),
            tiers: vec![
                tier("dram", self.dram_chunks, &self.dram_policy, false),
                tier("rocks", self.rocks_chunks, &self.rocks_policy, true),
            ],
            costs,
            max_context: self.max_context,
            // The saturated model serves one turn at a time.
            max_running: self.max_running.unwrap_or(if is_saturation { 1 } else { Settings::default().max_running }),
            max_waiting: self.max_waiting,
            step_tokens: self.step_tokens,
            steps_in_flight: self.steps_in_flight,
            reserve: self.reserve,
            swap_out_below: self.swap_out_below,
            load_timeout: Duration::try_from_secs_f64(self.load_timeout).context("--load-timeout")?,
            protect_queued: !self.unprotected,
            idle_cutoff: match self.idle_cutoff {
                Some(seconds) => Some(Duration::try_from_secs_f64(seconds).context("--idle-cutoff")?),
                None => None,
            },
            queue: match self.queue {
                Order::Fcfs => QueueOrder::Arrival,
                Order::CacheAware => QueueOrder::CacheAware {
                    age_bound: Duration::try_from_secs_f64(self.age_bound).context("--age-bound")?,
                },
            },
            moves_in_flight: self.moves_in_flight,
            seed: self.seed,
            seconds,
            warmup: self.warmup,
            retries: self.retries,
            retry_after: self.retry_after,
            check_every: self.check_every,
        })
    }
}

fn read_costs(file: &std::path::Path) -> anyhow::Result<Costs> {
    let text = std::fs::read_to_string(file).with_context(|| format!("--costs {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| format!("--costs {}", file.display()))
}
