//! The range checks that the sections share, all with the same wording.

use std::time::Duration;

use bytesize::ByteSize;

use crate::units::format_size;
use crate::ConfigError;

pub(crate) fn number_in(path: &str, value: usize, least: usize, most: usize) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(ConfigError::invalid(path, value.to_string(), format!("must be {least} to {most}")))
}

pub(crate) fn size_in(path: &str, value: ByteSize, least: ByteSize, most: ByteSize) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let reason = format!("must be {} to {}", format_size(least), format_size(most));
    Err(ConfigError::invalid(path, quoted_size(value), reason))
}

pub(crate) fn duration_in(path: &str, value: Duration, least: Duration, most: Duration) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let reason = format!("must be {} to {}", short(least), short(most));
    Err(ConfigError::invalid(path, format!("{:?}", short(value)), reason))
}

/// A share of something: 0 to `most`, and a number.
pub(crate) fn fraction(path: &str, value: f64, most: f64) -> Result<(), ConfigError> {
    // NaN is in no range.
    if (0.0..=most).contains(&value) {
        return Ok(());
    }
    Err(ConfigError::invalid(path, format!("{value:?}"), format!("must be 0 to {most}")))
}

pub(crate) fn not_empty(path: &str, text: &str) -> Result<(), ConfigError> {
    if !text.trim().is_empty() {
        return Ok(());
    }
    Err(ConfigError::invalid(path, format!("{text:?}"), "must not be empty"))
}

pub(crate) fn quoted_size(size: ByteSize) -> String {
    format!("\"{}\"", format_size(size))
}

/// Whole seconds at most: a range is stated, not a measurement.
fn short(duration: Duration) -> String {
    match duration.as_secs() {
        0 => format!("{}ms", duration.as_millis()),
        seconds if seconds % 86_400 == 0 => format!("{}days", seconds / 86_400),
        seconds if seconds % 3600 == 0 => format!("{}h", seconds / 3600),
        seconds if seconds % 60 == 0 => format!("{}m", seconds / 60),
        seconds => format!("{seconds}s"),
    }
}
