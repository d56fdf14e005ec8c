//! The tier trait, and the two guards through which all bytes pass.

use std::sync::Arc;
use std::time::Instant;

use crate::{Capability, ChunkKey, ChunkMeta, Health, Result, TierError, Usage};

/// Keeps places for chunks. Implementations are cheap to share (`Arc<dyn Tier>`) and block where they block.
pub trait Tier: Send + Sync + 'static {
    /// The name in configuration, metrics and logs; unique among a server's tiers.
    fn name(&self) -> &str;

    fn capability(&self) -> Capability;

    fn usage(&self) -> Usage;

    /// Takes room for a chunk. `None`: full, or not writable at the moment. A key that is there already may be reserved
    /// again; the first commit wins. The place gives its room back when it is dropped without a commit.
    fn reserve(&self, key: &ChunkKey, meta: &ChunkMeta) -> Result<Option<Place>>;

    /// Makes a place's chunk visible, whole or not at all. Committing a key that is there already is `Ok`: the first
    /// stays, the new copy's room comes back. On an error nothing is visible and the room comes back too.
    fn commit(&self, place: Place) -> Result<()> {
        if place.tier() != self.name() {
            let reason = format!("a place of tier {} cannot be committed here", place.tier());
            return Err(TierError::invalid(&Arc::from(self.name()), reason));
        }
        place.commit()
    }

    /// Holds a chunk for reading. `None`: a miss. The chunk stays, unchanged, until the last pin is dropped.
    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>>;

    /// Gives a chunk up. `false`: nothing was removed, because the key is unknown or pinned.
    fn remove(&self, key: &ChunkKey) -> Result<bool>;

    /// The chunks that are there after a restart, in no particular order. Empty for tiers that are not durable.
    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>>;

    fn health(&self) -> Health;

    /// Makes what was committed durable (where the tier is), and ends background work. Calling it again is `Ok`.
    /// Afterwards `reserve` and `pin` answer `None`.
    fn close(&self, deadline: Instant) -> Result<()>;

    /// Makes every commit and removal so far survive a kill of the process. Nothing to do where nothing survives.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// For fault injection: lets `change` edit the stored form of a chunk, beneath the tier's own checks. `false`: the key
    /// is unknown, or this tier stores nothing that it could check.
    fn tamper(&self, _key: &ChunkKey, _change: &mut dyn FnMut(&mut Vec<u8>)) -> Result<bool> {
        Ok(false)
    }
}

/// A backend's half of a [`Place`]. Dropping it without `commit` aborts.
pub trait PlaceWriter: Send {
    /// Copies `bytes` to `offset` of the chunk. Device tiers are quick where a write covers whole layers.
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()>;

    /// The chunk's own memory, where the tier is host-addressable.
    fn host_slice(&mut self) -> Option<&mut [u8]> {
        None
    }

    fn commit(self: Box<Self>) -> Result<()>;
}

/// A backend's half of a [`Pinned`]. Dropping it unpins.
pub trait PinReader: Send {
    /// Fills `out` from `offset` of the chunk. Durable tiers fetch and check the whole value on every call, so read it whole.
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()>;

    /// The chunk's own memory, where the tier is host-addressable.
    fn host_slice(&self) -> Option<&[u8]> {
        None
    }
}

/// Room for one chunk, to be filled and committed. Aborts on drop.
pub struct Place {
    key: ChunkKey,
    meta: ChunkMeta,
    tier: Arc<str>,
    capability: Capability,
    written_bytes: u64,
    writer: Box<dyn PlaceWriter>,
}

impl Place {
    /// For backends: wraps the backend's half.
    pub fn new(
        tier: Arc<str>,
        capability: Capability,
        key: ChunkKey,
        meta: ChunkMeta,
        writer: Box<dyn PlaceWriter>,
    ) -> Self {
        Self { key, meta, tier, capability, written_bytes: 0, writer }
    }

    pub fn key(&self) -> &ChunkKey {
        &self.key
    }

    pub fn meta(&self) -> &ChunkMeta {
        &self.meta
    }

    pub fn tier(&self) -> &str {
        &self.tier
    }

    pub fn tier_name(&self) -> Arc<str> {
        Arc::clone(&self.tier)
    }

    pub fn capability(&self) -> Capability {
        self.capability
    }

    pub fn num_bytes(&self) -> usize {
        self.meta.bytes as usize
    }

    /// Copies `bytes` to `offset` of the chunk.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        check_range(&self.tier, offset, bytes.len(), self.num_bytes())?;
        self.writer.write(offset, bytes)?;
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    /// The chunk's own memory, where the tier is host-addressable. Asking for it counts as filling it.
    pub fn host_slice(&mut self) -> Option<&mut [u8]> {
        let slice = self.writer.host_slice()?;
        self.written_bytes = self.meta.bytes;
        Some(slice)
    }

