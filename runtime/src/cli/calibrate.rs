//! `keepsake calibrate`: what work costs on this machine, measured or as measured before.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use keepsake_config::{Config, Machine, TelemetryConfig};

use crate::calibrate::{self, Calibration, Obtained, Origin};

const ABOUT: &str = "\
Without --force, what an earlier run or server start measured is printed. The state of a server is
neither read nor changed: durable tiers are measured in a scratch folder beside their files.";

#[derive(Debug, Args)]
#[command(after_help = ABOUT)]
pub struct CalibrateArgs {
    /// Configuration file; without it, the defaults and the environment
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Measure, whatever was measured before
    #[arg(long)]
    force: bool,
    /// Print the file's JSON instead of a table
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: CalibrateArgs) -> anyhow::Result<()> {
    let config = Config::read(args.config.as_deref())?;
    config.validate(&Machine::this())?;
    init_logs(&config.telemetry)?;
    let subject = crate::app::calibration_subject(&config)?;
    let obtained = calibrate::obtain(&subject, args.force)?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&obtained.calibration).context("numbers are JSON")? + "\n",
        false => table(&obtained),
    };
    // Not `print!`: a pager that quits early is no error of ours.
    drop(std::io::stdout().write_all(text.as_bytes()));
    Ok(())
}

/// Only warnings, unless the user chose a filter: the table is what this command has to say.
fn init_logs(configured: &TelemetryConfig) -> anyhow::Result<()> {
    let mut telemetry = configured.clone();
    if telemetry.log == TelemetryConfig::default().log {
        telemetry.log = "warn".to_owned();
    }
    Ok(crate::telemetry::init(&telemetry)?)
}

fn table(obtained: &Obtained) -> String {
    let Obtained { calibration, path, origin } = obtained;
    let mut text = String::new();
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        writeln!(text, "{arguments}").expect("writing to a string cannot fail");
    };
    let Calibration { chunk_tokens, chunk_bytes, costs, .. } = calibration;
    line(format_args!("{} on {}", calibration.model, calibration.device));
    line(format_args!("chunks of {chunk_tokens} tokens, {:.1} KiB of K/V", *chunk_bytes as f64 / 1024.0));
    line(format_args!(""));
    line(format_args!("every step: {:.3} ms", costs.step * 1e3));
    line(format_args!(""));
    line(format_args!("one chunk of a prompt, and one decode row, beyond the step:"));
    line(format_args!(
        "{:>8} {:>13} {:>9} {:>9} {:>14}",
        "context", "attention ms", "rest ms", "total ms", "decode row ms"
    ));
    for (chunk, row) in calibration.chunks.iter().zip(&calibration.decode) {
        line(format_args!(
            "{:>8} {:>13.3} {:>9.3} {:>9.3} {:>14.3}",
            chunk.context,
            chunk.attention_seconds * 1e3,
            chunk.rest_seconds * 1e3,
            chunk.total_seconds() * 1e3,
            row.seconds * 1e3
        ));
    }
    if !calibration.routes.is_empty() {
        line(format_args!(""));
        line(format_args!("{:>20} {:>11} {:>12} {:>8}", "route", "latency us", "us a chunk", "GB/s"));
    }
    for route in &calibration.routes {
        line(format_args!(
            "{:>20} {:>11.1} {:>12.1} {:>8.3}",
            format!("{} -> {}", route.from, route.to),
            route.latency_seconds * 1e6,
            route.chunk_seconds * 1e6,
            route.bytes_per_second / 1e9
        ));
    }
    for disk in &calibration.disks {
        let note = if disk.read_from_memory { " (cached pages could not be dropped)" } else { "" };
        line(format_args!(""));
        line(format_args!(
            "disk of {}: reads {:.3} GB/s{note}, writes {:.3} GB/s",
            disk.tier,
            disk.read_bytes_per_second / 1e9,
            disk.write_bytes_per_second / 1e9
        ));
    }
    line(format_args!(""));
    let verb = match origin {
        Origin::Measured => format!("measured in {:.1} s, kept in", calibration.seconds),
        Origin::File => "read from".to_owned(),
    };
    line(format_args!("{verb} {}", path.display()));
    text
}
