//! A calibration of generated weights on the real device, kept and read back.

use keepsake_config::ByteSize;
use keepsake_kernels::DeviceKind;
use keepsake_model::ModelSource;

use super::*;

fn subject(folder: &std::path::Path) -> Subject {
    let device = Device::open(DeviceKind::Cpu, 1).unwrap();
    let model = Arc::new(keepsake_model::load(&ModelSource::Dummy("tiny".to_owned()), &device).unwrap());
    let layout = model.kv_layout(32);
    let mut rocks = TierConfig::new("rocks", ByteSize::mib(16));
    rocks.path = Some(folder.join("rocks"));
    Subject {
        layout,
        layout_id: [7; 16],
        max_context: 512,
        tiers: vec![TierConfig::new("device", ByteSize::mib(4)), TierConfig::new("dram", ByteSize::mib(1)), rocks],
        model,
        device,
    }
}

#[test]
fn the_first_run_measures_and_the_second_reads() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let subject = subject(folder.path());
    let first = obtain_in(&cache, &subject, false).unwrap();
    assert_eq!(first.origin, Origin::Measured);
    let contexts: Vec<u32> = first.calibration.chunks.iter().map(|chunk| chunk.context).collect();
    assert_eq!(contexts[0], 32);
    assert!(contexts.windows(2).all(|pair| pair[1] == 2 * pair[0]) && contexts[contexts.len() - 1] <= 512);
    assert_eq!(first.calibration.costs.tiers.len(), 2);
    let names: Vec<_> = first.calibration.routes.iter().map(|r| (r.from.as_str(), r.to.as_str())).collect();
    assert_eq!(names, [("dram", "device"), ("device", "dram"), ("rocks", "device"), ("device", "rocks")]);
    assert_eq!(first.calibration.disks.len(), 1);
    // Nothing is left beside the tier's own files, of which there were none.
    assert_eq!(std::fs::read_dir(folder.path().join("rocks")).unwrap().count(), 0);

    let second = obtain_in(&cache, &subject, false).unwrap();
    assert_eq!(second.origin, Origin::File);
    let numbers = |calibration: &Calibration| {
        let Costs { step, chunk, decode_row, tiers } = &calibration.costs;
        let curves = chunk.points().iter().chain(decode_row.points()).map(|point| point.1);
        let routes = tiers.iter().flat_map(|t| [t.load.latency, t.load.chunk, t.store.latency, t.store.chunk]);
        // JSON may move the last digit.
        curves.chain(routes).chain([*step]).map(|seconds| format!("{seconds:.9e}")).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&second.calibration), numbers(&first.calibration));
    let forced = obtain_in(&cache, &subject, true).unwrap();
    assert_eq!(forced.origin, Origin::Measured);
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 1, "replaced, not added");
}

#[test]
fn a_file_that_is_damaged_or_foreign_is_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let subject = subject(folder.path());
    let path = obtain_in(&cache, &subject, false).unwrap().path;
    let good = std::fs::read_to_string(&path).unwrap();
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut value: serde_json::Value = serde_json::from_str(&good).unwrap();
        change(&mut value);
        value.to_string()
    };
    let bad = [
        String::new(),
        good[..good.len() / 2].to_owned(),
        changed(&|v| v["format"] = 2.into()),
        changed(&|v| v["fingerprint"] = "0".into()),
        changed(&|v| v["costs"]["tiers"] = serde_json::json!([])),
        changed(&|v| v["costs"]["step"] = (-1.0).into()),
        changed(&|v| v["costs"]["chunk"] = serde_json::json!([])),
        changed(&|v| v["costs"]["tiers"][0]["load"]["chunk"] = (-1.0).into()),
    ];
    for text in bad {
        std::fs::write(&path, &text).unwrap();
        let obtained = obtain_in(&cache, &subject, false).unwrap();
        assert_eq!(obtained.origin, Origin::Measured, "{text}");
    }
    assert_eq!(obtain_in(&cache, &subject, false).unwrap().origin, Origin::File);
}

#[test]
fn whatever_changes_the_numbers_changes_the_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let subject = subject(folder.path());
    let base = subject.fingerprint();
    assert_eq!(base, subject.clone().fingerprint());
    let mut others = vec![subject.clone(); 5];
    others[0].max_context = 256;
    others[1].tiers[1].capacity = ByteSize::mib(2);
    others[2].tiers.pop();
    others[3].device = Device::open(DeviceKind::Cpu, 2).unwrap();
    others[4].layout.chunk_tokens = 64;
    for (index, other) in others.iter().enumerate() {
        assert_ne!(other.fingerprint(), base, "change {index}");
    }
}
