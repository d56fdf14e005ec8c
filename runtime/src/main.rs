//! The `keepsake` binary: parse, run, and one line on stderr if that fails.

use std::process::ExitCode;

use clap::Parser;
use keepsake_runtime::cli;

fn main() -> ExitCode {
    match cli::run(cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let line = format!("{error:#}");
            eprintln!("{}", line.split_whitespace().collect::<Vec<_>>().join(" "));
            cli::exit_code(&error)
        }
    }
}
