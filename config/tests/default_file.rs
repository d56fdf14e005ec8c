//! `keepsake.toml` and `Config::default()` say the same, and the file hides no key.

use keepsake_config::{Config, Machine, RocksOptions, TierConfig, DEFAULT_TOML};

#[test]
fn file_equals_default() {
    let parsed: Config = toml::from_str(DEFAULT_TOML).unwrap();
    assert_eq!(parsed, Config::default());
    // Not only equal after defaults fill in: every key that has a default is really written there.
    let written: toml::Table = DEFAULT_TOML.parse().unwrap();
    let mut expected = toml::Table::try_from(Config::default()).unwrap();
    expected.remove("tenants");
    expected.insert("model".into(), toml::Table::new().into());
    assert_eq!(written.keys().collect::<Vec<_>>().len(), expected.len());
    for (section, keys) in &expected {
        assert_eq!(normal(&written[section]), normal(keys), "[{section}]");
    }
}

/// Durations have several spellings ("10m", "10min"): compare keys there, values elsewhere.
fn normal(section: &toml::Value) -> toml::Value {
    let mut section = section.clone();
    if let Some(table) = section.as_table_mut() {
        for key in ["shutdown_deadline", "body_timeout", "keep_alive_ping", "load_timeout", "idle_after", "ttl"] {
            if table.contains_key(key) {
                table.insert(key.into(), "a duration".into());
            }
        }
    }
    section
}

#[test]
fn commented_keys_are_real() {
    let uncommented: String = DEFAULT_TOML
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            // The dummy shape excludes the path above it.
            Some(key) if key.starts_with("dummy") => line,
            Some(key) if key.contains(" = ") && !key.contains(':') || key.starts_with("[[") => key,
            _ => line,
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let config: Config = toml::from_str(&uncommented).unwrap();
    assert_eq!(config.model.max_context, Some(8192));
    assert!(config.model.path.is_some() && config.model.name.is_some());
    assert!(config.model.chat_template.is_some());
    assert_eq!(config.tenants[0].keys[0].expose(), "a-long-random-key");
    let rocks = RocksOptions::of(&config.tiers[2]).unwrap();
    let documented_default = RocksOptions { write_buffer: rocks.write_buffer, ..RocksOptions::default() };
    assert!(rocks.write_buffer.is_some());
    assert_eq!(rocks, documented_default);
}

#[test]
fn default_fits_a_small_machine() {
    let small = Machine { memory_bytes: 2 << 30, free_bytes: vec![("/".into(), 6 << 30)] };
    Config::default().validate(&small).unwrap();
}

#[test]
fn serialised_default_reads_back() {
    let mut config = Config::default();
    let mut tier = TierConfig::new("plain_files", keepsake_config::ByteSize(1_234_567));
    tier.options.insert("fanout".into(), 16.into());
    config.tiers.push(tier);
    let text = toml::to_string(&config).unwrap();
    assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
}
