//! The chunk directory: which chunk is where, who uses it, and every legal change of that.

use std::time::Duration;

use keepsake_kernels::BlockId;
use keepsake_tiers::eviction::{ChunkUse, Class};
use keepsake_tiers::{ChunkKey, ChunkMap};

use super::command::TierIndex;

/// A chunk's K/V on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnDevice {
    Absent,
    /// A load is writing this block.
    Loading {
        block: BlockId,
        from: TierIndex,
    },
    Resident(BlockId),
}

/// A chunk's copy in one tier below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InTier {
    Absent,
    /// A swap-out or spill is writing it.
    Writing,
    Present,
    /// A removal is on its way: neither readable nor writable until it has been carried out.
    Removing,
}

/// Everything known of one chunk. Fields change through this impl only, so each legal transition stands here once.
#[derive(Clone, Debug)]
pub(super) struct ChunkEntry {
    /// The key of the chunk before it: its chain root for the first. Its own key while nobody knows: see [`Directory::learn_parent`].
    pub(super) parent: ChunkKey,
    /// Chunk index in its conversation.
    pub(super) position: u32,
    /// The partial tail of a log: how many rows it has and which tokens; `None` for a full chunk.
    pub(super) tail: Option<Vec<u32>>,
    pub(super) durable: bool,
    pub(super) last_activity: Duration,
    /// Of the conversation that used it last.
    class: Class,
    /// Changes whenever the chunk is used or moves, so that a proposal about an earlier state is refused.
    pub(super) generation: u64,
    device: OnDevice,
    tiers: Vec<InTier>,
    /// Sequences whose page table names the device block.
    refs: u32,
    /// Swap-outs that read the device block.
    device_reads: u32,
    /// Loads and spills that read a tier's copy, by tier.
    tier_reads: Vec<u32>,
    /// Loads that nobody waits for any more, because they came late.
    late_loads: u32,
    /// Counted among its parent's followers.
    is_counted: bool,
}

impl ChunkEntry {
    pub(super) fn new(parent: ChunkKey, position: u32, num_tiers: usize, now: Duration) -> Self {
        Self {
            parent,
            position,
            tail: None,
            durable: false,
            last_activity: now,
            class: Class::default(),
            generation: 0,
            device: OnDevice::Absent,
            tiers: vec![InTier::Absent; num_tiers],
            refs: 0,
            device_reads: 0,
            tier_reads: vec![0; num_tiers],
            late_loads: 0,
            is_counted: false,
        }
    }

    /// What policies know of it.
    pub(super) fn chunk_use(&self, chunk_tokens: usize) -> ChunkUse {
        ChunkUse {
            context_tokens: (self.position + 1) * chunk_tokens as u32,
            last_activity: self.last_activity,
            class: self.class,
        }
    }

    pub(super) fn device(&self) -> OnDevice {
        self.device
    }

    pub(super) fn in_tier(&self, tier: TierIndex) -> InTier {
        self.tiers[tier.0]
    }

    pub(super) fn refs(&self) -> u32 {
        self.refs
    }

    pub(super) fn resident_block(&self) -> Option<BlockId> {
        match self.device {
            OnDevice::Resident(block) => Some(block),
            OnDevice::Absent | OnDevice::Loading { .. } => None,
        }
    }

    /// The tier to load from. None while a late load is under way: the tier that was too slow would be so again.
    pub(super) fn load_source(&self) -> Option<TierIndex> {
        self.readable_tier().filter(|_| self.late_loads == 0)
    }

    /// The first tier with a complete copy.
    fn readable_tier(&self) -> Option<TierIndex> {
        self.tiers.iter().position(|t| *t == InTier::Present).map(TierIndex)
    }

    /// Can it be had without computing it, now or soon?
    pub(super) fn is_readable(&self) -> bool {
        self.device != OnDevice::Absent || self.readable_tier().is_some()
    }

    /// Is a copy below the device complete or being made?
    pub(super) fn is_backed(&self) -> bool {
        self.tiers.iter().any(|t| matches!(t, InTier::Present | InTier::Writing))
    }

    /// May its device block be handed to someone else?
    pub(super) fn is_evictable(&self) -> bool {
        self.resident_block().is_some() && self.refs == 0 && self.device_reads == 0
    }

    /// May its block be handed over without losing K/V? Tails are never copied, so they always may.
    pub(super) fn is_clean(&self) -> bool {
        self.is_evictable() && (self.tail.is_some() || self.readable_tier().is_some())
    }

    /// May a tier's copy be removed or read for a spill?
    pub(super) fn is_tier_idle(&self, tier: TierIndex) -> bool {
        self.tiers[tier.0] == InTier::Present && self.tier_reads[tier.0] == 0
    }

    /// Nowhere, and no copy of it is under way: the entry can go.
    pub(super) fn is_gone(&self) -> bool {
        let is_nowhere = self.device == OnDevice::Absent && self.tiers.iter().all(|t| *t == InTier::Absent);
        is_nowhere && self.tier_reads.iter().all(|n| *n == 0)
    }

