//! What work costs on this machine: measured once for a device, a model and a list of tiers, kept in a file, given to the core.
//!
//! [`obtain`] reads the file of an earlier run or measures anew: forward passes with the configured model (`compute.rs`), copies
//! through the real tiers and movers (`copies.rs`), and the disks below durable tiers (`disks.rs`).
//!
//! May depend on: model, tiers, kernels, config and the core's [`Costs`]; never on actors.
//!
//! Invariants: no server's state is read or changed. Tiers are opened anew, small, and durable ones in a scratch folder beside
//! their own files, which is removed. A file is used only for exactly what it was measured on ([`Subject::fingerprint`]).

mod compute;
mod copies;
mod disks;
mod file;
mod samples;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use keepsake_config::TierConfig;
use keepsake_kernels::{Device, KvLayout};
use keepsake_model::Model;
use serde::{Deserialize, Serialize};

use crate::core::{Costs, TierCosts};

pub use compute::{ChunkCost, DecodeCost};
pub use copies::RouteSpeed;
pub use disks::DiskSpeed;

/// What is measured, and on what.
#[derive(Clone)]
pub struct Subject {
    pub model: Arc<Model>,
    pub device: Device,
    pub layout: KvLayout,
    /// [`keepsake_tiers::KeyScope::layout_id`].
    pub layout_id: [u8; 16],
    /// Longest context that is served.
    pub max_context: usize,
    /// All tiers, the device first.
    pub tiers: Vec<TierConfig>,
}

/// The measured costs, and the numbers they were made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// What the simulator and the core work with.
    pub costs: Costs,
    /// A prompt's chunk by context length.
    pub chunks: Vec<ChunkCost>,
    /// A decode row by context length.
    pub decode: Vec<DecodeCost>,
    /// Between the device and each tier, both ways.
    pub routes: Vec<RouteSpeed>,
    /// Of durable tiers.
    pub disks: Vec<DiskSpeed>,
    pub device: String,
    pub model: String,
    pub chunk_tokens: usize,
    pub chunk_bytes: usize,
    /// Unix seconds.
    pub measured_at: u64,
    /// How long measuring took.
    pub seconds: f64,
}

/// A calibration and where it comes from.
#[derive(Clone, Debug)]
pub struct Obtained {
    pub calibration: Calibration,
    pub path: PathBuf,
    pub origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Measured by an earlier run.
    File,
    /// Measured now.
    Measured,
}

/// The file of an earlier run, else a measurement, which is kept for the next run. `force`: measure in any case.
pub fn obtain(subject: &Subject, force: bool) -> anyhow::Result<Obtained> {
    obtain_in(&keepsake_config::cache_dir().join("calibration"), subject, force)
}

fn obtain_in(folder: &std::path::Path, subject: &Subject, force: bool) -> anyhow::Result<Obtained> {
    let fingerprint = subject.fingerprint();
    let path = folder.join(format!("{fingerprint}.json"));
    if !force {
        match file::read(&path, &fingerprint, subject.tiers.len() - 1) {
            Ok(Some(calibration)) => return Ok(Obtained { calibration, path, origin: Origin::File }),
            Ok(None) => {}
            Err(reason) => tracing::warn!(file = %path.display(), reason, "calibration is not usable: measuring anew"),
        }
    }
    let calibration = measure(subject)?;
    if let Err(error) = file::write(&path, &fingerprint, &calibration) {
        // The next start measures again; that is all.
        tracing::warn!(file = %path.display(), %error, "calibration could not be kept");
    }
    Ok(Obtained { calibration, path, origin: Origin::Measured })
}

fn measure(subject: &Subject) -> anyhow::Result<Calibration> {
    let started = Instant::now();
    let compute = compute::measure(subject).context("cannot measure forward passes")?;
    let copies = copies::measure(subject).context("cannot measure copies between tiers")?;
    let costs = Costs {
        step: compute.step,
        chunk: compute.chunk_curve()?,
        decode_row: compute.decode_curve()?,
        tiers: copies.tiers.iter().map(|tier| TierCosts { load: tier.load, store: tier.store }).collect(),
    };
    Ok(Calibration {
        costs,
        chunks: compute.chunks,
        decode: compute.decode,
        routes: copies.routes,
        disks: copies.disks,
        device: subject.device.describe(),
        model: subject.model.name().to_owned(),
        chunk_tokens: subject.layout.chunk_tokens,
        chunk_bytes: subject.layout.chunk_bytes(),
        measured_at: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        seconds: started.elapsed().as_secs_f64(),
    })
}

#[cfg(test)]
mod tests;
