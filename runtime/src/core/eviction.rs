//! Which chunks should move down, and where to: a pure function from what the core sees to proposals.
//!
//! The eviction actor calls [`decide`]; the core accepts a proposal only if the chunk is still unpinned and unchanged. Rules (design
//! section 3, points 8 and 9): copy ahead of time until enough device blocks are available; a copy goes to the first tier with
//! room; tiers below keep a little room by moving their least valuable chunks further down; a lower tier's copies of chunks that are
//! also on the device go first; an ahead-of-time copy never displaces a chunk of higher value; what fits nowhere is dropped, and
//! only when someone waits for its block.

use keepsake_tiers::ChunkKey;

use super::command::TierIndex;

/// A chunk that could go, least valuable first in its list.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub key: ChunkKey,
    pub generation: u64,
    pub durable: bool,
    /// What it is worth to each tier below the device, by that tier's policy.
    pub values: Vec<f64>,
    /// A sequence uses its device block.
    pub in_use: bool,
    /// A lower tier has a copy, or is getting one.
    pub backed: bool,
}

/// A tier below the device, as the core sees it.
#[derive(Clone, Debug)]
pub struct TierPressure {
    pub durable: bool,
    /// False while it refuses writes (read-only, down, failing).
    pub accepts: bool,
    /// Moves that may begin now.
    pub credits: usize,
    /// Chunks that fit, by the core's accounting.
    pub capacity: usize,
    /// Chunks in it, being written to it or being removed from it.
    pub used: usize,
    /// Of `used`: on their way out.
    pub leaving: usize,
    /// Its copies of chunks that are also on the device: those in use first, then the most recently active, which stay there longest.
    pub mirrors: Vec<Candidate>,
    /// Its copies of all other chunks, the least valuable first.
    pub victims: Vec<Candidate>,
}

/// What [`decide`] looks at.
#[derive(Clone, Debug)]
pub struct Pressure {
    pub total_blocks: usize,
    /// Empty and clean blocks.
    pub available: usize,
    /// Blocks that the queue's head or a decode row lacks right now.
    pub wanted: usize,
    /// Swap-outs in flight whose blocks will be clean.
    pub becoming_clean: usize,
    /// Unused device chunks without a copy below.
    pub dirty: Vec<Candidate>,
    pub tiers: Vec<TierPressure>,
    /// Copy ahead of time below this fraction of available blocks.
    pub swap_out_below: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proposal {
    SwapOut {
        key: ChunkKey,
        generation: u64,
        to: TierIndex,
    },
    Spill {
        key: ChunkKey,
        generation: u64,
        from: TierIndex,
        to: TierIndex,
    },
    /// Forget a tier's copy; the chunk may become a hole.
    Remove {
        key: ChunkKey,
        generation: u64,
        from: TierIndex,
    },
    /// Forget an unused device chunk: it becomes a hole.
    Drop {
        key: ChunkKey,
        generation: u64,
    },
}

/// Durable tiers evict from here: beyond it, their files' own overhead could reach the cap.
const DURABLE_FILL: f64 = 0.8;
/// A tier above another keeps this fraction of itself free by spilling ahead of need.
const HEADROOM: f64 = 1.0 / 16.0;

pub fn decide(pressure: &Pressure) -> Vec<Proposal> {
    let mut proposals = Vec::new();
    let mut tiers: Vec<Room> = pressure.tiers.iter().enumerate().map(|(index, tier)| Room::new(index, tier)).collect();
    swap_out(pressure, &mut tiers, &mut proposals);
    for index in 0..tiers.len() {
        make_room(index, &mut tiers, &mut proposals);
    }
    proposals
}

/// A tier's room while proposals are being collected.
struct Room<'a> {
    index: usize,
    tier: &'a TierPressure,
    limit: usize,
    used: usize,
    credits: usize,
    /// Chunks that wanted in and found no room; `leaving`, mirrors and victims make it for them, in this order.
    num_refused: usize,
    num_mirrors: usize,
    num_victims: usize,
}

impl<'a> Room<'a> {
    fn new(index: usize, tier: &'a TierPressure) -> Self {
        let limit = if tier.durable { (tier.capacity as f64 * DURABLE_FILL) as usize } else { tier.capacity };
        Self {
            index,
            tier,
            limit,
            used: tier.used,
            credits: tier.credits,
            num_refused: 0,
            num_mirrors: 0,
            num_victims: 0,
        }
    }

    fn takes(&self, candidate: &Candidate) -> bool {
        self.tier.accepts && self.limit > 0 && (candidate.durable || !self.tier.durable)
    }

