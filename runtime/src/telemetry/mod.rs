//! Logs and metrics. May depend on config only; everybody else depends on it.

pub mod metrics;

use std::io::IsTerminal;

use keepsake_config::{LogFormat, TelemetryConfig};
use tracing_subscriber::EnvFilter;

/// `telemetry.log` is not a filter.
#[derive(Debug, thiserror::Error)]
#[error("config: telemetry.log = {filter:?}: {reason}")]
pub struct InvalidFilter {
    filter: String,
    reason: String,
}

/// Sends logs to standard error, one line an event. The second call in a process changes nothing (tests start several servers).
pub fn init(config: &TelemetryConfig) -> Result<(), InvalidFilter> {
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|error| InvalidFilter { filter: config.log.clone(), reason: error.to_string() })?
        // It logs every stranger's malformed request head as an error of the server.
        .add_directive("actix_http=off".parse().expect("a valid directive"));
    let is_terminal = std::io::stderr().is_terminal();
    let subscriber =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(is_terminal);
    let installed = match config.format {
        LogFormat::Text => subscriber.try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    if installed.is_err() {
        tracing::debug!("a log subscriber was installed already");
    }
    Ok(())
}
