//! Statistics and numbers as they are printed. `percentile` and the rounding are those of the project's HTTP replay
//! client, so that numbers from both can be put side by side.

use std::io::Write;

use anyhow::Context;
use serde::Serialize;

/// Prints one result at once, for whoever follows a long run.
pub(super) fn print(result: &impl Serialize) -> anyhow::Result<()> {
    let line = serde_json::to_string(result).context("a result could not be written as JSON")?;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).context("cannot write the result")
}

/// The value with a share of `rank` of the values below it; `None` without values.
pub(super) fn percentile(values: &[f64], rank: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (sorted.len() as f64 * rank) as usize;
    sorted.get(index.min(sorted.len().saturating_sub(1))).copied()
}

/// Of an even number of values, the mean of the middle two.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    match sorted.len() % 2 {
        0 => Some((sorted[sorted.len() / 2 - 1] + upper) / 2.0),
        _ => Some(upper),
    }
}

pub(super) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

pub(super) fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(percentile(&values, 0.5), Some(3.0));
        assert_eq!(percentile(&values, 0.9), Some(4.0));
        assert_eq!(percentile(&values, 1.0), Some(4.0));
        assert_eq!(percentile(&values, 0.0), Some(1.0));
        assert_eq!(percentile(&[7.0], 0.99), Some(7.0));
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn medians_and_means() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!((median(&[]), mean(&[])), (None, None));
        assert_eq!(mean(&[1.0, 2.0, 6.0]), Some(3.0));
        assert_eq!((round(1.23456, 4), round(120.04, 1)), (1.2346, 120.0));
    }
}
