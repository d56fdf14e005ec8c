//! The same tests for every backend and every decorator, and random operations against the oracle.

#[allow(dead_code, reason = "its constructor is tested through the registry")]
#[path = "../examples/plain_files/tier.rs"]
mod plain_files;
mod support;

use std::sync::Arc;
use std::time::Duration;

use keepsake_tiers::conformance::{against_oracle, layout, random_ops, Fixture, TierOp, LAYOUT_ID};
use keepsake_tiers::wrap::{Counting, Faulty, Throttled};
use keepsake_tiers::{tier_conformance, Tier};
use plain_files::PlainFilesTier;
use proptest::prelude::*;
use support::{device, dram, memory, rocks, wrapped};

tier_conformance!(memory_tier, memory);
tier_conformance!(device_tier, device);
tier_conformance!(dram_tier, dram);
tier_conformance!(rocks_tier, rocks);
tier_conformance!(plain_files_tier, plain_files_fixture);
tier_conformance!(faulty_dram, || wrapped(dram(), Faulty::new));
tier_conformance!(faulty_rocks, || wrapped(rocks(), Faulty::new));
tier_conformance!(counting_device, || wrapped(device(), Counting::new));
tier_conformance!(counting_plain_files, || wrapped(plain_files_fixture(), Counting::new));
tier_conformance!(throttled_dram, || wrapped(dram(), fast_bus));

fn fast_bus(inner: Arc<dyn Tier>) -> Throttled {
    Throttled::new(inner, Duration::ZERO, u64::MAX)
}

fn plain_files_fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let chunk_bytes = layout().chunk_bytes();
    let reopen = move || {
        let tier = PlainFilesTier::open("plain_files", &path, 24 * 4096, chunk_bytes, LAYOUT_ID, false);
        Arc::new(tier.unwrap()) as Arc<dyn Tier>
    };
    Fixture { tier: reopen(), chunk_bytes, reopen: Some(Box::new(reopen)), keep: Box::new(folder) }
}

fn op() -> impl Strategy<Value = TierOp> {
    let index = || 0..8_u64;
    let content = || 0..1_000_u64;
    prop_oneof![
        (index(), content()).prop_map(|(index, content)| TierOp::Reserve { index, content }),
        Just(TierOp::CommitOldest),
        Just(TierOp::AbortOldest),
        (index(), content()).prop_map(|(index, content)| TierOp::Store { index, content }),
        index().prop_map(|index| TierOp::Pin { index }),
        Just(TierOp::UnpinOldest),
        index().prop_map(|index| TierOp::Read { index }),
        index().prop_map(|index| TierOp::Remove { index }),
    ]
}

fn compare(fixture: Fixture, ops: &[TierOp]) {
    against_oracle(&fixture.tier, fixture.chunk_bytes, ops);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_operations_on_dram(ops in prop::collection::vec(op(), 0..200)) {
        compare(dram(), &ops);
    }

    #[test]
    fn any_operations_on_the_device(ops in prop::collection::vec(op(), 0..200)) {
        compare(device(), &ops);
    }

    #[test]
    fn any_operations_on_plain_files(ops in prop::collection::vec(op(), 0..60)) {
        compare(plain_files_fixture(), &ops);
    }

    #[test]
    fn any_operations_on_rocks(ops in prop::collection::vec(op(), 0..60)) {
        compare(rocks(), &ops);
    }
}

#[test]
fn ten_thousand_operations_keep_the_books() {
    for seed in [1, 2, 3] {
        compare(dram(), &random_ops(seed, 10_000));
        compare(device(), &random_ops(seed, 10_000));
    }
}
