//! A server as a child process, and its data between two runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::{wait_until, Client, Log, Metrics, Settings};

/// Loading the model on a machine that does other things too.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The server's own shutdown deadline is 30 s.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A server that does not run: its configuration and its data folder.
pub struct Stopped {
    pub settings: Settings,
    folder: TempDir,
}

impl Stopped {
    pub fn new(settings: Settings) -> Self {
        Self { settings, folder: TempDir::with_prefix("keepsake-test-").expect("a folder for the server's data") }
    }

    /// The data folder, `$XDG_DATA_HOME`.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// The cache folder, `$XDG_CACHE_HOME`.
    pub fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    /// The rocks tier's folder, with `kv/` and `turns/` in it.
    pub fn rocks(&self) -> PathBuf {
        self.settings.rocks_in(&self.data())
    }

    /// A second server's worth of the same data.
    pub fn copy(&self) -> Self {
        let copy = Self::new(self.settings.clone());
        copy_folder(&self.data(), &copy.data());
        copy
    }

    pub fn start(self) -> Server {
        let config = self.folder.path().join("keepsake.toml");
        fs::write(&config, self.settings.to_toml()).expect("the test's folder is writable");
        fs::create_dir_all(self.data()).expect("the test's folder is writable");
        let mut child = Command::new(binary())
            .arg("serve")
            .arg("--config")
            .arg(&config)
            .env("XDG_DATA_HOME", self.data())
            .env("XDG_CACHE_HOME", self.cache())
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server's binary can be started");
        let log = Log::read(child.stderr.take().expect("stderr is piped"));
        let deadline = Instant::now() + START_LIMIT;
        let address = loop {
            if let Some(address) = log.field("serving", "address") {
                break address.as_str().expect("the address is logged as text").to_owned();
            }
            let exited = child.try_wait().expect("the child is ours");
            if exited.is_some() || Instant::now() > deadline {
                // The reader may be a line behind.
                thread::sleep(Duration::from_millis(100));
                let _ = child.kill();
                panic!("the server did not start ({exited:?}); its log:\n{}", log.tail(60));
            }
            thread::sleep(Duration::from_millis(5));
        };
        let client = Client::new(&address, self.settings.first_key());
        let server = Server { child, address, log, client, stopped: Some(self) };
        wait_until("the server is ready", START_LIMIT, || server.client.get("/ready").status == 200);
        server
    }
}

/// A running server. Dropping it kills it; [`Server::finish`] also checks that it ends well.
pub struct Server {
    child: Child,
    pub address: String,
    pub log: Log,
    /// With the first tenant's key, if there are tenants.
    pub client: Client,
    /// Taken when the process is gone.
    stopped: Option<Stopped>,
}

impl Server {
    pub fn start(settings: Settings) -> Self {
        Stopped::new(settings).start()
    }

    pub fn settings(&self) -> &Settings {
        &self.at_rest().settings
    }

    pub fn rocks(&self) -> PathBuf {
        self.at_rest().rocks()
    }

    pub fn client_with_key(&self, key: &str) -> Client {
        Client::new(&self.address, Some(key))
    }

    pub fn metrics(&self) -> Metrics {
        let answer = self.client.get("/metrics");
        assert_eq!(answer.status, 200, "/metrics");
        Metrics::parse(&answer.text)
    }

    /// Waits until nothing runs, waits, or moves; gives the metrics of that moment. Gauges are published a little later
    /// than things happen, so two quiet looks in a row count.
    pub fn settle(&self) -> Metrics {
        let mut last: Option<Metrics> = None;
        let mut settled = None;
        wait_until("the server comes to rest", Duration::from_secs(60), || {
            thread::sleep(Duration::from_millis(120));
            let now = self.metrics();
            let is_quiet = now.is_quiet() && last.as_ref().is_some_and(|last| last.same_work(&now));
            settled = is_quiet.then(|| now.clone());
            last = Some(now);
            is_quiet
        });
        settled.expect("set when it came to rest")
    }

