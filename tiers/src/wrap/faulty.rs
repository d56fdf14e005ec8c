//! Faults on demand: errors, delays, torn and flipped bytes.
//!
//! [`Effect::FlipStored`] and [`Effect::TearStored`] damage a chunk after its commit, beneath the inner tier's own checks,
//! as a bad disk would. [`Effect::Flip`] damages bytes on the way between tier and mover, where nothing checks: it shows
//! that a test would notice wrong bytes.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::seen_from_outside;
use crate::{
    Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, TierError, Usage,
};

/// Where a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Reserve,
    Write,
    Commit,
    Pin,
    Read,
    Remove,
    Recover,
}

/// What a fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The operation fails and does nothing else.
    Error(io::ErrorKind),
    /// The operation happens later.
    Delay(Duration),
    /// One bit of the bytes that are read or written is flipped on the way. For `Read` and `Write`.
    Flip,
    /// The stored form loses its second half after a commit. For `Commit`.
    TearStored,
    /// One bit of the stored form is flipped after a commit. For `Commit`.
    FlipStored,
}

/// A fault: strikes `times` operations after sparing `skip` of them.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub op: Op,
    pub effect: Effect,
    pub skip: u64,
    pub times: u64,
}

impl Fault {
    /// Every operation from now on.
    pub fn always(op: Op, effect: Effect) -> Self {
        Self { op, effect, skip: 0, times: u64::MAX }
    }

    /// The next operation only.
    pub fn once(op: Op, effect: Effect) -> Self {
        Self { times: 1, ..Self::always(op, effect) }
    }

    /// Lets the first `skip` operations pass.
    pub fn after(self, skip: u64) -> Self {
        Self { skip, ..self }
    }
}

/// The armed faults of a tier; cloned freely.
#[derive(Clone, Default)]
pub struct Faults(Arc<Mutex<Armed>>);

#[derive(Default)]
struct Armed {
    faults: Vec<Fault>,
    num_struck: u64,
}

impl Faults {
    pub fn arm(&self, fault: Fault) {
        self.0.lock().faults.push(fault);
    }

    pub fn disarm_all(&self) {
        self.0.lock().faults.clear();
    }

    /// How often any fault has struck.
    pub fn num_struck(&self) -> u64 {
        self.0.lock().num_struck
    }

    /// The effects that strike this operation; errors end it, delays have passed when this returns.
    fn strike(&self, op: Op, tier: &Arc<str>) -> Result<Vec<Effect>> {
        let mut armed = self.0.lock();
        let mut effects = Vec::new();
        for fault in armed.faults.iter_mut().filter(|fault| fault.op == op) {
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if fault.times > 0 {
                fault.times -= 1;
                effects.push(fault.effect);
            }
        }
        armed.faults.retain(|fault| fault.times > 0);
        armed.num_struck += effects.len() as u64;
        drop(armed);
        for effect in &effects {
            match effect {
                Effect::Delay(delay) => std::thread::sleep(*delay),
                Effect::Error(kind) => {
                    let source = io::Error::new(*kind, "injected fault");
                    return Err(TierError::io(tier, "go on", source));
                }
                _ => {}
            }
        }
        Ok(effects)
    }
}

/// A tier that fails when told to.
pub struct Faulty {
    inner: Arc<dyn Tier>,
    name: Arc<str>,
    faults: Faults,
}

impl Faulty {
    pub fn new(inner: Arc<dyn Tier>) -> Self {
        Self { name: Arc::from(inner.name()), inner, faults: Faults::default() }
    }

    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    fn strike(&self, op: Op) -> Result<Vec<Effect>> {
        self.faults.strike(op, &self.name)
    }
}