    /// A sequence or a copy under way depends on it.
    pub(super) fn is_in_use(&self) -> bool {
        let is_arriving = matches!(self.device, OnDevice::Loading { .. }) || self.tiers.contains(&InTier::Writing);
        is_arriving || self.late_loads > 0 || self.num_pins() > 0
    }

    /// It, or a copy of it, can be found by logs that go through it.
    pub(super) fn is_held(&self) -> bool {
        self.device != OnDevice::Absent || self.is_backed()
    }

    pub(super) fn touch(&mut self, now: Duration, class: Class) {
        self.last_activity = self.last_activity.max(now);
        self.class = class;
        self.generation += 1;
    }

    pub(super) fn acquire(&mut self) {
        debug_assert!(self.device != OnDevice::Absent, "only a chunk on the device can be used");
        self.refs += 1;
        self.generation += 1;
    }

    pub(super) fn release(&mut self) {
        debug_assert!(self.refs > 0, "released more often than acquired");
        self.refs -= 1;
        self.generation += 1;
    }

    /// A computed chunk becomes known under its key.
    pub(super) fn publish(&mut self, block: BlockId) {
        debug_assert!(self.device == OnDevice::Absent, "the first publisher wins");
        self.device = OnDevice::Resident(block);
        self.generation += 1;
    }

    pub(super) fn begin_load(&mut self, from: TierIndex, block: BlockId) {
        debug_assert!(self.device == OnDevice::Absent && self.tiers[from.0] == InTier::Present);
        self.device = OnDevice::Loading { block, from };
        self.tier_reads[from.0] += 1;
        self.generation += 1;
    }

    /// The copy into `block` ended. `false`: the block is no longer this chunk's (the load was abandoned).
    pub(super) fn end_load(&mut self, from: TierIndex, block: BlockId, loaded: bool) -> bool {
        debug_assert!(self.tier_reads[from.0] > 0);
        self.tier_reads[from.0] -= 1;
        self.generation += 1;
        if self.device != (OnDevice::Loading { block, from }) {
            self.late_loads -= 1;
            return false;
        }
        self.device = if loaded { OnDevice::Resident(block) } else { OnDevice::Absent };
        if !loaded {
            self.refs = 0;
        }
        true
    }

    /// Gives up waiting for a load; its block belongs to the copy until that ends.
    pub(super) fn abandon_load(&mut self) {
        debug_assert!(matches!(self.device, OnDevice::Loading { .. }));
        self.device = OnDevice::Absent;
        self.refs = 0;
        self.late_loads += 1;
        self.generation += 1;
    }

    /// Takes the block away from an evictable chunk.
    pub(super) fn evict(&mut self) -> BlockId {
        debug_assert!(self.is_evictable(), "evicting a chunk in use");
        let OnDevice::Resident(block) = self.device else { unreachable!("evictable means resident") };
        self.device = OnDevice::Absent;
        self.generation += 1;
        block
    }

    pub(super) fn begin_swap_out(&mut self, to: TierIndex) -> BlockId {
        debug_assert!(self.tail.is_none(), "a tail is never copied");
        debug_assert!(self.tiers[to.0] == InTier::Absent);
        let OnDevice::Resident(block) = self.device else { unreachable!("swap-out reads a resident chunk") };
        self.tiers[to.0] = InTier::Writing;
        self.device_reads += 1;
        self.generation += 1;
        block
    }

    pub(super) fn end_swap_out(&mut self, to: TierIndex, written: bool) {
        debug_assert!(self.device_reads > 0);
        self.device_reads -= 1;
        self.end_write(to, written);
    }

    /// A copy between two tiers, down or up.
    pub(super) fn begin_copy(&mut self, from: TierIndex, to: TierIndex) {
        debug_assert!(self.tiers[from.0] == InTier::Present && self.tiers[to.0] == InTier::Absent);
        self.tier_reads[from.0] += 1;
        self.tiers[to.0] = InTier::Writing;
        self.generation += 1;
    }

    pub(super) fn end_copy(&mut self, from: TierIndex, to: TierIndex, written: bool) {
        debug_assert!(self.tier_reads[from.0] > 0);
        self.tier_reads[from.0] -= 1;
        self.end_write(to, written);
    }

    pub(super) fn begin_remove(&mut self, from: TierIndex) {
        debug_assert!(self.is_tier_idle(from), "removing a copy that is being read");
        self.tiers[from.0] = InTier::Removing;
        self.generation += 1;
    }

    pub(super) fn end_remove(&mut self, from: TierIndex) {
        debug_assert!(self.tiers[from.0] == InTier::Removing);
        self.tiers[from.0] = InTier::Absent;
        self.generation += 1;
    }

    /// The tier said that its copy is gone or damaged. `false`: it had none that the directory counted.
    pub(super) fn lose(&mut self, tier: TierIndex) -> bool {
        let had = self.tiers[tier.0] == InTier::Present;
        if had {
            self.tiers[tier.0] = InTier::Absent;
            self.generation += 1;
        }
        had
    }