    /// Resident memory now.
    pub fn resident_bytes(&self) -> u64 {
        self.status_bytes("VmRSS:")
    }

    /// The highest resident memory since the start: the kernel keeps it, so no sample can miss it.
    pub fn peak_resident_bytes(&self) -> u64 {
        self.status_bytes("VmHWM:")
    }

    /// Bytes of the model's weights, as the server logged them.
    pub fn weight_bytes(&self) -> u64 {
        let bytes = self.log.field("model loaded", "weight_bytes").and_then(|bytes| bytes.as_u64());
        bytes.expect("the server logs the size of the weights")
    }

    /// SIGKILL: nothing is flushed, nobody is told.
    pub fn kill(mut self) -> Stopped {
        self.child.kill().expect("the child is ours");
        self.child.wait().expect("the child is ours");
        self.stopped.take().expect("the process has just ended")
    }

    /// SIGTERM, without waiting.
    pub fn send_sigterm(&self) {
        let status = Command::new("sh").args(["-c", &format!("kill -TERM {}", self.child.id())]).status();
        assert!(status.expect("a shell is there").success(), "the server is gone already");
    }

    /// Waits for the process to end by itself.
    pub fn wait(mut self) -> (ExitStatus, Stopped) {
        let mut status = None;
        wait_until("the server ends", STOP_LIMIT, || {
            status = self.child.try_wait().expect("the child is ours");
            status.is_some()
        });
        let stopped = self.stopped.take().expect("the process has just ended");
        (status.expect("set when it ended"), stopped)
    }

    /// SIGTERM; the server must end with code 0 and must not have logged an alarm.
    pub fn finish(self) -> Stopped {
        let log = self.log.clone();
        let stopped = self.finish_alarmed();
        assert_eq!(log.alarms(), Vec::<String>::new());
        stopped
    }

    /// The same for a server that had reason to log errors.
    pub fn finish_alarmed(self) -> Stopped {
        self.send_sigterm();
        let log = self.log.clone();
        let (status, stopped) = self.wait();
        assert_eq!(status.code(), Some(0), "exit after SIGTERM; log:\n{}", log.tail(40));
        assert!(!log.contains("panicked at"), "{}", log.tail(40));
        stopped
    }

    fn at_rest(&self) -> &Stopped {
        self.stopped.as_ref().expect("taken only when the server is consumed")
    }

    fn status_bytes(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(path).expect("the server runs, on Linux");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("the kernel reports it");
        let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number of kB");
        kibibytes << 10
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.stopped.is_none() {
            return;
        }
        // It may have ended by itself, which is what a failing test wants to know.
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("server {} ({ended:?}), the end of its log:\n{}", self.address, self.log.tail(60));
        }
    }
}

/// Runs the binary with these arguments until it ends by itself, which it must do soon.
pub fn run_to_end(arguments: &[&str], data: &Path) -> Output {
    let mut command = Command::new(binary());
    command
        .args(arguments)
        .env("XDG_DATA_HOME", data)
        .env("XDG_CACHE_HOME", data.join("cache"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the server's binary can be started");
    let deadline = Instant::now() + START_LIMIT;
    while child.try_wait().expect("the child is ours").is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("{arguments:?} does not end: {:?}", child.wait_with_output());
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("the child is ours")
}

/// The release binary next to the test executables: `target/release/keepsake`.
fn binary() -> PathBuf {
    let test = std::env::current_exe().expect("the test knows its own path");
    let folder = test.parent().and_then(Path::parent).expect("tests lie in target/release/deps");
    let binary = folder.join("keepsake");
    assert!(binary.is_file(), "{} is missing: run `make test`, which builds it", binary.display());
    binary
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the test's folder is writable");
    for entry in fs::read_dir(from).expect("the data folder is readable") {
        let entry = entry.expect("the data folder is readable");
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        match source.is_dir() {
            true => copy_folder(&source, &target),
            false => drop(fs::copy(&source, &target).expect("there is disk space")),
        }
    }
}
