//! The contract of [`Tier`], a function a clause.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{against_oracle, key, meta, payload, random_ops, Fixture};
use crate::{ChunkKey, MoveError, Result, Tier, TierError};

type Constructor<'a> = &'a dyn Fn() -> Fixture;

pub fn commit_makes_visible(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    let content = payload(1, bytes);
    let mut place = tier.reserve(&key(1), &meta(bytes)).unwrap().expect("there is room");
    assert_eq!(place.tier(), tier.name());
    let half = bytes / 2;
    place.write(half, &content[half..]).unwrap();
    assert!(tier.pin(&key(1)).unwrap().is_none(), "visible before its commit");
    place.write(0, &content[..half]).unwrap();
    assert!(tier.pin(&key(1)).unwrap().is_none(), "visible before its commit");
    tier.commit(place).unwrap();
    let pinned = tier.pin(&key(1)).unwrap().expect("committed");
    assert_eq!((*pinned.key(), *pinned.meta()), (key(1), meta(bytes)));
    assert_eq!(pinned.tier(), tier.name());
    assert_eq!(read(tier, 1, bytes), Some(content));
    assert!(tier.pin(&key(2)).unwrap().is_none());
}

pub fn abort_on_drop(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    let before = tier.usage();
    let mut place = tier.reserve(&key(1), &meta(bytes)).unwrap().unwrap();
    place.write(0, &payload(1, bytes)).unwrap();
    assert!(tier.usage().reserved_bytes > 0);
    drop(place);
    assert!(tier.pin(&key(1)).unwrap().is_none());
    assert_eq!(tier.usage().used_bytes, before.used_bytes);
    assert_eq!(tier.usage().reserved_bytes, 0);
    // Half filled and committed: refused, and the room comes back as well.
    let mut place = tier.reserve(&key(1), &meta(bytes)).unwrap().unwrap();
    place.write(0, &payload(1, bytes)[1..]).unwrap();
    assert!(tier.commit(place).is_err());
    assert!(tier.pin(&key(1)).unwrap().is_none());
    assert_eq!(tier.usage().used_bytes, before.used_bytes);
}

pub fn pin_blocks_remove(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    store(tier, 1, bytes).unwrap();
    let first = tier.pin(&key(1)).unwrap().unwrap();
    let second = tier.pin(&key(1)).unwrap().unwrap();
    assert!(!tier.remove(&key(1)).unwrap());
    drop(first);
    assert!(!tier.remove(&key(1)).unwrap(), "a second pin still holds it");
    // Neither does another commit of the same key change what a pin reads.
    store_content(tier, 1, &payload(99, bytes)).unwrap();
    let mut out = vec![0; bytes];
    second.read(0, &mut out).unwrap();
    assert_eq!(out, payload(1, bytes));
    drop(second);
    assert!(tier.remove(&key(1)).unwrap());
    assert!(!tier.remove(&key(1)).unwrap(), "it is gone");
    assert!(tier.pin(&key(1)).unwrap().is_none());
    // Room and key can be used again.
    store_content(tier, 1, &payload(5, bytes)).unwrap();
    assert_eq!(read(tier, 1, bytes), Some(payload(5, bytes)));
}

pub fn first_commit_stays(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    let mut first = tier.reserve(&key(1), &meta(bytes)).unwrap().unwrap();
    let mut second = tier.reserve(&key(1), &meta(bytes)).unwrap().unwrap();
    second.write(0, &payload(2, bytes)).unwrap();
    first.write(0, &payload(1, bytes)).unwrap();
    tier.commit(second).unwrap();
    tier.commit(first).unwrap();
    store_content(tier, 1, &payload(3, bytes)).unwrap();
    assert_eq!(read(tier, 1, bytes), Some(payload(2, bytes)));
    let usage = tier.usage();
    assert_eq!((usage.num_chunks, usage.reserved_bytes), (1, 0));
}

pub fn usage_is_exact(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    let empty = tier.usage();
    assert_eq!((empty.num_chunks, empty.used_bytes, empty.reserved_bytes), (0, 0, 0));
    store(tier, 1, bytes).unwrap();
    let each = tier.usage().used_bytes;
    assert!(each >= bytes as u64);
    store(tier, 2, bytes).unwrap();
    let open = tier.reserve(&key(3), &meta(bytes)).unwrap().unwrap();
    let usage = tier.usage();
    assert_eq!((usage.num_chunks, usage.used_bytes, usage.reserved_bytes), (2, 3 * each, each));
    drop(open);
    let _ = tier.reserve(&key(3), &meta(bytes + 1)).err().expect("a wrong size");
    store(tier, 1, bytes).unwrap();
    drop(tier.pin(&key(1)).unwrap());
    assert!(!tier.remove(&key(7)).unwrap());
    assert!(tier.remove(&key(2)).unwrap());
    let usage = tier.usage();
    assert_eq!((usage.num_chunks, usage.used_bytes, usage.reserved_bytes), (1, each, 0));
    assert!(usage.used_bytes <= usage.full_at_bytes && usage.full_at_bytes <= usage.capacity_bytes);
    assert!(usage.evict_from_bytes <= usage.full_at_bytes);
}

