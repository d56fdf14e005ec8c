//! Repeating a measurement until its median means something.

use std::time::{Duration, Instant};

/// Runs once unmeasured, then until `budget` is used up, at least three and at most nine times; gives the median in seconds.
pub(super) fn median_seconds<E>(budget: Duration, mut run: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    run()?;
    let started = Instant::now();
    let mut samples = Vec::new();
    while samples.len() < 3 || samples.len() < 9 && started.elapsed() < budget {
        let begin = Instant::now();
        run()?;
        samples.push(begin.elapsed().as_secs_f64());
    }
    Ok(median(samples))
}

/// At least one sample.
pub(super) fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
