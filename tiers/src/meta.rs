//! What is known about a chunk without its bytes.

/// Describes one chunk. Durable tiers keep it beside the bytes, and [`crate::Tier::recover`] gives it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkMeta {
    /// Index of the chunk in its sequence; its first token's position is `position * chunk_tokens`.
    pub position: u32,
    /// Tokens in the chunk (only full chunks leave the device).
    pub num_tokens: u32,
    /// Digest of layout and fingerprint, [`crate::KeyScope::layout_id`]: chunks of another model or layout are foreign.
    pub layout_id: [u8; 16],
    /// Payload size; equals `KvLayout::chunk_bytes()`.
    pub bytes: u64,
    /// Seconds since the Unix epoch when a conversation that holds the chunk was last active.
    pub last_activity_unix: u64,
}
