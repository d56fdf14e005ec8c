//! What the core asks of tiers, and how it hears back.

use keepsake_kernels::BlockId;
use keepsake_tiers::ChunkKey;

/// A tier below the device, by its place in the configured order: 0 is the first below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierIndex(pub usize);

/// One command, from its issue to its [`MoveDone`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MoveId(pub u64);

/// A command to a tier. Exactly one [`MoveDone`] with the same id answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    pub id: MoveId,
    pub key: ChunkKey,
    /// The chunk's index in its conversation.
    pub position: u32,
    pub kind: CommandKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// Swap-in or restore: a tier's copy into a device block.
    Load { from: TierIndex, block: BlockId },
    /// Swap-out: a device block into a tier.
    SwapOut { block: BlockId, to: TierIndex },
    /// A copy from one tier to a lower one.
    Spill { from: TierIndex, to: TierIndex },
    /// A copy from one tier to a higher one, ahead of use.
    Prefetch { from: TierIndex, to: TierIndex },
    /// Forget a tier's copy.
    Remove { from: TierIndex },
}

/// A command's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveDone {
    pub id: MoveId,
    pub result: Result<(), MoveFault>,
}

/// Why a move moved nothing. Never an error of the request that wanted it: a failed load is a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveFault {
    /// The destination has no room.
    Full,
    /// The source's copy is gone or damaged, and was removed there.
    Lost,
    /// It did not begin or end in time; nothing is wrong with either side.
    Late,
    /// The copy failed: the side that failed is not to be trusted with it again.
    Failed,
}
