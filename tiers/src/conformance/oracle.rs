//! Drives a tier and the oracle with the same operations and compares everything that can be seen.

use std::sync::Arc;

use super::{key, meta, payload};
use crate::{MemoryTier, Pinned, Place, Tier};

/// An operation on a few shared keys; `content` tells apart who wrote.
#[derive(Clone, Copy, Debug)]
pub enum TierOp {
    Reserve { index: u64, content: u64 },
    CommitOldest,
    AbortOldest,
    Store { index: u64, content: u64 },
    Pin { index: u64 },
    UnpinOldest,
    Read { index: u64 },
    Remove { index: u64 },
}

/// A reproducible series.
pub fn random_ops(seed: u64, len: usize) -> Vec<TierOp> {
    let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut next = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) % below
    };
    let op = |_| {
        let (index, content) = (next(12), next(1 << 20));
        match next(10) {
            0 => TierOp::Reserve { index, content },
            1 => TierOp::CommitOldest,
            2 => TierOp::AbortOldest,
            3..=5 => TierOp::Store { index, content },
            6 => TierOp::Pin { index },
            7 => TierOp::UnpinOldest,
            8 => TierOp::Read { index },
            _ => TierOp::Remove { index },
        }
    };
    (0..len).map(op).collect()
}

struct Pair<'a> {
    tier: &'a Arc<dyn Tier>,
    oracle: MemoryTier,
    places: Vec<(Place, Place)>,
    pins: Vec<(Pinned, Pinned)>,
    chunk_bytes: usize,
}

/// Runs `ops` on both and compares results, contents and usage after each.
///
/// # Panics
/// When they differ.
pub fn against_oracle(tier: &Arc<dyn Tier>, chunk_bytes: usize, ops: &[TierOp]) {
    // A first chunk shows what one costs here.
    assert!(super::store(tier, 1_000, chunk_bytes).expect("no fault is armed"));
    let each = tier.usage().used_bytes;
    assert!(tier.remove(&key(1_000)).expect("no fault is armed"));
    let mut pair = Pair {
        tier,
        oracle: MemoryTier::new("oracle", u64::MAX, chunk_bytes),
        places: Vec::new(),
        pins: Vec::new(),
        chunk_bytes,
    };
    for op in ops {
        pair.apply(*op);
        let (usage, expected) = (tier.usage(), pair.oracle.usage());
        let num_open = pair.places.len() as u64;
        assert_eq!(usage.num_chunks, expected.num_chunks, "after {op:?}");
        assert_eq!(usage.reserved_bytes, num_open * each, "after {op:?}");
        assert_eq!(usage.used_bytes, (usage.num_chunks + num_open) * each, "after {op:?}");
    }
    pair.places.clear();
    pair.pins.clear();
    for index in 0..12 {
        assert_eq!(tier.remove(&key(index)).unwrap(), pair.oracle.remove(&key(index)).unwrap());
    }
    let usage = tier.usage();
    assert_eq!((usage.num_chunks, usage.used_bytes, usage.reserved_bytes), (0, 0, 0));
}

impl Pair<'_> {
    fn apply(&mut self, op: TierOp) {
        match op {
            TierOp::Reserve { index, content } => self.reserve(index, content),
            TierOp::CommitOldest => self.commit_oldest(),
            TierOp::AbortOldest => {
                if !self.places.is_empty() {
                    self.places.remove(0);
                }
            }
            TierOp::Store { index, content } => {
                let num_open = self.places.len();
                self.reserve(index, content);
                if self.places.len() > num_open {
                    let newest = self.places.pop().expect("just pushed");
                    self.commit(newest);
                }
            }
            TierOp::Pin { index } => self.pin(index),
            TierOp::UnpinOldest => {
                if !self.pins.is_empty() {
                    let (pin, expected) = self.pins.remove(0);
                    self.compare(&pin, &expected);
                }
            }
            TierOp::Read { index } => {
                self.pin(index);
                if self.pins.last().is_some_and(|(pin, _)| *pin.key() == key(index)) {
                    let (pin, expected) = self.pins.pop().expect("just seen");
                    self.compare(&pin, &expected);
                }
            }
            TierOp::Remove { index } => {
                let removed = self.tier.remove(&key(index)).expect("no fault is armed");
                let expected = self.oracle.remove(&key(index)).expect("no fault is armed");
                assert_eq!(removed, expected, "{op:?}");
            }
        }
    }

    fn reserve(&mut self, index: u64, content: u64) {
        let meta = meta(self.chunk_bytes);
        let Some(mut place) = self.tier.reserve(&key(index), &meta).expect("no fault is armed") else {
            let usage = self.tier.usage();
            let wanted = usage.used_bytes.max(usage.physical_bytes) + self.chunk_bytes as u64;
            assert!(wanted > usage.full_at_bytes / 2, "refused while it is more than half empty");
            return;
        };
        let expected = self.oracle.reserve(&key(index), &meta).expect("no fault is armed");
        let mut expected = expected.expect("the oracle never fills up");
        let content = payload(content, self.chunk_bytes);
        place.write(0, &content).expect("no fault is armed");
        expected.write(0, &content).expect("no fault is armed");
        self.places.push((place, expected));
    }

    fn commit_oldest(&mut self) {
        if !self.places.is_empty() {
            let oldest = self.places.remove(0);
            self.commit(oldest);
        }
    }

    fn commit(&self, (place, expected): (Place, Place)) {
        self.tier.commit(place).expect("no fault is armed");
        self.oracle.commit(expected).expect("no fault is armed");
    }

    fn pin(&mut self, index: u64) {
        let pinned = self.tier.pin(&key(index)).expect("no fault is armed");
        let expected = self.oracle.pin(&key(index)).expect("no fault is armed");
        assert_eq!(pinned.is_some(), expected.is_some(), "pin of {index}");
        if let (Some(pinned), Some(expected)) = (pinned, expected) {
            self.pins.push((pinned, expected));
        }
    }

    fn compare(&self, pin: &Pinned, expected: &Pinned) {
        let (mut found, mut wanted) = (vec![0; self.chunk_bytes], vec![0; self.chunk_bytes]);
        pin.read(0, &mut found).expect("no fault is armed");
        expected.read(0, &mut wanted).expect("no fault is armed");
        assert_eq!(found, wanted, "contents of {}", pin.key());
    }
}