    /// See [`Tier::commit`]. A place that was not filled is refused and comes back.
    pub fn commit(self) -> Result<()> {
        if self.written_bytes < self.meta.bytes {
            let reason =
                format!("chunk {} has {} of {} bytes at its commit", self.key, self.written_bytes, self.meta.bytes);
            return Err(TierError::invalid(&self.tier, reason));
        }
        self.writer.commit()
    }

    /// For decorators: takes the place apart and puts it together again around another writer.
    pub fn wrap(
        self,
        capability: Capability,
        wrap: impl FnOnce(Box<dyn PlaceWriter>) -> Box<dyn PlaceWriter>,
    ) -> Place {
        Place { capability, writer: wrap(self.writer), ..self }
    }
}

/// A chunk held for reading. Unpins on drop.
pub struct Pinned {
    key: ChunkKey,
    meta: ChunkMeta,
    tier: Arc<str>,
    capability: Capability,
    reader: Box<dyn PinReader>,
}

impl Pinned {
    /// For backends: wraps the backend's half.
    pub fn new(
        tier: Arc<str>,
        capability: Capability,
        key: ChunkKey,
        meta: ChunkMeta,
        reader: Box<dyn PinReader>,
    ) -> Self {
        Self { key, meta, tier, capability, reader }
    }

    pub fn key(&self) -> &ChunkKey {
        &self.key
    }

    pub fn meta(&self) -> &ChunkMeta {
        &self.meta
    }

    pub fn tier(&self) -> &str {
        &self.tier
    }

    pub fn tier_name(&self) -> Arc<str> {
        Arc::clone(&self.tier)
    }

    pub fn capability(&self) -> Capability {
        self.capability
    }

    pub fn num_bytes(&self) -> usize {
        self.meta.bytes as usize
    }

    /// Fills `out` from `offset` of the chunk.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        check_range(&self.tier, offset, out.len(), self.num_bytes())?;
        self.reader.read(offset, out)
    }

    /// The chunk's own memory, where the tier is host-addressable.
    pub fn host_slice(&self) -> Option<&[u8]> {
        self.reader.host_slice()
    }

    /// For decorators: takes the pin apart and puts it together again around another reader.
    pub fn wrap(self, capability: Capability, wrap: impl FnOnce(Box<dyn PinReader>) -> Box<dyn PinReader>) -> Pinned {
        Pinned { capability, reader: wrap(self.reader), ..self }
    }
}

fn check_range(tier: &Arc<str>, offset: usize, len: usize, num_bytes: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= num_bytes => Ok(()),
        _ => Err(TierError::invalid(tier, format!("{len} bytes at offset {offset} of a chunk of {num_bytes}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryTier;

    #[test]
    fn ranges_outside_the_chunk_are_refused() {
        let tier = MemoryTier::new("memory", 1 << 10, 16);
        let meta = crate::conformance::meta(16);
        let key = crate::conformance::key(1);
        let mut place = tier.reserve(&key, &meta).unwrap().unwrap();
        assert!(place.write(0, &[0; 17]).is_err());
        assert!(place.write(usize::MAX, &[0; 2]).is_err());
        assert!(place.write(15, &[0; 2]).is_err());
        place.write(0, &[7; 16]).unwrap();
        place.commit().unwrap();
        let pinned = tier.pin(&key).unwrap().unwrap();
        assert!(pinned.read(16, &mut [0]).is_err());
        let mut out = [0; 16];
        pinned.read(0, &mut out).unwrap();
        assert_eq!(out, [7; 16]);
    }

    #[test]
    fn an_unfilled_place_is_not_committed() {
        let tier = MemoryTier::new("memory", 1 << 10, 16);
        let key = crate::conformance::key(1);
        let mut place = tier.reserve(&key, &crate::conformance::meta(16)).unwrap().unwrap();
        place.write(0, &[7; 15]).unwrap();
        assert!(matches!(place.commit(), Err(TierError::Invalid { .. })));
        assert!(tier.pin(&key).unwrap().is_none());
        assert_eq!(tier.usage().used_bytes, 0);
    }

    #[test]
    fn a_place_belongs_to_its_tier() {
        let one = MemoryTier::new("one", 1 << 10, 16);
        let two = MemoryTier::new("two", 1 << 10, 16);
        let mut place = one.reserve(&crate::conformance::key(1), &crate::conformance::meta(16)).unwrap().unwrap();
        place.write(0, &[1; 16]).unwrap();
        assert!(two.commit(place).is_err());
        assert_eq!(one.usage().used_bytes, 0);
    }
}
