//! `keepsake bench`: prefill and decode rates, or a replay of a trace, without HTTP.
//!
//! Runs the server's own engine in this process and is a client of its gateway, so it measures scheduling, tiers and
//! the turn store too. Results go to standard output, a JSON object a line. Invariant: the user's state is not touched,
//! see `scratch.rs`.

mod measure;
mod rates;
mod replay;
mod report;
mod scratch;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{bail, Context};
use clap::Args;
use keepsake_config::{Config, Machine, TelemetryConfig};

use crate::app::Engine;
use crate::trace::{self, Conversation};
use measure::Bench;
use rates::RatesArgs;
use replay::ReplayArgs;
use scratch::Scratch;

/// How long the engine may take to flush what nobody will read.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// As of the server.
const PANIC_EXIT_CODE: i32 = 70;

const ABOUT_STATE: &str = "\
Prints a JSON object a line. The tiers are the configured ones, but durable tiers and stored
turns live in a new folder that is removed at the end, whatever paths the configuration names:
the bench neither reads nor changes the state of a server.";

#[derive(Debug, Args)]
#[command(after_help = ABOUT_STATE)]
pub struct BenchArgs {
    /// Configuration file; without it, the defaults and the environment
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// GGUF file or Hugging Face folder to measure, instead of the configured model
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Where to make the folder for durable tiers, on the disk to be measured; without it, the user's cache folder
    #[arg(long, value_name = "FOLDER")]
    pub scratch: Option<PathBuf>,
    #[command(flatten)]
    pub rates: RatesArgs,
    #[command(flatten)]
    pub replay: ReplayArgs,
    /// Seed of the random token ids
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

pub(super) fn run(args: BenchArgs) -> anyhow::Result<()> {
    let trace = match &args.replay.trace {
        Some(file) => Some(trace::read(file)?),
        None => None,
    };
    let mut config = Config::read(args.config.as_deref())?;
    if let Some(model) = &args.model {
        config.model.path = Some(model.clone());
        config.model.dummy = None;
    }
    if trace.is_none() {
        args.rates.make_room(&mut config);
    }
    let scratch = Scratch::new(args.scratch.as_deref())?;
    scratch.redirect(&mut config)?;
    config.validate(&Machine::this())?;
    init_logs(&config.telemetry)?;
    end_on_panic();
    actix::System::new().block_on(measure(&args, config, trace))
}

async fn measure(args: &BenchArgs, config: Config, trace: Option<Vec<Conversation>>) -> anyhow::Result<()> {
    let device = measure::device_name(&config)?;
    let engine = Engine::start(&config)?;
    let bench = Bench::new(engine.gateway.clone(), device)?;
    let measured = async {
        match trace {
            Some(trace) => replay::run(&bench, &args.replay, args.seed, trace, &config.tiers).await,
            None => rates::run(&bench, &args.rates, args.seed).await,
        }
    };
    let result = tokio::select! {
        result = measured => result,
        result = stop_signal() => result,
    };
    engine.stop(Instant::now() + STOP_TIMEOUT).await;
    result
}

/// Unlike the end of the process, an error still removes the scratch folder.
async fn stop_signal() -> anyhow::Result<()> {
    use tokio::signal::unix::{signal, SignalKind};
    let mut terminate = signal(SignalKind::terminate()).context("cannot watch for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot watch for signals")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    bail!("interrupted")
}

/// Only warnings, unless the user chose a filter: the results are what this command has to say.
fn init_logs(configured: &TelemetryConfig) -> anyhow::Result<()> {
    let mut telemetry = configured.clone();
    if telemetry.log == TelemetryConfig::default().log {
        telemetry.log = "warn".to_owned();
    }
    Ok(crate::telemetry::init(&telemetry)?)
}

/// An engine that lost a thread would never finish a turn.
fn end_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::exit(PANIC_EXIT_CODE);
    }));
}
