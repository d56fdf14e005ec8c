//! `keepsake config check FILE` and `keepsake config default`.

use std::io::Write;
use std::path::PathBuf;

use clap::Subcommand;
use keepsake_config::{Config, ConfigError, DEFAULT_TOML};
use keepsake_tiers::Registry;

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a file, with the environment's overrides, against this machine
    Check { file: PathBuf },
    /// Print the defaults as a commented file
    Default,
}

pub(super) fn run(command: ConfigCommand) -> anyhow::Result<()> {
    match command {
        ConfigCommand::Check { file } => {
            let config = Config::load(Some(&file))?;
            check_tier_kinds(&config)?;
            // Also the check of the log filter.
            crate::telemetry::init(&config.telemetry)?;
            println!("{}: ok", file.display());
        }
        // Not `print!`: a pager that quits early is no error of ours.
        ConfigCommand::Default => drop(std::io::stdout().write_all(DEFAULT_TOML.as_bytes())),
    }
    Ok(())
}

/// The config crate does not know which backends this binary has.
fn check_tier_kinds(config: &Config) -> Result<(), ConfigError> {
    let registry = Registry::default();
    let kinds: Vec<&str> = registry.kinds().collect();
    let unknown = |kind: &str| !kinds.contains(&kind);
    match config.tiers.iter().position(|tier| unknown(&tier.kind)) {
        Some(i) => {
            let reason = format!("no such kind of tier; known are {}", kinds.join(", "));
            let kind = format!("{:?}", config.tiers[i].kind);
            Err(ConfigError::invalid(format!("tiers[{i}].kind"), kind, reason))
        }
        None => Ok(()),
    }
}
