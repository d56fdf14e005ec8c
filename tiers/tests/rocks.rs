//! What only a disk can do wrong: caps, kills, torn files, full disks.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use keepsake_kernels::KvLayout;
use keepsake_tiers::conformance::{key, meta, payload, read, store, LAYOUT_ID};
use keepsake_tiers::wrap::{Effect, Fault, Faulty, Op};
use keepsake_tiers::{
    ChunkKey, Health, Move, MoveError, Mover, MoverConfig, MoverPool, RocksTier, Tier, TierError, TurnRecord,
    TurnStore, TurnStoreConfig,
};
use support::{device_tier, kv_config, large_layout, open_rocks};

const MIB: u64 = 1 << 20;

fn bytes() -> usize {
    large_layout().chunk_bytes()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// As `du` counts.
fn disk_bytes(folder: &Path) -> u64 {
    let output = Command::new("du").args(["-s", "-B1"]).arg(folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn the_folder_stays_within_its_cap() {
    // One chunk a blob file.
    keeps_its_cap(large_layout(), 50 * MIB);
}

#[test]
fn the_folder_stays_within_its_cap_when_chunks_share_files() {
    // Four chunks a blob file: those that live on are copied out of files with garbage.
    let layout = KvLayout { num_layers: 1, ..large_layout() };
    keeps_its_cap(layout, 20 * MIB);
}

/// Writes four times the cap. Removes as told, the oldest first but sparing every fifth, so that old files keep some life.
fn keeps_its_cap(layout: KvLayout, cap: u64) {
    let folder = tempfile::tempdir().unwrap();
    let bytes = layout.chunk_bytes();
    let mut config = kv_config(folder.path(), cap);
    config.layout = layout;
    let tier: Arc<dyn Tier> = Arc::new(RocksTier::open(config).unwrap());
    let num_chunks = 4 * cap / bytes as u64;
    let (mut oldest, mut spared) = (0, Vec::new());
    let (mut num_waits, mut most) = (0, 0);
    for index in 0..num_chunks {
        while !store(&tier, index, bytes).unwrap() {
            num_waits += 1;
            assert!(num_waits < 10_000, "room does not come back");
            std::thread::sleep(Duration::from_millis(5));
        }
        while tier.usage().wants_eviction() {
            if oldest % 5 == 0 && spared.len() < 100 {
                spared.push(oldest);
            } else {
                assert!(tier.remove(&key(oldest)).unwrap());
            }
            oldest += 1;
        }
        if index % 64 == 0 {
            most = most.max(disk_bytes(folder.path()));
        }
    }
    println!("waited {num_waits} times for {num_chunks} chunks, at most {most} bytes on disk");
    assert!(most <= cap + cap / 10, "{most} bytes on disk with a cap of {cap}");
    for index in spared {
        assert_eq!(read(&tier, index, bytes), Some(payload(index, bytes)));
    }
    for (key, _) in tier.recover().unwrap() {
        assert!(tier.remove(&key).unwrap());
    }
    wait_until("removed chunks give their space back", || disk_bytes(folder.path()) < cap / 8);
}

#[test]
fn fresh_chunks_are_found_after_a_restart_without_a_close() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().to_str().unwrap();
    let mut child = child("kill_victim", home);
    wait_until("the child has stored and flushed", || folder.path().join("ready").exists());
    child.kill().unwrap();
    child.wait().unwrap();

    let tier: Arc<dyn Tier> = Arc::new(open_rocks(folder.path(), 64 * MIB));
    let found = tier.recover().unwrap();
    assert!(found.len() >= 20, "only {} chunks after the kill", found.len());
    assert_eq!(tier.usage().num_chunks, found.len() as u64);
    // Whatever is listed is readable and right: never present but unreadable.
    for index in 0..10_000 {
        if let Some(content) = read(&tier, index, bytes()) {
            assert_eq!(content, payload(index, bytes()));
        }
    }
    let turns = open_turns(folder.path());
    let num_acknowledged: u64 =
        std::fs::read_to_string(folder.path().join("acknowledged")).unwrap().lines().count() as u64;
    assert!(num_acknowledged > 0);
    for index in 0..num_acknowledged {
        let turn = turns.get(&turn(index).id).unwrap();
        assert_eq!(turn, Some(self::turn(index)), "an acknowledged turn is lost");
    }
    let chain = turns.chain(&turn(num_acknowledged - 1).id).unwrap().unwrap();
    assert_eq!(chain.len() as u64, 3 * num_acknowledged);
}

/// Not a test of its own: the process that the test above kills.
#[test]
fn kill_victim() {
    let Ok(home) = std::env::var("KEEPSAKE_TEST_HOME") else {
        return;
    };
    let home = Path::new(&home);
    let tier: Arc<dyn Tier> = Arc::new(open_rocks(home, 64 * MIB));
    let turns = open_turns(home);
    let mut acknowledged = std::fs::File::create(home.join("acknowledged")).unwrap();
    for index in 0.. {
        store(&tier, index, bytes()).unwrap();
        if index % 7 == 3 {
            tier.remove(&key(index - 2)).unwrap();
        }
        turns.put(vec![turn(index)]).unwrap();
        std::io::Write::write_all(&mut acknowledged, format!("{index}\n").as_bytes()).unwrap();
        if index == 30 {
            tier.flush().unwrap();
            std::fs::write(home.join("ready"), "").unwrap();
        }
    }
}

fn child(test: &str, home: &str) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("KEEPSAKE_TEST_HOME", home)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn open_turns(folder: &Path) -> TurnStore {
    let config =
        TurnStoreConfig { path: folder.join("turns"), capacity_bytes: 64 * MIB, ttl: Duration::from_secs(1_000) };
    TurnStore::open(config).unwrap()
}

fn turn(index: u64) -> TurnRecord {
    let id = |index: u64| u128::from(index + 1).to_be_bytes();
    TurnRecord {
        id: id(index),
        parent: index.checked_sub(1).map(id),
        tenant: "t".to_owned(),
        tokens: vec![index as u32; 3],
        items: payload(index, 100),
        created_at: index,
        fingerprints: [[0; 32]; 3],
        finished: true,
        hidden: false,
    }
}

#[test]
fn torn_and_lost_blob_files_cost_chunks_but_not_the_tier() {
    for tear in [tear_in_half, remove_file] {
        let folder = tempfile::tempdir().unwrap();
        let tier: Arc<dyn Tier> = Arc::new(open_rocks(folder.path(), 64 * MIB));
        for index in 0..60 {
            store(&tier, index, bytes()).unwrap();
        }
        tier.close(soon()).unwrap();
        drop(tier);
        let kv = folder.path().join("kv");
        let files = std::fs::read_dir(&kv).unwrap().map(|entry| entry.unwrap().path());
        let mut blobs: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "blob")).collect();
        blobs.sort();
        assert!(blobs.len() > 2, "{} blob files", blobs.len());
        tear(&blobs[0]);

        let tier: Arc<dyn Tier> = Arc::new(open_rocks(folder.path(), 64 * MIB));
        let mut num_failed = 0;
        for index in 0..60 {
            let Some(pinned) = tier.pin(&key(index)).unwrap() else {
                continue;
            };
            let mut out = vec![0; bytes()];
            match pinned.read(0, &mut out) {
                Ok(()) => assert_eq!(out, payload(index, bytes())),
                Err(_) => num_failed += 1,
            }
            drop(pinned);
            // Failed once, a miss from then on, and it can be written again.
            if out != payload(index, bytes()) {
                assert!(tier.pin(&key(index)).unwrap().is_none());
            }
        }
        println!("{num_failed} chunks failed, {} are left", tier.usage().num_chunks);
        assert!(tier.usage().num_chunks < 60);
        for index in 0..60 {
            assert!(store(&tier, index, bytes()).unwrap());
            assert_eq!(read(&tier, index, bytes()), Some(payload(index, bytes())));
        }
        assert_eq!(tier.usage().num_chunks, 60);
        assert_eq!(tier.health(), Health::Ok);
    }
}

