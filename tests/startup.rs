//! Starting: what cannot work is refused in one line that names the key, the value and the limit.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use keepsake_tests::{run_to_end, ModelKind, Server, Settings};
use serde_json::Value;

/// Exit code and the lines on standard error of a server that should not start.
fn refused(toml: &str) -> (Option<i32>, Vec<String>) {
    let folder = tempfile::tempdir().expect("a folder for the configuration");
    let file = folder.path().join("keepsake.toml");
    fs::write(&file, toml).expect("a writable folder");
    let output = run_to_end(&["serve", "--config", &file.to_string_lossy()], folder.path());
    let lines = String::from_utf8_lossy(&output.stderr).lines().map(str::to_owned).collect();
    (output.status.code(), lines)
}

#[test]
fn impossible_configurations_are_refused_in_one_line() {
    const TINY: &str = "[model]\ndummy = \"tiny\"\n";
    let device = |capacity: &str| format!("{TINY}[[tiers]]\nkind = \"device\"\ncapacity = \"{capacity}\"\n");
    let cases: Vec<(String, [&str; 2])> = vec![
        ("[server]\nprot = 8000\n".to_owned(), ["server.prot", "unknown key"]),
        ("[server]\nmax_queued = -1\n".to_owned(), ["server.max_queued", "-1"]),
        ("[server]\nbind = \"0.0.0.0:0\"\n".to_owned(), ["server.bind", "loopback"]),
        ("[sessions]\nidle_after = \"10 bananas\"\n".to_owned(), ["sessions.idle_after", "bananas"]),
        ("[scheduler]\nreserve = nan\n".to_owned(), ["scheduler.reserve", "NaN"]),
        ("[model]\npath = \"no/such/file\"\n".to_owned(), ["model.path", "no/such/file"]),
        ("not toml".to_owned(), ["keepsake.toml", "1"]),
        (device("64 TiB"), ["tiers[0].capacity", "64 TiB"]),
        (device("2 parsecs"), ["tiers[0].capacity", "parsecs"]),
        (device("16000 B"), ["tiers[0].capacity", "16000 B"]),
        (device("1 MiB") + "[[tiers]]\nkind = \"rocks\"\ncapacity = \"900 TiB\"\n", ["tiers[1].capacity", "900 TiB"]),
        (device("1 MiB") + "[[tiers]]\nkind = \"glacier\"\ncapacity = \"1 MiB\"\n", ["tiers[1].kind", "glacier"]),
        (device("1 MiB") + "policy = \"mru\"\n", ["tiers[0].policy", "mru"]),
        (
            device("1 MiB") + "[[tiers]]\nkind = \"rocks\"\ncapacity = \"8 MiB\"\n[[tiers]]\nkind = \"dram\"\ncapacity = \"1 MiB\"\n",
            ["tiers[2].kind", "out of order"],
        ),
    ];
    for (toml, words) in cases {
        let (code, lines) = refused(&toml);
        // What comes before it are log lines of a start that went that far.
        let last = lines.last().unwrap_or_else(|| panic!("no word about\n{toml}"));
        assert_eq!(code, Some(2), "{last}\n{toml}");
        assert!(words.iter().all(|word| last.contains(word)), "{words:?} in: {last}\n{toml}");
        assert_eq!(lines.iter().filter(|line| line.starts_with("config")).count(), 1, "{lines:?}");
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    let (code, lines) = refused(&format!("[server]\nbind = \"{address}\"\n[model]\ndummy = \"tiny\"\n"));
    let last = lines.last().expect("a reason");
    assert_eq!(code, Some(1), "{last}");
    assert!(last.contains("server.bind") && last.contains(&address), "{last}");
}

/// Two servers on one data folder would overwrite each other: the second is refused, the first goes on.
#[test]
fn a_data_folder_in_use_is_refused() {
    let server = Server::start(Settings::tiers(ModelKind::Tiny, 64, 0, 200));
    let folder = server.rocks();
    let toml = format!(
        "[server]\nbind = \"127.0.0.1:0\"\n[model]\ndummy = \"tiny\"\n[[tiers]]\nkind = \"device\"\ncapacity = \"1 MiB\"\n\
         [[tiers]]\nkind = \"rocks\"\ncapacity = \"8 MiB\"\nturns_capacity = \"16 MiB\"\npath = {:?}\n",
        folder.to_string_lossy()
    );
    let (code, lines) = refused(&toml);
    assert_eq!(code, Some(1), "{lines:?}");
    keepsake_tests::Ask::new("Still there?").max(4).send(&server.client);
    server.finish();
}

/// What work costs here is measured by the first start and read by the second; a file that is no such thing is measured again.
#[test]
fn costs_are_measured_once() {
    let settings = Settings::tiers(ModelKind::Tiny, 64, 16, 64).set("scheduler", "calibrate", "\"auto\"");
    let server = Server::start(settings);
    let file = server.log.field("calibrated", "file").expect("the first start measures");
    assert_eq!(server.log.field("calibration read", "file"), None);
    let path = Path::new(file.as_str().expect("a path")).to_owned();
    let stored: Value = serde_json::from_slice(&fs::read(&path).expect("the file is kept")).expect("JSON");
    assert_eq!(stored["costs"]["tiers"].as_array().map(Vec::len), Some(2), "{stored}");

    let stopped = server.finish();
    assert!(path.starts_with(stopped.cache()), "{}", path.display());
    let server = stopped.start();
    assert_eq!(server.log.field("calibration read", "file"), Some(file.clone()));
    assert_eq!(server.log.field("calibrated", "file"), None);

    let stopped = server.finish();
    fs::write(&path, "{}").expect("writable");
    let server = stopped.start();
    assert_eq!(server.log.field("calibrated", "file"), Some(file));
    server.finish();
}

#[test]
fn the_table_of_costs_is_printed_with_its_file() {
    let folder = tempfile::tempdir().expect("a folder for the configuration");
    let file = folder.path().join("keepsake.toml");
    let tiers =
        "[[tiers]]\nkind = \"device\"\ncapacity = \"4 MiB\"\n[[tiers]]\nkind = \"dram\"\ncapacity = \"1 MiB\"\n";
    fs::write(&file, format!("[model]\ndummy = \"tiny\"\n{tiers}")).expect("a writable folder");
    let config = file.to_string_lossy().into_owned();
    let run = |extra: &[&str]| {
        let arguments = [&["calibrate", "--config", &config][..], extra].concat();
        let output = run_to_end(&arguments, folder.path());
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let first = run(&[]);
    for words in ["attention ms", "dram -> device", "device -> dram", "GB/s", "measured in"] {
        assert!(first.contains(words), "{words:?} in\n{first}");
    }
    let costs = |json: &str| serde_json::from_str::<Value>(json).expect("JSON")["costs"].clone();
    let read = costs(&run(&["--json"]));
    assert!(read["step"].as_f64().is_some_and(|seconds| seconds > 0.0), "{read}");
    assert!(run(&[]).contains("read from"));
    assert_ne!(costs(&run(&["--json", "--force"])), read, "two measurements agree to the last digit");
}
