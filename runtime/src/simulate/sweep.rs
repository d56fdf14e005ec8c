//! Policies by tier sizes by seeds, as CSV and as a plot.

use std::fmt::Write;

use super::batch::{play, Run};
use super::plot::{draw, Series};
use super::report::Report;
use super::settings::{Settings, BELADY, CLAIRVOYANT};
use super::traffic::Workload;
use super::SimulateError;

pub struct Sweep {
    pub csv: String,
    pub svg: String,
}

const HEADER: &str = "policy,tier_chunks,seed,turns,turns_per_second,hit_rate,recomputed_seconds,no_cache_seconds,\
    recompute_share,stall_seconds,ttft_p50,ttft_p99,queued_p99,rejected\n";

/// Changes the size of the first tier below the device. The two policies that know the future are always among the policies.
pub fn sweep(
    settings: &Settings,
    workload: &Workload,
    policies: &[String],
    sizes: &[usize],
    num_seeds: u64,
) -> Result<Sweep, SimulateError> {
    let mut names: Vec<String> = policies.to_vec();
    names.extend([CLAIRVOYANT, BELADY].iter().filter(|n| !policies.iter().any(|p| p == *n)).map(|n| (*n).to_owned()));
    let mut runs = Vec::new();
    for name in &names {
        for size in sizes {
            for seed in 0..num_seeds {
                let mut settings = settings.with_policy(name);
                settings.tiers[0].chunks = *size;
                settings.seed += seed;
                runs.push(Run { settings, workload: workload.clone() });
            }
        }
    }
    let reports = play(&runs)?;
    let mut csv = HEADER.to_owned();
    for (run, report) in runs.iter().zip(&reports) {
        line(&mut csv, run, report);
    }
    let by_policy = reports.chunks((sizes.len() * num_seeds as usize).max(1));
    let series = names.iter().zip(by_policy).map(|(name, reports)| {
        let by_size = sizes.iter().zip(reports.chunks(num_seeds.max(1) as usize));
        let mean =
            |reports: &[Report]| reports.iter().map(Report::recomputed_share).sum::<f64>() / reports.len() as f64;
        Series { name: name.clone(), points: by_size.map(|(size, reports)| (*size as f64, mean(reports))).collect() }
    });
    let title = format!("Recompute cost, {} device chunks", settings.device_chunks);
    let label = format!("chunks in {}", settings.tiers[0].name);
    let svg = draw(&title, &label, &series.collect::<Vec<_>>()).map_err(SimulateError::Settings)?;
    Ok(Sweep { csv, svg })
}

fn line(csv: &mut String, run: &Run, report: &Report) {
    let settings = &run.settings;
    writeln!(
        csv,
        "{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
        settings.device_policy,
        settings.tiers[0].chunks,
        settings.seed,
        report.turns,
        report.turns_per_second,
        report.hit_rate,
        report.recomputed_seconds,
        report.no_cache_seconds,
        report.recomputed_share(),
        report.stall_seconds,
        report.ttft_seconds.p50,
        report.ttft_seconds.p99,
        report.queued_seconds.p99,
        report.rejected
    )
    .expect("writing to a string");
}