fn tear_in_half(path: &Path) {
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len / 2).unwrap();
}

fn remove_file(path: &Path) {
    std::fs::remove_file(path).unwrap();
}

#[test]
fn chunks_of_another_model_are_misses_and_make_room() {
    let folder = tempfile::tempdir().unwrap();
    let tier: Arc<dyn Tier> = Arc::new(open_rocks(folder.path(), 64 * MIB));
    for index in 0..5 {
        store(&tier, index, bytes()).unwrap();
    }
    let mut foreign = meta(bytes());
    foreign.layout_id[0] ^= 1;
    assert!(tier.reserve(&key(1), &foreign).is_err());
    drop(tier);
    let mut config = kv_config(folder.path(), 64 * MIB);
    config.layout_id = [9; 16];
    let other = RocksTier::open(config).unwrap();
    assert!(other.recover().unwrap().is_empty());
    assert!(other.pin(&key(1)).unwrap().is_none());
    assert_eq!(other.usage().used_bytes, 0);
    drop(other);
    let tier = open_rocks(folder.path(), 64 * MIB);
    assert!(tier.recover().unwrap().is_empty(), "the other model let go of them");
    assert_eq!(LAYOUT_ID, meta(bytes()).layout_id);
}

#[test]
fn one_damaged_value_is_one_failed_load() {
    let folder = tempfile::tempdir().unwrap();
    let faulty = Faulty::new(Arc::new(open_rocks(folder.path(), 64 * MIB)));
    let faults = faulty.faults();
    let disk: Arc<dyn Tier> = Arc::new(faulty);
    let (device, blocks) = device_tier(large_layout(), 4);
    let mover = MoverPool::new(large_layout(), MoverConfig::default()).unwrap();
    let load = |key: ChunkKey| {
        let from = disk.pin(&key).unwrap()?;
        let block = blocks.alloc().unwrap();
        let to = device.adopt(block, key, meta(bytes()));
        let outcome = mover.submit_all(vec![Move { from, to }]).wait(soon()).remove(0);
        blocks.free(block);
        Some(outcome.result)
    };
    for effect in [Effect::FlipStored, Effect::TearStored] {
        faults.arm(Fault::once(Op::Commit, effect));
        store(&disk, 1, bytes()).unwrap();
        assert!(matches!(load(key(1)), Some(Err(MoveError::Corrupt(_)))));
        assert!(load(key(1)).is_none(), "a miss from then on");
        store(&disk, 1, bytes()).unwrap();
        assert!(matches!(load(key(1)), Some(Ok(()))));
        assert!(disk.remove(&key(1)).unwrap());
    }
    // An error of the medium is a fault of this one load.
    store(&disk, 2, bytes()).unwrap();
    faults.arm(Fault::once(Op::Read, Effect::Error(std::io::ErrorKind::Other)));
    assert!(matches!(load(key(2)), Some(Err(MoveError::Fault(_)))));
    assert!(matches!(load(key(2)), Some(Ok(()))));
}

