//! The policy table: four workloads by three tier sizes by policies by seeds, as Markdown.

use std::fmt::Write;
use std::path::Path;

use super::batch::{play, Run};
use super::machine::machine;
use super::report::Report;
use super::settings::{Settings, TierSettings, BELADY, CLAIRVOYANT};
use super::traffic::{Pace, Shape, Workload};
use super::SimulateError;

pub struct Table {
    pub markdown: String,
}

/// What all others are compared with.
const BASE: &str = "lru";

/// One workload at one size.
struct Case {
    workload: Workload,
    name: &'static str,
    settings: Settings,
}

/// Plays the table. Without a request trace, three workloads.
pub fn table(mooncake: Option<&Path>, policies: &[String], num_seeds: u64) -> anyhow::Result<Table> {
    let cases = cases(mooncake)?;
    let mut names = vec![BASE.to_owned()];
    names.extend(policies.iter().filter(|p| *p != BASE).cloned());
    let num_seeds = num_seeds.max(1) as usize;
    let mut runs = Vec::new();
    for case in &cases {
        let run = |name: &str, seed: usize| {
            let mut settings = case.settings.with_policy(name);
            settings.seed += seed as u64;
            Run { settings, workload: case.workload.clone() }
        };
        runs.extend(names.iter().flat_map(|name| (0..num_seeds).map(move |seed| (name, seed))).map(|(n, s)| run(n, s)));
        // The rules that know the future take longest and vary least: one seed is enough for a ceiling.
        runs.extend([CLAIRVOYANT, BELADY].map(|name| run(name, 0)));
    }
    let reports = play(&runs)?;
    let mut markdown = header(&names);
    for (case, reports) in cases.iter().zip(reports.chunks(names.len() * num_seeds + 2)) {
        let (compared, ceilings) = reports.split_at(names.len() * num_seeds);
        let ceiling = ceilings.iter().map(|report| report.saved).fold(0.0, f64::max);
        line(&mut markdown, case, &compared.chunks(num_seeds).collect::<Vec<_>>(), ceiling);
    }
    Ok(Table { markdown })
}

fn header(names: &[String]) -> String {
    let mut text = "| workload | device + dram chunks | lru hits | lru recompute".to_owned();
    for name in names {
        write!(text, " | {name}").expect("writing to a string");
    }
    text + " |\n|---|---|---|---" + &"|---".repeat(names.len()) + "|\n"
}

/// A cell is the recompute cost beside LRU's of the same seed, mean and half the distance between the extremes; and the share of the
/// ceiling's savings, of the first seed.
fn line(text: &mut String, case: &Case, by_policy: &[&[Report]], ceiling: f64) {
    let base = by_policy[0];
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let hits: Vec<f64> = base.iter().map(|r| r.hit_rate).collect();
    let shares: Vec<f64> = base.iter().map(Report::recomputed_share).collect();
    let settings = &case.settings;
    write!(
        text,
        "| {} | {} + {} | {:.2} | {:.3}",
        case.name,
        settings.device_chunks,
        settings.tiers[0].chunks,
        mean(&hits),
        mean(&shares)
    )
    .expect("writing to a string");
    for reports in by_policy {
        let ratio = |(own, base): (&Report, &Report)| match base.recomputed_share() > 0.0 {
            true => own.recomputed_share() / base.recomputed_share(),
            false => 1.0,
        };
        let ratios: Vec<f64> = reports.iter().zip(base).map(ratio).collect();
        let (low, high) = ratios.iter().fold((f64::MAX, f64::MIN), |(low, high), r| (low.min(*r), high.max(*r)));
        let reached = if ceiling > 0.0 { reports[0].saved / ceiling } else { 1.0 };
        write!(text, " | {:.2} ± {:.2} ({:.0}%)", mean(&ratios), (high - low) / 2.0, 100.0 * reached)
            .expect("writing to a string");
    }
    text.push_str(" |\n");
}

/// Sizes are small, middle and near the working set. Long pauses keep the number of running turns small beside that of waiting users,
/// so that the tiers and not the device's running turns decide.
fn cases(mooncake: Option<&Path>) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    let chat = |users, think, long, seconds| Workload::Generated {
        shape: Shape::Chat { think, long },
        pace: Pace::Users { users, arrival: think },
        seconds,
    };
    for dram in [500, 1_300, 3_000] {
        let settings = settings("h200-13b", 32, 500, dram, 400.0, 100.0)?;
        cases.push(Case { workload: chat(130, 60.0, 0.0, 400.0), name: "short chats", settings });
    }
    for dram in [2_000, 6_000, 12_000] {
        // Where attention makes late chunks dear. Users who think for long keep so slow a device from being the bottleneck.
        let settings = settings("cpu", 32, 2_500, dram, 60_000.0, 10_000.0)?;
        cases.push(Case { workload: chat(60, 6_000.0, 0.2, 60_000.0), name: "20% long chats, on a CPU", settings });
    }
    if let Some(file) = mooncake {
        let requests = Workload::mooncake(file, 1.0, 0.05, 1e9)?;
        for dram in [1_300, 5_000, 20_000] {
            let settings = settings("h200-8b", 128, 1_300, dram, 1e9, 0.0)?;
            cases.push(Case { workload: requests.clone(), name: "Mooncake, 5% of its sessions", settings });
        }
    }
    for capacity in [0.40, 0.54, 0.71] {
        let (users, context, seconds) = (64, 4_000, 200.0);
        let working_set = (users * context / 32) as f64;
        let device = working_set * 0.12;
        let dram = working_set * capacity - device;
        // The model serves one turn at a time.
        let settings =
            Settings { max_running: 1, ..settings("saturation", 32, device as usize, dram as usize, seconds, 60.0)? };
        let workload = Workload::Generated {
            shape: Shape::Saturation { context, think: 3.0 },
            pace: Pace::Users { users, arrival: 10.0 },
            seconds,
        };
        cases.push(Case { workload, name: "saturation", settings });
    }
    Ok(cases)
}

fn settings(
    machine_name: &str,
    chunk_tokens: usize,
    device_chunks: usize,
    dram_chunks: usize,
    seconds: f64,
    warmup: f64,
) -> Result<Settings, SimulateError> {
    let tier = |name, chunks, durable| TierSettings { name, chunks, durable, policy: BASE.to_owned() };
    Ok(Settings {
        chunk_tokens,
        device_chunks,
        device_policy: BASE.to_owned(),
        tiers: vec![tier("dram", dram_chunks, false), tier("rocks", 0, true)],
        costs: machine(machine_name, chunk_tokens)?,
        seconds,
        warmup,
        ..Settings::default()
    })
}
