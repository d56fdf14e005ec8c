//! The calibration's file: JSON, named by its fingerprint, replaced as a whole.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Calibration, Subject};

/// Changes with the file's fields and with the meaning of any number in it.
const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Stored {
    format: u32,
    fingerprint: String,
    #[serde(flatten)]
    calibration: Calibration,
}

/// `None`: there is no file. An error says why the one that is there cannot be used.
pub(super) fn read(path: &Path, fingerprint: &str, num_tiers: usize) -> Result<Option<Calibration>, String> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let stored: Stored = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if stored.format != FORMAT || stored.fingerprint != fingerprint {
        return Err("it belongs to another machine, model or version".to_owned());
    }
    let costs = &stored.calibration.costs;
    let routes = costs.tiers.iter().flat_map(|tier| [tier.load, tier.store]);
    let is_time = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
    if costs.tiers.len() != num_tiers || !is_time(costs.step) {
        return Err("its costs do not fit the tiers".to_owned());
    }
    if !routes.into_iter().all(|route| is_time(route.latency) && is_time(route.chunk)) {
        return Err("a route costs no positive time".to_owned());
    }
    Ok(Some(stored.calibration))
}

pub(super) fn write(path: &Path, fingerprint: &str, calibration: &Calibration) -> std::io::Result<()> {
    let folder = path.parent().expect("the path was joined to a folder");
    std::fs::create_dir_all(folder)?;
    let stored = Stored { format: FORMAT, fingerprint: fingerprint.to_owned(), calibration: calibration.clone() };
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer_pretty(&mut file, &stored)?;
    file.write_all(b"\n")?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

impl Subject {
    /// Of everything that the measured numbers depend on and that can be told without measuring.
    pub fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("keepsake calibration fingerprint 1");
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        let mut add_number = |number: u64| add(&number.to_le_bytes());
        for number in [
            u64::from(FORMAT),
            self.layout.chunk_tokens as u64,
            self.layout.chunk_bytes() as u64,
            self.max_context as u64,
            self.device.num_workers() as u64,
        ] {
            add_number(number);
        }
        add(&self.model.fingerprint());
        add(self.device.describe().as_bytes());
        add(self.device.numeric_version().as_bytes());
        for tier in &self.tiers {
            add(tier.kind.as_bytes());
            add(&tier.capacity.as_u64().to_le_bytes());
            add(tier.options.to_string().as_bytes());
            add(&file_system(tier).unwrap_or_default().to_le_bytes());
        }
        let mut hex = hasher.finalize().to_hex().to_string();
        hex.truncate(32);
        hex
    }
}

/// The device number of the file system that a tier's folder is on, or will be.
fn file_system(tier: &keepsake_config::TierConfig) -> Option<u64> {
    if !super::copies::has_folder(tier) {
        return None;
    }
    let folder = std::path::absolute(tier.folder()).ok()?;
    folder.ancestors().find_map(|path| Some(path.metadata().ok()?.dev()))
}
