//! Counts what is asked of a tier, and which places and pins are out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

use super::seen_from_outside;
use crate::{Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, Usage};

/// A tier that counts.
pub struct Counting {
    inner: Arc<dyn Tier>,
    counters: Arc<Counters>,
}

#[derive(Default)]
struct Counters {
    reserved: AtomicU64,
    refused: AtomicU64,
    committed: AtomicU64,
    aborted: AtomicU64,
    pinned: AtomicU64,
    missed: AtomicU64,
    unpinned: AtomicU64,
    removed: AtomicU64,
    failed: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// What happened since the tier was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub num_reserved: u64,
    /// Reservations that found no room.
    pub num_refused: u64,
    pub num_committed: u64,
    /// Places that came back without a successful commit.
    pub num_aborted: u64,
    pub num_pinned: u64,
    pub num_missed: u64,
    pub num_unpinned: u64,
    pub num_removed: u64,
    /// Calls that ended in an error.
    pub num_failed: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

impl Counts {
    /// Places that have not come back yet.
    pub fn num_places_out(&self) -> u64 {
        self.num_reserved - self.num_committed - self.num_aborted
    }

    /// Pins that have not come back yet.
    pub fn num_pins_out(&self) -> u64 {
        self.num_pinned - self.num_unpinned
    }
}

impl Counting {
    pub fn new(inner: Arc<dyn Tier>) -> Self {
        Self { inner, counters: Arc::default() }
    }

    pub fn counts(&self) -> Counts {
        let counters = &self.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        Counts {
            num_reserved: get(&counters.reserved),
            num_refused: get(&counters.refused),
            num_committed: get(&counters.committed),
            num_aborted: get(&counters.aborted),
            num_pinned: get(&counters.pinned),
            num_missed: get(&counters.missed),
            num_unpinned: get(&counters.unpinned),
            num_removed: get(&counters.removed),
            num_failed: get(&counters.failed),
            read_bytes: get(&counters.read_bytes),
            written_bytes: get(&counters.written_bytes),
        }
    }
}

impl Counters {
    fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::AcqRel);
    }

    fn check<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            Self::add(&self.failed, 1);
        }
        result
    }
}

impl Tier for Counting {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capability(&self) -> Capability {
        seen_from_outside(self.inner.capability())
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    fn reserve(&self, key: &ChunkKey, meta: &ChunkMeta) -> Result<Option<Place>> {
        let counters = &self.counters;
        let Some(place) = counters.check(self.inner.reserve(key, meta))? else {
            Counters::add(&counters.refused, 1);
            return Ok(None);
        };
        Counters::add(&counters.reserved, 1);
        Ok(Some(place.wrap(self.capability(), |inner| {
            Box::new(CountingWriter { inner: Some(inner), counters: Arc::clone(counters) })
        })))
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        let counters = &self.counters;
        let Some(pinned) = counters.check(self.inner.pin(key))? else {
            Counters::add(&counters.missed, 1);
            return Ok(None);
        };
        Counters::add(&counters.pinned, 1);
        Ok(Some(pinned.wrap(self.capability(), |inner| {
            Box::new(CountingReader { inner: Some(inner), counters: Arc::clone(counters) })
        })))
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
        let removed = self.counters.check(self.inner.remove(key))?;
        Counters::add(&self.counters.removed, u64::from(removed));
        Ok(removed)
    }

    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        self.counters.check(self.inner.recover())
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        self.counters.check(self.inner.close(deadline))
    }

    fn flush(&self) -> Result<()> {
        self.counters.check(self.inner.flush())
    }

    fn tamper(&self, key: &ChunkKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> Result<bool> {
        self.inner.tamper(key, change)
    }
}

struct CountingWriter {
    /// `None` once it was committed.
    inner: Option<Box<dyn PlaceWriter>>,
    counters: Arc<Counters>,
}

impl PlaceWriter for CountingWriter {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let inner = self.inner.as_mut().expect("only commit takes it, and commit consumes");
        Counters::add(&self.counters.written_bytes, bytes.len() as u64);
        self.counters.check(inner.write(offset, bytes))
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        let inner = self.inner.take().expect("a writer commits once");
        let committed = self.counters.check(inner.commit());
        let counter = match committed {
            Ok(()) => &self.counters.committed,
            Err(_) => &self.counters.aborted,
        };
        Counters::add(counter, 1);
        committed
    }
}

impl Drop for CountingWriter {
    fn drop(&mut self) {
        // Inner first: who sees the count must find the room free.
        if self.inner.take().is_some() {
            Counters::add(&self.counters.aborted, 1);
        }
    }
}

struct CountingReader {
    /// `None` only while it is dropped.
    inner: Option<Box<dyn PinReader>>,
    counters: Arc<Counters>,
}

impl PinReader for CountingReader {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let inner = self.inner.as_ref().expect("present until it is dropped");
        Counters::add(&self.counters.read_bytes, out.len() as u64);
        self.counters.check(inner.read(offset, out))
    }
}

impl Drop for CountingReader {
    fn drop(&mut self) {
        drop(self.inner.take());
        Counters::add(&self.counters.unpinned, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{key, meta, payload};
    use crate::MemoryTier;

    #[test]
    fn counts_what_happened() {
        let tier = Counting::new(Arc::new(MemoryTier::new("memory", 32, 16)));
        let mut place = tier.reserve(&key(1), &meta(16)).unwrap().unwrap();
        assert_eq!(tier.counts().num_places_out(), 1);
        place.write(0, &payload(1, 16)).unwrap();
        tier.commit(place).unwrap();
        drop(tier.reserve(&key(2), &meta(16)).unwrap());
        let pinned = tier.pin(&key(1)).unwrap().unwrap();
        pinned.read(4, &mut [0; 8]).unwrap();
        assert_eq!(tier.counts().num_pins_out(), 1);
        drop(pinned);
        assert!(tier.pin(&key(2)).unwrap().is_none());
        assert!(tier.remove(&key(1)).unwrap());
        assert!(tier.reserve(&key(1), &meta(17)).is_err());
        let expected = Counts {
            num_reserved: 2,
            num_refused: 0,
            num_committed: 1,
            num_aborted: 1,
            num_pinned: 1,
            num_missed: 1,
            num_unpinned: 1,
            num_removed: 1,
            num_failed: 1,
            read_bytes: 8,
            written_bytes: 16,
        };
        assert_eq!(tier.counts(), expected);
    }
}
