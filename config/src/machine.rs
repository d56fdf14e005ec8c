//! What the machine has: the limits that tiers are checked against.

use std::fs;
use std::path::{Path, PathBuf};

use sysinfo::{Disks, MemoryRefreshKind, RefreshKind, System};

/// Memory and disk of the machine, as a value so that a test can make one up.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Memory that this process may use: the machine's, or its control group's if that is less.
    pub memory_bytes: u64,
    /// Free bytes of each file system by mount point; a path belongs to its longest one.
    pub free_bytes: Vec<(PathBuf, u64)>,
}

impl Machine {
    /// The machine this runs on.
    pub fn this() -> Self {
        let memory = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(memory);
        let limit = system.cgroup_limits().map(|limits| limits.total_memory);
        let memory_bytes = system.total_memory().min(limit.unwrap_or(u64::MAX));
        let free_bytes = Disks::new_with_refreshed_list()
            .iter()
            .map(|disk| (disk.mount_point().to_owned(), disk.available_space()))
            .collect();
        Self { memory_bytes, free_bytes }
    }

    /// Bytes that a tier in `folder` can grow to: what is free there plus what the folder holds already. None when
    /// its file system is not known (a network mount, say).
    pub fn disk_bytes(&self, folder: &Path) -> Option<u64> {
        let existing = existing_ancestor(folder)?;
        let (_, free) = self
            .free_bytes
            .iter()
            .filter(|(mount, _)| existing.starts_with(mount))
            .max_by_key(|(mount, _)| mount.as_os_str().len())?;
        Some(free.saturating_add(used_bytes(folder)))
    }
}

/// The folder itself, or the nearest parent that exists, without links.
fn existing_ancestor(folder: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(folder).ok()?;
    absolute.ancestors().find_map(|path| path.canonicalize().ok())
}

fn used_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let mut bytes = 0;
    for entry in entries.flatten() {
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes += used_bytes(&entry.path()),
            Ok(metadata) if metadata.is_file() => bytes += metadata.len(),
            _ => {}
        }
    }
    bytes
}
