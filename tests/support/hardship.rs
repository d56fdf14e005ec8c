//! What a disk does to a server: damaged files, no space.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Files below `folder` whose name ends like this.
pub fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found
}

/// Disk space of everything below `folder`. Files that vanish meanwhile are gone.
pub fn folder_bytes(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => folder_bytes(&entry.path()),
        Ok(metadata) => metadata.blocks() * 512,
        Err(_) => 0,
    });
    sizes.sum()
}

/// Flips one bit in every `stride` bytes of a file.
pub fn flip_bits(file: &Path, stride: usize) {
    let mut bytes = fs::read(file).expect("a readable file");
    bytes.iter_mut().skip(stride / 2).step_by(stride).for_each(|byte| *byte ^= 0x10);
    fs::write(file, bytes).expect("a writable file");
}

/// Cuts a file to its first half, as a crash of the whole machine can.
pub fn tear(file: &Path) {
    let length = fs::metadata(file).expect("the file is there").len();
    let file = fs::OpenOptions::new().write(true).open(file).expect("a writable file");
    file.set_len(length / 2).expect("a shorter file");
}

/// A small file system of its own. Unmounts on drop.
pub struct SmallDisk {
    folder: TempDir,
}

impl SmallDisk {
    /// `None` where mounting is not allowed, which takes root.
    pub fn mount(mebibytes: u64) -> Option<Self> {
        let folder = TempDir::with_prefix("keepsake-disk-").expect("a folder to mount on");
        let size = format!("size={mebibytes}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(folder.path()).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self { folder })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes until nothing more fits; dropping the guard gives the space back.
    pub fn fill(&self) -> Filler {
        let path = self.path().join("filler");
        let mut file = fs::File::create(&path).expect("an empty file fits");
        // Ever smaller pieces: the last few bytes go too.
        for piece in [1 << 20, 64 << 10, 4 << 10, 1] {
            let bytes = vec![0x5a; piece];
            while file.write_all(&bytes).is_ok() {}
        }
        Filler { path }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a server that a failed test left behind may still hold files open.
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).status();
    }
}

pub struct Filler {
    path: PathBuf,
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
