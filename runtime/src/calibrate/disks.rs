//! How fast the disk below a durable tier is: one file, written, synced, and read back.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::samples::median;

const FILE_BYTES: usize = 16 << 20;
const BLOCK_BYTES: usize = 1 << 20;
/// Repetitions begin while less than this has passed.
const TIME: Duration = Duration::from_millis(400);
const MAX_REPETITIONS: usize = 5;

/// Sequential rates of a file system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskSpeed {
    pub tier: String,
    pub read_bytes_per_second: f64,
    /// With the data synced.
    pub write_bytes_per_second: f64,
    /// The system did not let go of the file's pages before it was read, so the read rate is partly that of memory.
    pub read_from_memory: bool,
}

pub(super) fn measure(tier: &str, folder: &Path) -> std::io::Result<DiskSpeed> {
    let path = folder.join("disk");
    // Nothing that a file system could store as a hole or pack.
    let mut block = vec![0; BLOCK_BYTES];
    blake3::Hasher::new().update(b"calibration").finalize_xof().fill(&mut block);
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    let mut read_from_memory = false;
    let started = Instant::now();
    while reads.is_empty() || reads.len() < MAX_REPETITIONS && started.elapsed() < TIME {
        let begin = Instant::now();
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&path)?;
        for _ in 0..FILE_BYTES / BLOCK_BYTES {
            file.write_all(&block)?;
        }
        file.sync_data()?;
        writes.push(begin.elapsed().as_secs_f64());
        read_from_memory |= !forget_file(&file);
        drop(file);
        let mut buffer = vec![0; BLOCK_BYTES];
        let begin = Instant::now();
        let mut file = File::open(&path)?;
        while file.read(&mut buffer)? > 0 {}
        reads.push(begin.elapsed().as_secs_f64());
    }
    fs::remove_file(&path)?;
    let rate = |seconds: Vec<f64>| FILE_BYTES as f64 / median(seconds).max(1e-9);
    Ok(DiskSpeed {
        tier: tier.to_owned(),
        read_bytes_per_second: rate(reads),
        write_bytes_per_second: rate(writes),
        read_from_memory,
    })
}

/// Asks the system to forget what it caches of all files in a folder, so that reading them means reading the disk. Files that have
/// gone meanwhile do not matter.
pub(super) fn forget_pages(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => forget_pages(&entry.path()),
            Ok(kind) if kind.is_file() => {
                if let Ok(file) = File::open(entry.path()) {
                    forget_file(&file);
                }
            }
            _ => {}
        }
    }
}

/// `false`: the system refused.
fn forget_file(file: &File) -> bool {
    // SAFETY: the descriptor is open for as long as `file` is borrowed; the call reads no memory of ours.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) == 0 }
}