    /// A durable tier had it at start.
    pub(super) fn recover(&mut self, tier: TierIndex) {
        debug_assert!(self.tiers[tier.0] == InTier::Absent);
        self.tiers[tier.0] = InTier::Present;
    }

    pub(super) fn num_pins(&self) -> u32 {
        self.refs + self.device_reads + self.tier_reads.iter().sum::<u32>()
    }

    fn end_write(&mut self, to: TierIndex, written: bool) {
        debug_assert!(self.tiers[to.0] == InTier::Writing);
        self.tiers[to.0] = if written { InTier::Present } else { InTier::Absent };
        self.generation += 1;
    }
}

/// All known chunks by key, and the tails by the chunk they follow.
#[derive(Debug, Default)]
pub(super) struct Directory {
    chunks: ChunkMap<ChunkEntry>,
    tails: ChunkMap<Vec<ChunkKey>>,
    /// How many held chunks follow a chunk, by its key, whether it is held itself or not. Tails count.
    followers: ChunkMap<u32>,
}

impl Directory {
    pub(super) fn get(&self, key: &ChunkKey) -> Option<&ChunkEntry> {
        self.chunks.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &ChunkKey) -> Option<&mut ChunkEntry> {
        self.chunks.get_mut(key)
    }

    pub(super) fn insert(&mut self, key: ChunkKey, entry: ChunkEntry) {
        if entry.tail.is_some() {
            self.tails.entry(entry.parent).or_default().push(key);
        }
        let earlier = self.chunks.insert(key, entry);
        debug_assert!(earlier.is_none(), "a chunk has one entry");
    }

    /// Held chunks that follow this one.
    pub(super) fn num_followers(&self, key: &ChunkKey) -> u32 {
        self.followers.get(key).copied().unwrap_or(0)
    }

    /// Counts the chunk as a follower of its parent, or not any more. To be called after each change of the entry.
    pub(super) fn count_follower(&mut self, key: &ChunkKey) {
        let Some(entry) = self.chunks.get_mut(key) else { return };
        let follows = entry.is_held() && entry.parent != *key;
        if follows == entry.is_counted {
            return;
        }
        entry.is_counted = follows;
        let count = self.followers.entry(entry.parent).or_default();
        match follows {
            true => *count += 1,
            false => *count -= 1,
        }
        if *count == 0 {
            self.followers.remove(&entry.parent);
        }
    }

    /// A chunk that a tier kept over a restart did not say what it follows; a log with both says it.
    pub(super) fn learn_parent(&mut self, key: &ChunkKey, parent: ChunkKey) {
        let Some(entry) = self.chunks.get_mut(key).filter(|entry| entry.parent == *key) else { return };
        entry.parent = parent;
        self.count_follower(key);
    }

    /// The number of followers of every chunk that has any, counted anew.
    pub(super) fn count_all_followers(&self) -> ChunkMap<u32> {
        let mut followers = ChunkMap::default();
        for (_, entry) in self.chunks.iter().filter(|(key, entry)| entry.is_held() && entry.parent != **key) {
            *followers.entry(entry.parent).or_default() += 1;
        }
        followers
    }

    pub(super) fn followers(&self) -> &ChunkMap<u32> {
        &self.followers
    }

    /// Drops the entry when nothing holds the chunk any more.
    pub(super) fn forget_if_gone(&mut self, key: &ChunkKey) {
        if self.chunks.get(key).is_some_and(ChunkEntry::is_gone) {
            let entry = self.chunks.remove(key).expect("looked up above");
            if entry.tail.is_some() {
                let siblings = self.tails.get_mut(&entry.parent).expect("a tail is listed under its parent");
                siblings.retain(|k| k != key);
                if siblings.is_empty() {
                    self.tails.remove(&entry.parent);
                }
            }
        }
    }

    /// The longest unused tail after `parent` whose tokens start `rest`, and how many rows it has.
    pub(super) fn longest_tail(&self, parent: &ChunkKey, rest: &[u32]) -> Option<(ChunkKey, usize)> {
        let rows = |key: &ChunkKey| {
            let entry = &self.chunks[key];
            let tokens = entry.tail.as_deref().expect("listed as a tail");
            (entry.is_evictable() && rest.starts_with(tokens)).then_some((*key, tokens.len()))
        };
        self.tails.get(parent)?.iter().filter_map(rows).max_by_key(|(_, rows)| *rows)
    }

    /// The tails after `parent` whose tokens start `rest`, with more than `keep` rows.
    pub(super) fn tails_within(&self, parent: &ChunkKey, rest: &[u32], keep: usize) -> Vec<ChunkKey> {
        let is_within = |key: &&ChunkKey| {
            let entry = &self.chunks[*key];
            let tokens = entry.tail.as_deref().expect("listed as a tail");
            entry.is_evictable() && tokens.len() > keep && rest.starts_with(tokens)
        };
        self.tails.get(parent).into_iter().flatten().filter(is_within).copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&ChunkKey, &ChunkEntry)> {
        self.chunks.iter()
    }
}
