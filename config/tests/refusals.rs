//! What a configuration is refused for, and the exact line that says so.

use std::path::PathBuf;

use keepsake_config::{ByteSize, Config, ConfigError, Machine, TierConfig};

fn machine() -> Machine {
    Machine { memory_bytes: 8 << 30, free_bytes: vec![("/".into(), 20 << 30)] }
}

/// Reads `text` as a file and validates it on a machine with 8 GiB of memory and 20 GiB of disk.
fn check(text: &str) -> Result<Config, ConfigError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let config = Config::read(Some(file.path()))?;
    config.validate(&machine())?;
    Ok(config)
}

#[track_caller]
fn refused(text: &str, line: &str) {
    let error = check(text).expect_err(text).to_string();
    assert_eq!(error, line, "for {text}");
    assert!(!error.contains('\n'));
}

const DEVICE: &str = "[[tiers]]\nkind = \"device\"\ncapacity = \"512 MiB\"\n";

fn with_tiers(more: &str) -> String {
    format!("{DEVICE}{more}")
}

#[test]
fn empty_file_is_the_default() {
    assert_eq!(check("").unwrap(), Config::default());
}

#[test]
fn unknown_keys() {
    refused(
        "[scheduler]\nmax_runing = 5",
        "config: scheduler.max_runing = 5: unknown key, did you mean `max_running`?",
    );
    refused(
        "[servr]\nbind = \"127.0.0.1:1\"",
        "config: servr = { bind = \"127.0.0.1:1\" }: unknown key, did you mean `server`?",
    );
    refused(
        "[telemetry]\ncolour = true",
        "config: telemetry.colour = true: unknown key, the known ones are `log`, `format`",
    );
    refused(
        "[[tenants]]\nname = \"a\"\nkeys = [\"k\"]\nquota = 3",
        "config: tenants[0].quota = 3: unknown key, the known ones are `name`, `keys`, `weight`",
    );
    refused(
        &with_tiers("[[tiers]]\nkind = \"rocks\"\ncapacity = \"1 GiB\"\nturn_capacity = \"1 GiB\""),
        "config: tiers[1].turn_capacity = \"1 GiB\": unknown key, did you mean `turns_capacity`?",
    );
    refused(
        "[[tiers]]\nkind = \"device\"\ncapacity = \"1 GiB\"\nsize = 3",
        "config: tiers[0].size = 3: unknown key, this takes none",
    );
}

#[test]
fn wrong_types_and_units() {
    refused("[server]\nmax_queued = -1", "config: server.max_queued = -1: expected a whole number, 0 or more");
    refused(
        "[server]\nmax_queued = \"many\"",
        "config: server.max_queued = \"many\": expected a whole number, 0 or more",
    );
    refused("[server]\nmax_queued = 1.5", "config: server.max_queued = 1.5: expected a whole number, 0 or more");
    refused("[server]\nallow_unauthenticated = 1", "config: server.allow_unauthenticated = 1: expected true or false");
    refused("[server]\nallowed_hosts = \"a\"", "config: server.allowed_hosts = \"a\": expected a list");
    refused("server = 3", "config: server = 3: expected a table");
    refused("tiers = 3", "config: tiers = 3: expected a list");
    refused("tiers = [3]", "config: tiers[0] = 3: expected a table such as {kind = \"dram\", capacity = \"1 GiB\"}");
    refused(
        "[server]\nbind = \"localhost\"",
        "config: server.bind = \"localhost\": expected an address with its port, such as \"127.0.0.1:8000\"",
    );
    refused("[device]\nkind = \"gpu\"", "config: device.kind = \"gpu\": must be one of `auto`, `cpu`, `cuda`");
    refused("[device]\nkind = 1", "config: device.kind = 1: expected text in quotes");
    let size = "expected a size with its unit, such as \"2 GiB\"";
    refused("[server]\nmax_body = 8388608", &format!("config: server.max_body = 8388608: {size}"));
    for wrong in ["8388608", "8 apples", "-1 GiB", "NaN GiB", "1e9 GiB", "GiB", "", "1. GiB", "1.2.3 GiB"] {
        refused(
            &format!("[server]\nmax_body = \"{wrong}\""),
            &format!("config: server.max_body = \"{wrong}\": {size} or \"512 MiB\""),
        );
    }
    refused(
        "[server]\nmax_body = \"99999999999 TiB\"",
        "config: server.max_body = \"99999999999 TiB\": larger than 2^63 bytes",
    );
    let duration = "expected a duration with its unit, such as \"30s\" or \"10m\"";
    for wrong in ["30", "\"30\"", "\"soon\"", "\"-1s\"", "\"\""] {
        refused(
            &format!("[scheduler]\nload_timeout = {wrong}"),
            &format!("config: scheduler.load_timeout = {wrong}: {duration}"),
        );
    }
}

