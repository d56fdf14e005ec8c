//! `keepsake simulate`: the core that serves, driven through days of traffic by a clock that jumps from event to event.
//!
//! A `world::World` holds one [`crate::core::Scheduler`], a device whose steps last as long as [`crate::core::Costs`] say, lanes that
//! copy chunks at their routes' rates, and users. It makes no decision of its own: admission, steps, eviction and loads are the
//! core's. Tokens are functions of (conversation, position), so nothing is stored and a next turn's log continues the reply before it.
//!
//! May depend on: `core`, `trace`, `keepsake_tiers` for policies; never on actix, tokio, HTTP or the command line.
//!
//! Invariants: one seed gives one result, whatever else runs on the machine; a turn's tokens by source sum to its input.
//!
//! Deliberately absent: K/V bytes, text, failures of devices and tiers (the core's own tests inject those), and more than one device.

mod batch;
mod clairvoyant;
mod lanes;
mod log;
pub mod machine;
mod plot;
mod prices;
pub mod report;
mod request;
pub mod settings;
pub mod sweep;
pub mod table;
mod tally;
pub mod traffic;
mod world;

#[cfg(test)]
mod tests;

use std::time::Instant;

use report::{Report, WithCeiling};
use settings::{Settings, BELADY, CLAIRVOYANT};
use traffic::Workload;
use world::World;

/// A simulation that cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    #[error("{0}")]
    Settings(String),
    #[error("no event is left, but {num_sequences} sequences have not ended at {seconds} s: the scheduler is stuck")]
    Stuck { num_sequences: usize, seconds: f64 },
    #[error("a core invariant does not hold at {seconds} s: {broken}")]
    Broken { broken: String, seconds: f64 },
}

/// Plays one workload under one policy to its end.
pub fn simulate(settings: &Settings, workload: &Workload) -> Result<Report, SimulateError> {
    let started = Instant::now();
    settings.validate()?;
    let traffic = workload.traffic(settings.seed)?;
    let mut world = World::new(settings, traffic);
    world.run()?;
    Ok(world.report(started.elapsed()))
}

/// The same, and how much of what could be saved it saved: the better of two rules that know the future is the ceiling.
pub fn simulate_with_ceiling(settings: &Settings, workload: &Workload) -> Result<WithCeiling, SimulateError> {
    let mut reports = Vec::new();
    for settings in [settings.clone(), settings.with_policy(CLAIRVOYANT), settings.with_policy(BELADY)] {
        reports.push(batch::Run { settings, workload: workload.clone() });
    }
    let [report, by_cost, by_time]: [Report; 3] = batch::play(&reports)?.try_into().expect("a report a run");
    let ceiling = by_cost.saved.max(by_time.saved);
    let reached = if ceiling > 0.0 { report.saved / ceiling } else { 1.0 };
    Ok(WithCeiling { report, ceiling_saved: ceiling, share_of_ceiling: reached })
}
