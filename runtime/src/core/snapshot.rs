//! What the core lets others see: numbers, never tokens.

use std::collections::{HashMap, HashSet};

use keepsake_kernels::BlockId;
use keepsake_tiers::ChunkKey;
use serde::Serialize;

use super::command::{CommandKind, TierIndex};
use super::directory::{ChunkEntry, InTier, OnDevice};
use super::scheduler::Scheduler;
use super::sequence::Owner;

/// Totals since start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CoreCounters {
    /// Input tokens found on the device.
    pub tokens_device: u64,
    /// Input tokens loaded, by tier below the device.
    pub tokens_loaded: Vec<u64>,
    /// Tokens of earlier turns (or of a suspended sequence) computed again.
    pub tokens_recomputed: u64,
    pub tokens_new: u64,
    /// Chunks that admission loads, by tier, and those it computes although a tier holds them.
    pub chunks_load_chosen: Vec<u64>,
    pub chunks_compute_chosen: Vec<u64>,
    pub tokens_sampled: u64,
    pub num_steps: u64,
    /// Rows whose result was thrown away because their sequence had ended.
    pub rows_wasted: u64,
    pub num_suspensions: u64,
    pub chunks_dropped: u64,
    pub chunks_prefetched: u64,
    /// Chunks that went with the deleted or expired turns they belonged to.
    pub chunks_forgotten: u64,
    pub load_failures: u64,
    pub num_rejected: u64,
    pub proposals_refused: u64,
}

impl CoreCounters {
    pub(super) fn of_tiers(num_tiers: usize) -> Self {
        let zeros = vec![0; num_tiers];
        Self {
            tokens_loaded: zeros.clone(),
            chunks_load_chosen: zeros.clone(),
            chunks_compute_chosen: zeros,
            ..Self::default()
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TierSnapshot {
    pub name: String,
    pub capacity_chunks: usize,
    pub num_chunks: usize,
    pub accepts: bool,
}

/// `free + private + resident + loading + orphaned == total`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CoreSnapshot {
    pub gauges: CoreGauges,
    /// Owned by one sequence.
    pub private_blocks: usize,
    /// Known under a chunk key.
    pub resident_blocks: usize,
    /// Being written by a load that somebody waits for.
    pub loading_blocks: usize,
    /// Being written by a load that nobody waits for any more.
    pub orphaned_blocks: usize,
    /// References of sequences and copies in flight.
    pub num_pins: u64,
}

/// What is known without walking the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CoreGauges {
    pub num_waiting: usize,
    pub num_running: usize,
    pub total_blocks: usize,
    pub free_blocks: usize,
    /// Unused, and reusable without losing K/V.
    pub clean_blocks: usize,
    /// Unused, without a copy below.
    pub dirty_blocks: usize,
    pub num_chunks: usize,
    pub moves_in_flight: usize,
    pub steps_in_flight: usize,
    pub tiers: Vec<TierSnapshot>,
    pub counters: CoreCounters,
}

impl Scheduler {
    pub fn snapshot(&self) -> CoreSnapshot {
        let private_blocks = self.private_blocks().count();
        let resident_blocks = self.directory.iter().filter(|(_, e)| e.resident_block().is_some()).count();
        let loading_blocks =
            self.directory.iter().filter(|(_, e)| matches!(e.device(), OnDevice::Loading { .. })).count();
        CoreSnapshot {
            gauges: self.gauges(),
            private_blocks,
            resident_blocks,
            loading_blocks,
            orphaned_blocks: self.orphans.len(),
            num_pins: self.num_pins(),
        }
    }

    /// Known chunks without the tails of logs. Walks the directory.
    #[cfg(test)]
    pub(super) fn num_full_chunks(&self) -> usize {
        self.directory.iter().filter(|(_, e)| e.tail.is_none()).count()
    }

    /// References of sequences and copies in flight.
    pub fn num_pins(&self) -> u64 {
        let pages = self.sequences.values().flat_map(|s| &s.pages);
        let shared = pages.filter(|p| matches!(p.owner, Owner::Shared(_))).count();
        let copies = self.moves.values().filter(|m| !matches!(m.kind, CommandKind::Remove { .. })).count();
        (shared + copies) as u64
    }