#[test]
fn ranges() {
    for (text, line) in [
        ("[server]\nmax_queued = 0", "server.max_queued = 0: must be 1 to 100000"),
        ("[server]\nmax_body = \"0 B\"", "server.max_body = \"0 B\": must be 1 KiB to 1 GiB"),
        ("[server]\nkeep_alive_ping = \"0s\"", "server.keep_alive_ping = \"0ms\": must be 100ms to 1h"),
        ("[sessions]\nidle_after = \"1000y\"", "sessions.idle_after = \"365250days\": must be 1s to 30days"),
        ("[scheduler]\nchunk_tokens = 0", "scheduler.chunk_tokens = 0: must be 8 to 256"),
        ("[scheduler]\nchunk_tokens = 33", "scheduler.chunk_tokens = 33: not a power of two"),
        ("[scheduler]\nchunk_tokens = 512", "scheduler.chunk_tokens = 512: must be 8 to 256"),
        ("[scheduler]\nreserve = nan", "scheduler.reserve = NaN: must be 0 to 0.9"),
        ("[scheduler]\nreserve = -0.1", "scheduler.reserve = -0.1: must be 0 to 0.9"),
        ("[scheduler]\nswap_out_below = inf", "scheduler.swap_out_below = inf: must be 0 to 1"),
        ("[scheduler]\nsteps_in_flight = 3", "scheduler.steps_in_flight = 3: must be 1 to 2"),
        (
            "[scheduler]\nstep_tokens = 16",
            "scheduler.step_tokens = 16: less than scheduler.max_running (32): every running sequence needs a row",
        ),
        ("[model]\nmax_context = 0", "model.max_context = 0: must be 1 to 4294967295"),
        ("[model]\npath = \"/no/such\"", "model.path = \"/no/such\": no such file or folder"),
        ("[telemetry]\nlog = \"\"", "telemetry.log = \"\": must not be empty"),
    ] {
        refused(text, &format!("config: {line}"));
    }
}

#[test]
fn tiers_that_do_not_fit() {
    refused(
        &with_tiers("[[tiers]]\nkind = \"dram\"\ncapacity = \"64 GiB\""),
        "config: tiers[1].capacity = \"64 GiB\": larger than this machine's memory (8 GiB)",
    );
    refused(
        &with_tiers("[[tiers]]\nkind = \"dram\"\ncapacity = \"8 GiB\""),
        "config: tiers[1].capacity = \"8 GiB\": with the tiers before it 8704 MiB, larger than this machine's memory \
         (8 GiB): lower one of them",
    );
    let on_cuda =
        format!("[device]\nkind = \"cuda\"\n{}", with_tiers("[[tiers]]\nkind = \"dram\"\ncapacity = \"8 GiB\""));
    check(&on_cuda).expect("a CUDA device pool is not host memory");
    refused(
        &with_tiers("[[tiers]]\nkind = \"rocks\"\ncapacity = \"20 GiB\"\npath = \"/nowhere/yet\""),
        "config: tiers[1].capacity = \"20 GiB\": with turns_capacity 1 GiB, larger than the disk space at \
         /nowhere/yet (20 GiB)",
    );
    refused(
        &with_tiers("[[tiers]]\nkind = \"dram\"\ncapacity = \"0 GiB\""),
        "config: tiers[1].capacity = \"0 B\": must be larger than 0; leave the tier out instead",
    );
    refused(
        &with_tiers("[[tiers]]\nkind = \"rocks\"\ncapacity = \"1 GiB\"\nturns_capacity = \"0 B\""),
        "config: tiers[1].turns_capacity = \"0 B\": must be 16 MiB to 1024 TiB",
    );
}

