//! The crate's error: variants by what the caller does next.

use std::sync::Arc;

use keepsake_config::ConfigError;

use crate::ChunkKey;

pub type Result<T, E = TierError> = std::result::Result<T, E>;

/// A fault. Full tiers and misses are values (`Ok(None)`), not errors.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// Stored bytes are foreign or damaged. The tier has let go of the chunk: recompute it.
    #[error("{tier}: chunk {key} is damaged: {reason}")]
    Corrupt { tier: Arc<str>, key: ChunkKey, reason: String },
    /// A pinned chunk's bytes are gone (its index entry outlived them). Recompute it.
    #[error("{tier}: chunk {key} is gone")]
    Gone { tier: Arc<str>, key: ChunkKey },
    /// Writing does not work at the moment; the tier retries by itself.
    #[error("{tier}: read-only: {reason}")]
    ReadOnly { tier: Arc<str>, reason: String },
    /// The store's own cap is reached: refuse the request that wanted to write (503).
    #[error("{tier}: full: {used_bytes} of {capacity_bytes} bytes used")]
    Full { tier: Arc<str>, used_bytes: u64, capacity_bytes: u64 },
    /// Too many requests are waiting already: try again later.
    #[error("{tier}: too many requests are waiting")]
    Busy { tier: Arc<str> },
    /// The tier was closed.
    #[error("{tier}: closed")]
    Closed { tier: Arc<str> },
    /// The caller broke the contract (wrong size, incomplete place, foreign place, unknown parent).
    #[error("{tier}: {reason}")]
    Invalid { tier: Arc<str>, reason: String },
    /// The operating system failed.
    #[error("{tier}: cannot {action}: {source}")]
    Io { tier: Arc<str>, action: &'static str, source: std::io::Error },
    /// The backend's storage engine failed.
    #[error("{tier}: cannot {action}: {source}")]
    Storage { tier: Arc<str>, action: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
    /// A tier's configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl TierError {
    pub fn io(tier: &Arc<str>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { tier: Arc::clone(tier), action, source }
    }

    pub fn invalid(tier: &Arc<str>, reason: impl Into<String>) -> Self {
        Self::Invalid { tier: Arc::clone(tier), reason: reason.into() }
    }
}
