//! How full a tier is and whether it works.

/// How full a tier is. Exact at every moment, also after errors and after a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The configured size.
    pub capacity_bytes: u64,
    /// What committed chunks and open places take of it, with the tier's own overhead a chunk. Falls at once when a
    /// chunk is removed.
    pub used_bytes: u64,
    /// The part of `used_bytes` that belongs to open places.
    pub reserved_bytes: u64,
    /// What really lies in memory or on disk. Above `used_bytes` where a backend gives space back later (RocksDB).
    pub physical_bytes: u64,
    /// Committed chunks.
    pub num_chunks: u64,
    /// From here on chunks should be evicted ahead of need (80% on disk, the capacity elsewhere).
    pub evict_from_bytes: u64,
    /// From here on `reserve` answers `None` (95% on disk, the capacity elsewhere).
    pub full_at_bytes: u64,
}

impl Usage {
    /// Whether chunks should be given up ahead of need.
    pub fn wants_eviction(&self) -> bool {
        self.used_bytes >= self.evict_from_bytes
    }
}

/// Whether a tier works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Ok,
    /// What is stored can be read; `reserve` answers `None` until the tier has recovered by itself.
    ReadOnly(String),
    /// Nothing works; `pin` misses.
    Down(String),
}

impl Health {
    pub fn is_ok(&self) -> bool {
        matches!(self, Health::Ok)
    }
}