#[test]
fn disk_space_counts_what_the_tier_holds() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("kv")).unwrap();
    std::fs::write(folder.path().join("kv/000001.blob"), vec![0; 3 << 20]).unwrap();
    let mount: PathBuf = folder.path().canonicalize().unwrap();
    let machine = Machine { memory_bytes: 8 << 30, free_bytes: vec![("/".into(), 1 << 40), (mount, 20 << 20)] };
    let mut config = Config::default();
    config.tiers[2].path = Some(folder.path().to_owned());
    config.tiers[2].options.insert("turns_capacity".into(), "16 MiB".into());
    config.tiers[2].capacity = ByteSize::mib(7);
    config.validate(&machine).unwrap();
    config.tiers[2].capacity = ByteSize::mib(8);
    let error = config.validate(&machine).unwrap_err();
    assert_eq!(error.path(), Some("tiers[2].capacity"));
    assert!(error.to_string().ends_with("(23 MiB)"), "{error}");
}

#[test]
fn tiers_out_of_order() {
    let dram = "[[tiers]]\nkind = \"dram\"\ncapacity = \"1 GiB\"\n";
    let rocks = "[[tiers]]\nkind = \"rocks\"\ncapacity = \"1 GiB\"\n";
    let line =
        |i: usize, kind: &str, why: &str| format!("config: tiers[{i}].kind = \"{kind}\": tiers out of order: {why}");
    refused(dram, &line(0, "dram", "the first must be `device`"));
    refused(&with_tiers(&format!("{rocks}{dram}")), &line(2, "dram", "host memory comes before `rocks`"));
    refused(
        &with_tiers("[[tiers]]\nkind = \"device\"\nname = \"second\"\ncapacity = \"1 MiB\""),
        &line(1, "device", "only the first may be `device`"),
    );
    refused("tiers = []", "config: tiers: no tiers: at least a `device` tier is needed");
    refused(
        &with_tiers(&format!("{dram}{dram}")),
        "config: tiers[2].name = \"dram\": the same name as tiers[1]; give one of them another `name`",
    );
    refused(&with_tiers("[[tiers]]\nkind = \"dram\""), "config: tiers[1].capacity: missing, and there is no default");
    refused("[[tiers]]\ncapacity = \"1 GiB\"", "config: tiers[0].kind: missing, and there is no default");
}

#[test]
fn tenants() {
    let tenant = |name: &str, keys: &str| format!("[[tenants]]\nname = \"{name}\"\nkeys = {keys}\n");
    let two = |first: String, second: String| first + &second;
    check(&two(tenant("a", "[\"x\", \"y\"]"), tenant("b", "[\"z\"]"))).unwrap();
    refused(
        &two(tenant("a", "[\"x\"]"), tenant("a", "[\"z\"]")),
        "config: tenants[1].name = \"a\": the same name as tenants[0]",
    );
    refused(
        &two(tenant("a", "[\"w\", \"x\"]"), tenant("b", "[\"x\"]")),
        "config: tenants[1].keys[0] = ***: the same key as tenants[0].keys[1]",
    );
    refused(&tenant("a", "[\"\"]"), "config: tenants[0].keys[0] = ***: empty key");
    refused(
        &tenant("a", "[\"a b\"]"),
        "config: tenants[0].keys[0] = ***: a key may hold only printable ASCII without spaces",
    );
    refused(&tenant("a", "[]"), "config: tenants[0].keys = []: a tenant needs at least one key");
    refused(&tenant("", "[\"x\"]"), "config: tenants[0].name = \"\": must not be empty");
    refused(&tenant("a", "[12345]"), "config: tenants[0].keys[0] = ***: expected text in quotes");
    refused("[[tenants]]\nname = \"a\"", "config: tenants[0].keys: missing, and there is no default");
}