pub fn full_is_none(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    let most = tier.usage().capacity_bytes / bytes as u64;
    let mut num_stored = 0;
    while store(tier, num_stored, bytes).unwrap() {
        num_stored += 1;
        assert!(num_stored <= most, "more chunks than the capacity holds");
    }
    assert!(num_stored > 0);
    let usage = tier.usage();
    assert!(usage.used_bytes <= usage.capacity_bytes);
    assert!(usage.physical_bytes <= usage.capacity_bytes);
    assert_eq!((usage.num_chunks, usage.reserved_bytes), (num_stored, 0));
    for index in 0..num_stored {
        assert_eq!(read(tier, index, bytes), Some(payload(index, bytes)));
    }
    for index in 0..num_stored {
        assert!(tier.remove(&key(index)).unwrap());
    }
    assert_eq!(tier.usage().used_bytes, 0);
    // Some backends need a moment to give space back.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !store(tier, num_stored, bytes).unwrap() {
        assert!(Instant::now() < deadline, "the room of removed chunks never came back");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn wrong_size_is_refused(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    for wrong in [0, bytes - 1, bytes + 1, usize::MAX >> 1] {
        assert!(tier.reserve(&key(1), &meta(wrong)).is_err(), "{wrong} bytes");
    }
    assert_eq!(tier.usage().used_bytes, 0);
}

pub fn ranges_can_be_read(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    store(tier, 1, bytes).unwrap();
    let pinned = tier.pin(&key(1)).unwrap().unwrap();
    for (offset, len) in [(0, 1), (bytes - 1, 1), (bytes / 3, bytes / 3), (bytes, 0)] {
        let mut out = vec![0; len];
        pinned.read(offset, &mut out).unwrap();
        assert_eq!(out, payload(1, bytes)[offset..offset + len]);
    }
    assert!(pinned.read(bytes, &mut [0]).is_err());
    assert!(pinned.read(usize::MAX, &mut [0]).is_err());
    if tier.capability().host_addressable {
        assert_eq!(pinned.host_slice().expect("promised"), payload(1, bytes));
    } else {
        assert!(pinned.host_slice().is_none());
    }
}

pub fn survives_reopening(new: Constructor) {
    let mut fixture = new();
    let bytes = fixture.chunk_bytes;
    for index in 0..5 {
        store(&fixture.tier, index, bytes).unwrap();
    }
    assert!(fixture.tier.remove(&key(3)).unwrap());
    drop(fixture.tier.reserve(&key(8), &meta(bytes)).unwrap());
    let before = fixture.tier.usage();
    let Some(reopen) = fixture.reopen.take() else {
        assert!(!fixture.tier.capability().durable, "a durable tier must be reopened here");
        assert!(fixture.tier.recover().unwrap().is_empty());
        return;
    };
    assert!(fixture.tier.capability().durable);
    fixture.tier.close(soon()).unwrap();
    drop(fixture.tier);
    let tier = reopen();
    let mut found = tier.recover().unwrap();
    found.sort_by_key(|(key, _)| *key);
    let mut expected: Vec<_> = [0, 1, 2, 4].map(|index| (key(index), meta(bytes))).into();
    expected.sort_by_key(|(key, _)| *key);
    assert_eq!(found, expected);
    let after = tier.usage();
    assert_eq!((after.num_chunks, after.used_bytes), (before.num_chunks, before.used_bytes));
    for index in [0, 1, 2, 4] {
        assert_eq!(read(&tier, index, bytes), Some(payload(index, bytes)));
    }
    assert!(tier.pin(&key(3)).unwrap().is_none());
}

pub fn damage_is_corrupt_then_a_miss(new: Constructor) {
    damage(new, &mut |stored| {
        let last = stored.len() - 1;
        stored[last] ^= 1;
    });
}

pub fn torn_values_are_corrupt_then_a_miss(new: Constructor) {
    damage(new, &mut |stored| stored.truncate(stored.len() / 2));
    damage(new, &mut Vec::clear);
}

fn damage(new: Constructor, change: &mut dyn FnMut(&mut Vec<u8>)) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    for index in 0..3 {
        store(tier, index, bytes).unwrap();
    }
    let before = tier.usage();
    if !tier.tamper(&key(1), change).unwrap() {
        assert!(!tier.capability().durable, "a durable tier must notice damage");
        return;
    }
    let pinned = tier.pin(&key(1)).unwrap().expect("damage shows when it is read");
    let error = pinned.read(0, &mut vec![0; bytes]).expect_err("damaged");
    assert!(matches!(error, TierError::Corrupt { .. }), "{error}");
    assert!(matches!(MoveError::from(error), MoveError::Corrupt(_)));
    drop(pinned);
    assert!(tier.pin(&key(1)).unwrap().is_none(), "one failed load, then a miss");
    let after = tier.usage();
    assert_eq!(after.num_chunks, before.num_chunks - 1);
    assert_eq!(after.used_bytes, before.used_bytes / 3 * 2);
    // Recomputed, written again, and its neighbours were never touched.
    store(tier, 1, bytes).unwrap();
    for index in 0..3 {
        assert_eq!(read(tier, index, bytes), Some(payload(index, bytes)));
    }
}

