//! Overrides from the environment. One test: variables belong to the whole process.

use keepsake_config::{Config, Machine};

#[test]
fn environment_overrides_the_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[server]\nmax_queued = 7\nhttp_workers = 3\n").unwrap();
    let set = |name: &str, value: &str| std::env::set_var(format!("KEEPSAKE__{name}"), value);
    set("SERVER__HTTP_WORKERS", "5");
    set("SERVER__BIND", "127.0.0.1:9000");
    set("SERVER__MAX_BODY", "2 MiB");
    set("SCHEDULER__RESERVE", "0.2");
    set("SCHEDULER__LOAD_TIMEOUT", "250ms");
    set("MODEL__NAME", "tiny");
    set("TIERS", r#"[{kind="device", capacity="64 MiB"}, {kind="rocks", capacity="1 GiB", turns_capacity="32 MiB"}]"#);
    set("TENANTS", r#"[{name="a", keys=["k1","k2"]}]"#);
    let config = Config::read(Some(file.path())).unwrap();
    assert_eq!(config.server.max_queued, 7, "the file's value stays");
    assert_eq!(config.server.http_workers, 5);
    assert_eq!(config.server.bind.port(), 9000);
    assert_eq!(config.server.max_body.as_u64(), 2 << 20);
    assert_eq!(config.scheduler.reserve, 0.2);
    assert_eq!(config.scheduler.load_timeout.as_millis(), 250);
    assert_eq!(config.model.name.as_deref(), Some("tiny"));
    assert_eq!(config.tiers.len(), 2);
    assert_eq!(config.tiers[1].options["turns_capacity"].as_str(), Some("32 MiB"));
    assert_eq!(config.tenants[0].keys[1].expose(), "k2");

    let error = || Config::read(Some(file.path())).unwrap_err().to_string();
    set("SERVER__MAX_QUEUED", "lots");
    assert_eq!(
        error(),
        "config: server.max_queued = \"lots\": expected a whole number, 0 or more (set by the environment: \
         KEEPSAKE__SERVER__MAX_QUEUED)"
    );
    set("SERVER__MAX_QUEUED", "0");
    let roomy = Machine { memory_bytes: 1 << 40, free_bytes: vec![("/".into(), 1 << 40)] };
    assert_eq!(
        Config::read(Some(file.path())).unwrap().validate(&roomy).unwrap_err().to_string(),
        "config: server.max_queued = 0: must be 1 to 100000 (set by the environment: KEEPSAKE__SERVER__MAX_QUEUED)"
    );
    set("SERVER__MAX_QUEUED", "1");
    set("TIERS", r#"[{kind="device", capacity="64"}]"#);
    assert!(error().starts_with("config: tiers[0].capacity = \"64\": expected a size"), "{}", error());
    assert!(error().ends_with("(set by the environment: KEEPSAKE__TIERS)"), "{}", error());
    set("TIERS", r#"[{kind="device", capacity="64 MiB"}]"#);
    set("SERVER__PROT", "9");
    assert!(error().starts_with("config: server.prot = 9: unknown key"), "{}", error());
}