impl Tier for Faulty {
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
        self.strike(Op::Reserve)?;
        let place = self.inner.reserve(key, meta)?;
        let wrap = |inner| {
            let writer = FaultyWriter {
                inner,
                tier: Arc::clone(&self.inner),
                name: Arc::clone(&self.name),
                faults: self.faults.clone(),
                key: *key,
            };
            Box::new(writer) as Box<dyn PlaceWriter>
        };
        Ok(place.map(|place| place.wrap(self.capability(), wrap)))
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        self.strike(Op::Pin)?;
        let pinned = self.inner.pin(key)?;
        let wrap = |inner| {
            let reader = FaultyReader { inner, name: Arc::clone(&self.name), faults: self.faults.clone() };
            Box::new(reader) as Box<dyn PinReader>
        };
        Ok(pinned.map(|pinned| pinned.wrap(self.capability(), wrap)))
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.strike(Op::Remove)?;
        self.inner.remove(key)
    }

    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        self.strike(Op::Recover)?;
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

struct FaultyWriter {
    inner: Box<dyn PlaceWriter>,
    tier: Arc<dyn Tier>,
    name: Arc<str>,
    faults: Faults,
    key: ChunkKey,
}

impl PlaceWriter for FaultyWriter {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let effects = self.faults.strike(Op::Write, &self.name)?;
        if !effects.contains(&Effect::Flip) {
            return self.inner.write(offset, bytes);
        }
        let mut flipped = bytes.to_vec();
        flip_a_bit(&mut flipped);
        self.inner.write(offset, &flipped)
    }

    fn commit(self: Box<Self>) -> Result<()> {
        let effects = self.faults.strike(Op::Commit, &self.name)?;
        self.inner.commit()?;
        for effect in effects {
            let mut change = |stored: &mut Vec<u8>| match effect {
                Effect::TearStored => stored.truncate(stored.len() / 2),
                Effect::FlipStored => flip_a_bit(stored),
                _ => {}
            };
            self.tier.tamper(&self.key, &mut change)?;
        }
        Ok(())
    }
}

struct FaultyReader {
    inner: Box<dyn PinReader>,
    name: Arc<str>,
    faults: Faults,
}

impl PinReader for FaultyReader {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let effects = self.faults.strike(Op::Read, &self.name)?;
        self.inner.read(offset, out)?;
        if effects.contains(&Effect::Flip) {
            flip_a_bit(out);
        }
        Ok(())
    }
}

fn flip_a_bit(bytes: &mut [u8]) {
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 0x10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{key, meta, payload};
    use crate::MemoryTier;

    fn tier() -> (Faulty, Faults) {
        let tier = Faulty::new(Arc::new(MemoryTier::new("memory", 1 << 10, 16)));
        let faults = tier.faults();
        (tier, faults)
    }

    fn store(tier: &Faulty, index: u64) -> Result<()> {
        let mut place = tier.reserve(&key(index), &meta(16))?.expect("there is room");
        place.write(0, &payload(index, 16))?;
        tier.commit(place)
    }

    #[test]
    fn an_error_strikes_where_and_as_often_as_armed() {
        let (tier, faults) = tier();
        let error = Effect::Error(io::ErrorKind::StorageFull);
        faults.arm(Fault::once(Op::Commit, error).after(1));
        store(&tier, 1).unwrap();
        assert!(store(&tier, 2).is_err());
        store(&tier, 3).unwrap();
        assert!(tier.pin(&key(2)).unwrap().is_none());
        assert_eq!(tier.usage().used_bytes, 32);
        assert_eq!(faults.num_struck(), 1);
    }

    #[test]
    fn flips_change_the_bytes_that_travel() {
        let (tier, faults) = tier();
        store(&tier, 1).unwrap();
        let pinned = tier.pin(&key(1)).unwrap().unwrap();
        let mut out = [0; 16];
        faults.arm(Fault::once(Op::Read, Effect::Flip));
        pinned.read(0, &mut out).unwrap();
        assert_ne!(out[..], payload(1, 16));
        pinned.read(0, &mut out).unwrap();
        assert_eq!(out[..], payload(1, 16));
    }

    #[test]
    fn delays_delay() {
        let (tier, faults) = tier();
        faults.arm(Fault::once(Op::Write, Effect::Delay(Duration::from_millis(30))));
        let started = Instant::now();
        store(&tier, 1).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(30));
    }
}
