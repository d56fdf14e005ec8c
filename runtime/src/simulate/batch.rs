//! Many runs on all cores. Runs share nothing, so their results do not depend on the number of threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::report::Report;
use super::settings::Settings;
use super::traffic::Workload;
use super::{simulate, SimulateError};

/// One run of a batch.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) settings: Settings,
    pub(super) workload: Workload,
}

/// Plays all runs; the results are in their order. The first failure, in that order, is the batch's.
pub(super) fn play(runs: &[Run]) -> Result<Vec<Report>, SimulateError> {
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from).min(runs.len().max(1));
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Report, SimulateError>>>> = Mutex::new(runs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..num_threads {
            scope.spawn(|| loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(run) = runs.get(index) else { return };
                let result = simulate(&run.settings, &run.workload);
                results.lock()[index] = Some(result);
            });
        }
    });
    results.into_inner().into_iter().map(|result| result.expect("every index was played")).collect()
}
