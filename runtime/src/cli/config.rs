//! `keepsake config check FILE` and `keepsake config default`.

use std::io::Write;
use std::path::PathBuf;

use clap::Subcommand;
use keepsake_config::{Config, DEFAULT_TOML};

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
            crate::app::check_names(&config)?;
            // Also the check of the log filter.
            crate::telemetry::init(&config.telemetry)?;
            println!("{}: ok", file.display());
        }
        // Not `print!`: a pager that quits early is no error of ours.
        ConfigCommand::Default => drop(std::io::stdout().write_all(DEFAULT_TOML.as_bytes())),
    }
    Ok(())
}