    pub fn gauges(&self) -> CoreGauges {
        let tiers = self.tiers.iter().map(|tier| TierSnapshot {
            name: tier.spec.name.clone(),
            capacity_chunks: tier.spec.capacity,
            num_chunks: tier.used,
            accepts: tier.accepts,
        });
        CoreGauges {
            num_waiting: self.queue.len(),
            num_running: self.running.len(),
            total_blocks: self.pool.num_total(),
            free_blocks: self.pool.num_free(),
            clean_blocks: self.clean.len(),
            dirty_blocks: self.dirty.len(),
            num_chunks: self.directory.len(),
            moves_in_flight: self.moves.len(),
            steps_in_flight: self.in_flight.len(),
            tiers: tiers.collect(),
            counters: self.counters.clone(),
        }
    }

    /// Checks every invariant; the error names the one that does not hold. Walks everything: for tests and for `Observe`.
    pub fn check(&self) -> Result<(), String> {
        self.check_blocks()?;
        self.check_references()?;
        self.check_followers()?;
        self.check_indexes()
    }

    fn private_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let pages = self.sequences.values().flat_map(|s| &s.pages);
        pages.filter(|p| matches!(p.owner, Owner::Private { .. })).map(|p| p.block)
    }

    fn check_blocks(&self) -> Result<(), String> {
        let on_device = self.directory.iter().filter_map(|(_, e)| match e.device() {
            OnDevice::Absent => None,
            OnDevice::Loading { block, .. } | OnDevice::Resident(block) => Some(block),
        });
        let mut owners = HashSet::new();
        for block in self.private_blocks().chain(on_device).chain(self.orphans.values().copied()) {
            if !owners.insert(block) {
                return Err(format!("block {} has two owners", block.0));
            }
        }
        let (free, total) = (self.pool.num_free(), self.pool.num_total());
        match free + owners.len() == total {
            true => Ok(()),
            false => Err(format!("{free} free + {} owned blocks, of {total}", owners.len())),
        }
    }

    fn check_references(&self) -> Result<(), String> {
        let mut refs: HashMap<ChunkKey, u32> = HashMap::new();
        for page in self.sequences.values().flat_map(|s| &s.pages) {
            if let Owner::Shared(key) = page.owner {
                *refs.entry(key).or_default() += 1;
                let on_device = self.directory.get(&key).map(|e| e.device());
                match on_device {
                    Some(OnDevice::Resident(block) | OnDevice::Loading { block, .. }) if block == page.block => {}
                    other => return Err(format!("chunk {key} is used in block {} but is {other:?}", page.block.0)),
                }
            }
        }
        let mut used = vec![0; self.tiers.len()];
        let mut pins = 0;
        for (key, entry) in self.directory.iter() {
            let expected = refs.get(key).copied().unwrap_or(0);
            if entry.refs() != expected {
                return Err(format!("chunk {key} counts {} references, has {expected}", entry.refs()));
            }
            pins += u64::from(entry.num_pins());
            for (index, used) in used.iter_mut().enumerate() {
                *used += usize::from(entry.in_tier(TierIndex(index)) != InTier::Absent);
            }
        }
        if pins != self.num_pins() {
            return Err(format!("chunks count {pins} pins, sequences and moves hold {}", self.num_pins()));
        }
        for (tier, used) in self.tiers.iter().zip(used) {
            if tier.used != used {
                return Err(format!("tier {} counts {} chunks, has {used}", tier.spec.name, tier.used));
            }
        }
        Ok(())
    }

    fn check_followers(&self) -> Result<(), String> {
        let (counted, actual) = (self.directory.followers(), self.directory.count_all_followers());
        if *counted != actual {
            return Err(format!("followers of {} chunks are counted, {} have any", counted.len(), actual.len()));
        }
        let is_used = |key: &ChunkKey| self.directory.get(key).is_some_and(ChunkEntry::is_in_use);
        match self.forgetting.awaited().find(|key| !is_used(key)) {
            Some(key) => Err(format!("a log cannot be forgotten for chunk {key}, which nobody uses")),
            None => Ok(()),
        }
    }

    fn check_indexes(&self) -> Result<(), String> {
        let count = |f: &dyn Fn(&ChunkEntry) -> bool| self.directory.iter().filter(|(_, e)| f(e)).count();
        let mut expected = vec![
            ("clean", self.clean.len(), count(&|e| e.is_clean())),
            ("dirty", self.dirty.len(), count(&|e| e.is_evictable() && !e.is_clean())),
        ];
        for (index, tier) in self.tiers.iter().enumerate() {
            let idle = tier.only.len() + tier.mirrors.len();
            expected.push(("tier", idle, count(&|e| e.is_tier_idle(TierIndex(index)))));
        }
        match expected.into_iter().find(|(_, indexed, actual)| indexed != actual) {
            Some((name, indexed, actual)) => Err(format!("index {name} holds {indexed} chunks of {actual}")),
            None => Ok(()),
        }
    }
}