    fn take_credit(&mut self) -> bool {
        let had = self.credits > 0;
        self.credits = self.credits.saturating_sub(1);
        had
    }

    fn has_room(&self) -> bool {
        self.used < self.limit
    }

    /// Can room be made for a chunk? Only at the cost of what is worth less to this tier.
    fn outbids(&mut self, candidate: &Candidate) -> bool {
        let value = candidate.values[self.index];
        if self.num_refused < self.tier.leaving {
            self.num_refused += 1;
            return true;
        }
        // A durable copy is what lets its device block go: another one in its place would free one block and bind one.
        let gives_mirrors = !self.tier.durable;
        // While a sequence uses the block, the copy frees nothing. Of others it must be worth more than the newcomer: the copy of a
        // lesser one would be made again at once.
        let gives_way = |m: &Candidate| m.in_use || m.values[self.index] > value;
        if gives_mirrors && self.tier.mirrors.get(self.num_mirrors).is_some_and(gives_way) {
            self.num_mirrors += 1;
        } else if self.tier.victims.get(self.num_victims).is_some_and(|v| v.values[self.index] < value) {
            self.num_victims += 1;
        } else {
            return false;
        }
        self.num_refused += 1;
        true
    }
}

fn swap_out(pressure: &Pressure, tiers: &mut [Room], proposals: &mut Vec<Proposal>) {
    let ahead = (pressure.total_blocks as f64 * pressure.swap_out_below).ceil() as usize;
    let soon = pressure.available + pressure.becoming_clean;
    let lack = ahead.max(pressure.wanted).saturating_sub(soon);
    let must_give = pressure.wanted.saturating_sub(soon);
    for (rank, candidate) in pressure.dirty.iter().take(lack).enumerate() {
        let Candidate { key, generation, .. } = *candidate;
        let mut waits = false;
        let mut to = None;
        for (index, room) in tiers.iter_mut().enumerate().filter(|(_, room)| room.takes(candidate)) {
            if room.has_room() {
                // Without a credit it waits for one: there is room for it.
                waits = room.credits == 0;
                if room.take_credit() {
                    room.used += 1;
                    to = Some(TierIndex(index));
                }
                break;
            }
            if room.outbids(candidate) {
                waits = true;
                break;
            }
        }
        match to {
            Some(to) => proposals.push(Proposal::SwapOut { key, generation, to }),
            None if !waits && rank < must_give => proposals.push(Proposal::Drop { key, generation }),
            None => {}
        }
    }
}

fn make_room(index: usize, tiers: &mut [Room], proposals: &mut Vec<Proposal>) {
    let (above, below) = tiers.split_at_mut(index + 1);
    let room = &mut above[index];
    let from = TierIndex(index);
    let remove = |c: &Candidate| Proposal::Remove { key: c.key, generation: c.generation, from };

    let has_lower = below.iter().any(|r| r.tier.accepts && r.limit > 0);
    let headroom = if has_lower { ((room.limit as f64 * HEADROOM) as usize).max(1) } else { 0 };
    let staying = room.used.saturating_sub(room.tier.leaving + room.num_mirrors);
    let over = staying.saturating_sub(room.limit.saturating_sub(headroom));
    // Over its limit with nothing else to give (its files grew, say): mirrors too.
    let num_more = staying.saturating_sub(room.limit + room.tier.victims.len());
    proposals.extend(room.tier.mirrors.iter().take(room.num_mirrors + num_more).map(remove));
    for (rank, victim) in room.tier.victims.iter().take(over.max(room.num_victims)).enumerate() {
        if victim.backed {
            proposals.push(remove(victim));
            continue;
        }
        let lower = below.iter_mut().enumerate().find(|(_, r)| r.takes(victim) && r.has_room() && r.credits > 0);
        if let Some((offset, lower)) = lower {
            lower.used += 1;
            lower.credits -= 1;
            let to = TierIndex(index + 1 + offset);
            proposals.push(Proposal::Spill { key: victim.key, generation: victim.generation, from, to });
            continue;
        }
        // Somebody of higher value wants its place. Room that is only kept ahead of need displaces nobody further down: what it would
        // remove there may be what lets a device block go.
        let is_displaced = rank < room.num_victims;
        let waits = below.iter_mut().any(|r| r.takes(victim) && (r.has_room() || is_displaced && r.outbids(victim)));
        // Nothing below takes it: it goes only for a chunk of higher value, or because the tier is over its limit.
        let must_go = is_displaced || staying > room.limit;
        if !waits && must_go {
            proposals.push(remove(victim));
        }
    }
}
