//! The command line: `keepsake serve | chat | bench | calibrate | simulate | model fetch | config check | config default`.
//!
//! May depend on everything in this crate; nothing depends on it. Each command is one file with its arguments; this
//! one only dispatches. Every failure is one line on stderr, see [`exit_code`].

pub mod bench;
mod calibrate;
pub mod chat;
mod config;
mod fetch;
mod serve;
mod simulate;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use keepsake_config::ConfigError;
use keepsake_tiers::TierError;

use crate::telemetry::InvalidFilter;

pub use fetch::resolve_model;

/// A stateful LLM server: conversations stay on the server, a new turn costs only its new tokens.
#[derive(Debug, Parser)]
#[command(name = "keepsake", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the HTTP API.
    Serve(serve::ServeArgs),
    /// Chat in the terminal with a running server.
    Chat(chat::ChatArgs),
    /// Measure this machine, without HTTP.
    Bench(bench::BenchArgs),
    /// Play traffic against the scheduler on a virtual clock, without a model.
    Simulate(Box<simulate::SimulateArgs>),
    /// Measure what work costs on this machine, or print what was measured.
    Calibrate(calibrate::CalibrateArgs),
    /// Models on this machine.
    #[command(subcommand)]
    Model(fetch::ModelCommand),
    /// Configuration files.
    #[command(subcommand)]
    Config(config::ConfigCommand),
}

/// Runs the command to its end.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Serve(args) => serve::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Simulate(args) => simulate::run(*args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Model(command) => fetch::run(command),
        Command::Config(command) => config::run(command),
    }
}

/// 2 for a configuration that cannot be used (as clap does for arguments), 1 for everything else.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    let is_config = |cause: &(dyn Error + 'static)| {
        let of_a_tier = cause.downcast_ref::<TierError>();
        cause.is::<ConfigError>() || cause.is::<InvalidFilter>() || matches!(of_a_tier, Some(TierError::Config(_)))
    };
    ExitCode::from(if error.chain().any(is_config) { 2 } else { 1 })
}