/// A small file system of its own; `None` (said loudly) where that is not allowed.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(mebibytes: u64) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mebibytes}m"), "tmpfs"])
            .arg(folder.path())
            .stderr(Stdio::null())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(folder));
        }
        eprintln!("SKIPPED: mounting a small tmpfs needs root; the full-disk test did not run");
        None
    }

    /// Takes all free space away.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.0.path().join("ballast")).unwrap();
        let block = vec![1; 1 << 16];
        while std::io::Write::write_all(&mut file, &block).is_ok() {}
    }

    fn free(&self) {
        std::fs::remove_file(self.0.path().join("ballast")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The folder itself is removed by its own drop, which follows.
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_makes_chunks_read_only_until_space_returns() {
    let Some(disk) = SmallDisk::mount(64) else {
        return;
    };
    let tier: Arc<dyn Tier> = Arc::new(open_rocks(disk.0.path(), 60 * MIB));
    for index in 0..20 {
        assert!(store(&tier, index, bytes()).unwrap());
    }
    tier.flush().unwrap();
    disk.fill();
    let mut index = 100;
    wait_until("the tier notices", || {
        index += 1;
        // An error here is the failed write itself; it is the fault that turns the tier read-only.
        drop(store(&tier, index, bytes()));
        !tier.health().is_ok()
    });
    assert!(matches!(tier.health(), Health::ReadOnly(_)), "{:?}", tier.health());
    assert!(tier.reserve(&key(1_000), &meta(bytes())).unwrap().is_none());
    for index in 0..20 {
        assert_eq!(read(&tier, index, bytes()), Some(payload(index, bytes())), "reading goes on");
    }
    // Removing while nothing can be written: gone at once, and still gone later.
    assert!(tier.remove(&key(3)).unwrap());
    assert!(tier.pin(&key(3)).unwrap().is_none());
    // It does not come back while the disk stays full.
    std::thread::sleep(Duration::from_millis(2_500));
    assert!(!tier.health().is_ok());
    disk.free();
    wait_until("the tier recovers by itself", || tier.health().is_ok());
    for index in 0..20 {
        let expected = (index != 3).then(|| payload(index, bytes()));
        assert_eq!(read(&tier, index, bytes()), expected);
    }
    assert!(store(&tier, 2_000, bytes()).unwrap());
    tier.flush().unwrap();
    assert_eq!(read(&tier, 2_000, bytes()), Some(payload(2_000, bytes())));
    assert_eq!(tier.usage().num_chunks, tier.recover().unwrap().len() as u64);
    assert_eq!(tier.usage().reserved_bytes, 0);
    tier.close(soon()).unwrap();
}

#[test]
fn a_full_disk_refuses_turns_until_space_returns() {
    let Some(disk) = SmallDisk::mount(64) else {
        return;
    };
    let turns = open_turns(disk.0.path());
    turns.put(vec![turn(0)]).unwrap();
    disk.fill();
    let mut last = 0;
    let refusal = loop {
        let mut next = turn(last + 1);
        next.items = payload(last, 100_000);
        match turns.put(vec![next]) {
            Ok(()) => last += 1,
            Err(error) => break error,
        }
    };
    println!("refused: {refusal}");
    let again = turns.put(vec![turn(last + 1)]).unwrap_err();
    assert!(matches!(again, TierError::ReadOnly { .. }), "{again}");
    assert!(matches!(turns.health(), Health::ReadOnly(_)));
    assert_eq!(turns.get(&turn(0).id).unwrap(), Some(turn(0)), "reading goes on");
    disk.free();
    wait_until("turns are taken again", || turns.put(vec![turn(last + 1)]).is_ok());
    assert!(turns.health().is_ok());
    drop(turns);
    let turns = open_turns(disk.0.path());
    assert_eq!(turns.get(&turn(last + 1).id).unwrap(), Some(turn(last + 1)));
    let chain = turns.chain(&turn(last).id).unwrap().unwrap();
    assert_eq!(chain.len() as u64, 3 * (last + 1), "every acknowledged turn is there");
}
