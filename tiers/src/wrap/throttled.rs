//! A tier with a slow bus.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::seen_from_outside;
use crate::{Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, Usage};

/// Reads and writes take at least as long as a bus of that speed would; each on its own, without sharing it.
pub struct Throttled {
    inner: Arc<dyn Tier>,
    speed: Speed,
}

#[derive(Clone, Copy)]
struct Speed {
    latency: Duration,
    bytes_per_second: u64,
}

impl Throttled {
    pub fn new(inner: Arc<dyn Tier>, latency: Duration, bytes_per_second: u64) -> Self {
        let speed = Speed { latency, bytes_per_second: bytes_per_second.max(1) };
        Self { inner, speed }
    }
}

impl Speed {
    fn pass<T>(&self, num_bytes: usize, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        let transfer = Duration::from_secs_f64(num_bytes as f64 / self.bytes_per_second as f64);
        let due = self.latency + transfer;
        std::thread::sleep(due.saturating_sub(started.elapsed()));
        result
    }
}

impl Tier for Throttled {
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
        let speed = self.speed;
        let place = self.inner.reserve(key, meta)?;
        let wrap = |inner| Box::new(ThrottledWriter { inner, speed }) as Box<dyn PlaceWriter>;
        Ok(place.map(|place| place.wrap(self.capability(), wrap)))
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        let speed = self.speed;
        let pinned = self.inner.pin(key)?;
        let wrap = |inner| Box::new(ThrottledReader { inner, speed }) as Box<dyn PinReader>;
        Ok(pinned.map(|pinned| pinned.wrap(self.capability(), wrap)))
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.inner.remove(key)
    }

    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        self.inner.recover()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        self.inner.close(deadline)
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }

    fn tamper(&self, key: &ChunkKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> Result<bool> {
        self.inner.tamper(key, change)
    }
}

struct ThrottledWriter {
    inner: Box<dyn PlaceWriter>,
    speed: Speed,
}

impl PlaceWriter for ThrottledWriter {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let inner = &mut self.inner;
        self.speed.pass(bytes.len(), || inner.write(offset, bytes))
    }

    fn commit(self: Box<Self>) -> Result<()> {
        self.inner.commit()
    }
}

struct ThrottledReader {
    inner: Box<dyn PinReader>,
    speed: Speed,
}

impl PinReader for ThrottledReader {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.speed.pass(out.len(), || self.inner.read(offset, out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{key, meta, payload};
    use crate::MemoryTier;

    #[test]
    fn bytes_take_their_time() {
        let inner = Arc::new(MemoryTier::new("memory", 1 << 20, 1 << 10));
        let tier = Throttled::new(inner, Duration::from_millis(5), 100 << 10);
        let started = Instant::now();
        let mut place = tier.reserve(&key(1), &meta(1 << 10)).unwrap().unwrap();
        place.write(0, &payload(1, 1 << 10)).unwrap();
        tier.commit(place).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(15));
    }
}