pub fn concurrent_use(new: Constructor) {
    let fixture = new();
    let bytes = fixture.chunk_bytes;
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let tier = Arc::clone(&fixture.tier);
            std::thread::Builder::new()
                .name(format!("conformance-{worker}"))
                .spawn(move || work(&tier, worker, bytes))
                .expect("a thread starts")
        })
        .collect();
    for worker in workers {
        worker.join().expect("no worker failed");
    }
    let tier = &fixture.tier;
    for index in 0..6 {
        tier.remove(&key(index)).unwrap();
    }
    let usage = tier.usage();
    assert_eq!((usage.num_chunks, usage.used_bytes, usage.reserved_bytes), (0, 0, 0));
}

/// Stores, reads and removes six keys that all workers share; whoever reads a key must find that key's bytes.
fn work(tier: &Arc<dyn Tier>, worker: u64, bytes: usize) {
    let mut state = worker + 1;
    for _ in 0..150 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let index = (state >> 33) % 6;
        match (state >> 40) % 4 {
            0 => drop(tier.remove(&key(index)).unwrap()),
            1 => drop(tier.reserve(&key(index), &meta(bytes)).unwrap()),
            2 => drop(store(tier, index, bytes).unwrap()),
            _ => {
                if let Some(content) = read(tier, index, bytes) {
                    assert_eq!(content, payload(index, bytes));
                }
            }
        }
    }
}

pub fn close_is_idempotent(new: Constructor) {
    let fixture = new();
    let (tier, bytes) = (&fixture.tier, fixture.chunk_bytes);
    store(tier, 1, bytes).unwrap();
    let open = tier.reserve(&key(2), &meta(bytes)).unwrap().unwrap();
    tier.close(soon()).unwrap();
    tier.close(soon()).unwrap();
    assert!(tier.reserve(&key(3), &meta(bytes)).unwrap().is_none());
    assert!(tier.pin(&key(1)).unwrap().is_none());
    drop(open);
    assert_eq!(tier.usage().reserved_bytes, 0);
}

pub fn equals_the_oracle(new: Constructor) {
    for seed in 0..4 {
        let fixture = new();
        against_oracle(&fixture.tier, fixture.chunk_bytes, &random_ops(seed, 400));
    }
}

/// Stores the payload of `index`; `false` when the tier is full.
pub fn store(tier: &Arc<dyn Tier>, index: u64, bytes: usize) -> Result<bool> {
    store_content(tier, index, &payload(index, bytes))
}

/// The payload under `index`; `None` for a miss.
pub fn read(tier: &Arc<dyn Tier>, index: u64, bytes: usize) -> Option<Vec<u8>> {
    let pinned = tier.pin(&key(index)).expect("no fault is armed")?;
    let mut out = vec![0; bytes];
    pinned.read(0, &mut out).expect("no fault is armed");
    Some(out)
}

fn store_content(tier: &Arc<dyn Tier>, index: u64, content: &[u8]) -> Result<bool> {
    let key: ChunkKey = key(index);
    let Some(mut place) = tier.reserve(&key, &meta(content.len()))? else {
        return Ok(false);
    };
    place.write(0, content)?;
    tier.commit(place)?;
    Ok(true)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}
