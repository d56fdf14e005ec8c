//! Tokens by position, made up when asked for.

use std::sync::Arc;

/// Tokens of one hash id in the Mooncake format.
pub(super) const BLOCK_TOKENS: usize = 512;

/// A token log without its tokens. Prompt and reply alike are functions of the position, so the log of the next turn begins with
/// the reply that the turn before really got.
#[derive(Clone, Debug)]
pub(super) enum Log {
    /// Shared with nobody.
    Own { seed: u64 },
    /// Equal ids give equal tokens up to `end`; what follows is the request's own.
    Blocks { ids: Arc<[u32]>, end: usize, own: u64 },
}

/// Whose future decides when a chunk is used next: a conversation, or one block that requests share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Line {
    Own(u64),
    Block(u32),
}

impl Log {
    pub(super) fn token(&self, position: usize) -> u32 {
        match self {
            Log::Blocks { ids, end, .. } if position < *end => {
                let id = ids[position / BLOCK_TOKENS];
                // Apart from the seeds of conversations, which count from zero.
                mix(u64::from(id) | 1 << 40, position % BLOCK_TOKENS)
            }
            Log::Own { seed: own } | Log::Blocks { own, .. } => mix(*own, position),
        }
    }

    pub(super) fn tokens(&self, range: std::ops::Range<usize>) -> Vec<u32> {
        range.map(|position| self.token(position)).collect()
    }

    /// The line of the chunk that ends just before `end`.
    pub(super) fn line(&self, chunk_end: usize) -> Line {
        match self {
            Log::Blocks { ids, end, .. } if chunk_end <= *end => Line::Block(ids[(chunk_end - 1) / BLOCK_TOKENS]),
            Log::Own { seed: own } | Log::Blocks { own, .. } => Line::Own(*own),
        }
    }

    /// All lines that the first `len` tokens belong to.
    pub(super) fn lines(&self, len: usize) -> Vec<Line> {
        match self {
            Log::Own { seed } => vec![Line::Own(*seed)],
            Log::Blocks { ids, end, own } => {
                let blocks = ids.iter().take(len.min(*end).div_ceil(BLOCK_TOKENS)).map(|id| Line::Block(*id));
                blocks.chain((len > *end).then_some(Line::Own(*own))).collect()
            }
        }
    }
}

/// SplitMix64's finaliser: neighbouring inputs give unrelated tokens.
fn mix(seed: u64, position: usize) -> u32 {
    let mut z = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (position as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) as u32
}
