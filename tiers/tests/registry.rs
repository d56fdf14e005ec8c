//! Backends by name, from configuration.

#[path = "../examples/plain_files/tier.rs"]
mod plain_files;
mod support;

use std::path::Path;
use std::sync::Arc;

use keepsake_config::{ByteSize, TierConfig};
use keepsake_kernels::{Device, DeviceKind, KvPool};
use keepsake_tiers::conformance::{read, store, LAYOUT_ID};
use keepsake_tiers::wrap::Counting;
use keepsake_tiers::{BlockPool, Registry, Tier, TierContext, TurnStore, TurnStoreConfig};
use support::large_layout;

fn context() -> TierContext {
    let device = Device::open(DeviceKind::Cpu, 1).unwrap();
    let pool = KvPool::new(&device, large_layout(), 8).unwrap();
    TierContext {
        toml_path: "tiers[1]".to_owned(),
        layout: large_layout(),
        layout_id: LAYOUT_ID,
        device: Some((Arc::new(pool), Arc::new(BlockPool::new(8)))),
    }
}

fn config(kind: &str, folder: &Path) -> TierConfig {
    let mut config = TierConfig::new(kind, ByteSize::mib(32));
    config.path = Some(folder.join(kind));
    config
}

fn registry() -> Registry {
    let mut registry = Registry::default();
    registry.register("plain_files", plain_files::construct);
    registry
}

#[test]
fn every_kind_opens_and_works() {
    let folder = tempfile::tempdir().unwrap();
    let registry = registry();
    let kinds: Vec<&str> = registry.kinds().collect();
    assert_eq!(kinds, ["device", "dram", "plain_files", "rocks"]);
    for kind in kinds {
        let mut config = config(kind, folder.path());
        config.name = Some(format!("my-{kind}"));
        let tier = registry.open(&config, &context()).unwrap();
        assert_eq!(tier.name(), format!("my-{kind}"));
        let bytes = large_layout().chunk_bytes();
        assert!(store(&tier, 1, bytes).unwrap());
        assert!(read(&tier, 1, bytes).is_some());
        assert!(tier.health().is_ok());
    }
}

#[test]
fn kinds_can_be_replaced_and_decorated() {
    let folder = tempfile::tempdir().unwrap();
    let mut registry = registry();
    let plain = registry.clone();
    registry.register("dram", move |config, context| {
        let inner = plain.open(config, context)?;
        Ok(Arc::new(Counting::new(inner)) as Arc<dyn Tier>)
    });
    let tier = registry.open(&config("dram", folder.path()), &context()).unwrap();
    assert!(!tier.capability().host_addressable, "seen through the decorator");
}

#[test]
fn refusals_name_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = |change: &dyn Fn(&mut TierConfig), kind: &str| {
        let mut config = config(kind, folder.path());
        change(&mut config);
        let error = registry().open(&config, &context()).err().expect("refused");
        error.to_string()
    };
    let message = refusal(&|_| {}, "tape");
    assert!(message.contains("tiers[1].kind") && message.contains("known are"), "{message}");
    for kind in ["device", "dram", "rocks", "plain_files"] {
        let add = |config: &mut TierConfig| {
            config.options.insert("colour".to_owned(), "blue".into());
        };
        let message = refusal(&add, kind);
        assert!(message.contains("tiers[1].colour"), "{kind}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    let wrong = |config: &mut TierConfig| {
        config.options.insert("sync".to_owned(), "perhaps".into());
    };
    let message = refusal(&wrong, "plain_files");
    assert!(message.contains("tiers[1].sync"), "{message}");
    let small = |config: &mut TierConfig| config.capacity = ByteSize::kib(32);
    for kind in ["dram", "rocks"] {
        let message = refusal(&small, kind);
        assert!(message.contains("tiers[1].capacity"), "{kind}: {message}");
    }
}

#[test]
fn the_turn_store_takes_its_cap_and_ttl_from_the_rocks_tier() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config("rocks", folder.path());
    config.options.insert("turns_capacity".to_owned(), "20 MiB".into());
    config.options.insert("turn_ttl".to_owned(), "2days".into());
    let turns = TurnStoreConfig::from_tier(&config, "tiers[1]").unwrap();
    assert_eq!(turns.capacity_bytes, 20 << 20);
    assert_eq!(turns.ttl.as_secs(), 2 * 24 * 3600);
    assert_eq!(turns.path, folder.path().join("rocks/turns"));
    let store = TurnStore::open(turns).unwrap();
    assert_eq!(store.usage().capacity_bytes, 20 << 20);
    config.options.insert("turn_ttl".to_owned(), "soon".into());
    let error = TurnStoreConfig::from_tier(&config, "tiers[1]").unwrap_err();
    assert!(error.to_string().contains("tiers[1].turn_ttl"), "{error}");
}