#[test]
fn secrets_are_not_printed() {
    let config = check("[[tenants]]\nname = \"a\"\nkeys = [\"hunter2\"]").unwrap();
    let printed = format!("{config:?}{}", toml::to_string(&config).unwrap());
    assert!(!printed.contains("hunter2") && printed.contains("***"));
}

#[test]
fn exposure() {
    let open = "[server]\nbind = \"0.0.0.0:8000\"\n";
    refused(
        open,
        "config: server.bind = \"0.0.0.0:8000\": not a loopback address and no [[tenants]] have keys: add a key, or \
         set server.allow_unauthenticated",
    );
    check(&format!("{open}allow_unauthenticated = true")).unwrap();
    check(&format!("{open}[[tenants]]\nname = \"a\"\nkeys = [\"x\"]")).unwrap();
    check("[server]\nbind = \"[::1]:8000\"").unwrap();
}

#[test]
fn files_that_are_not_toml() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keepsake.toml");
    let name = file.display();
    let error = Config::read(Some(&file)).unwrap_err().to_string();
    assert!(error.starts_with(&format!("config: cannot read {name}: No such file")), "{error}");
    for (text, place) in [
        ("[server]\nbind = ", "2:8"),
        ("[server]\nmax_queued = 1\nmax_queued = 2", "3:1"),
        ("[server\n", "1:8"),
        ("\"\u{e9}\" = ?", "1:8"),
    ] {
        std::fs::write(&file, text).unwrap();
        let error = Config::read(Some(&file)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("config: {name}:{place}: ")), "{text:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    std::fs::write(&file, [0xff, 0xfe]).unwrap();
    let error = Config::read(Some(&file)).unwrap_err().to_string();
    assert!(error.contains("UTF-8"), "{error}");
}

#[test]
fn device_pool_holds_a_chunk() {
    let mut config = Config::default();
    assert_eq!(config.check_device_pool(64 << 20).unwrap(), 8);
    config.tiers[0].capacity = ByteSize::kib(512);
    assert_eq!(
        config.check_device_pool(720 << 10).unwrap_err().to_string(),
        "config: tiers[0].capacity = \"512 KiB\": smaller than one chunk of this model (720 KiB, 32 tokens)"
    );
}

#[test]
fn backends_read_their_own_keys() {
    #[derive(serde::Deserialize, Debug, PartialEq)]
    #[serde(default, deny_unknown_fields)]
    struct PlainFiles {
        fanout: u32,
        #[serde(with = "keepsake_config::units::duration")]
        flush: std::time::Duration,
    }
    impl Default for PlainFiles {
        fn default() -> Self {
            Self { fanout: 256, flush: std::time::Duration::from_secs(1) }
        }
    }
    let tier = |text: &str| -> TierConfig {
        check(&with_tiers(&format!("[[tiers]]\nkind = \"plain_files\"\ncapacity = \"1 GiB\"\n{text}"))).unwrap().tiers
            [1]
        .clone()
    };
    let parsed: PlainFiles = tier("flush = \"2s\"").parse_options().unwrap();
    assert_eq!(parsed, PlainFiles { fanout: 256, flush: std::time::Duration::from_secs(2) });
    let error = tier("fan_out = 3").parse_options::<PlainFiles>().unwrap_err();
    assert_eq!(error.to_string(), "config: fan_out = 3: unknown key, did you mean `fanout`?");
    let error = tier("fanout = -3").parse_options::<PlainFiles>().unwrap_err();
    assert_eq!(error.to_string(), "config: fanout = -3: expected a whole number, 0 or more");
}
