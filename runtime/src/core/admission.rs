//! What admitting a sequence would take: for each chunk of its log, where its K/V comes from.

use keepsake_tiers::eviction::CostCurve;
use keepsake_tiers::ChunkKey;

use super::command::TierIndex;
use super::costs::RouteCost;
use super::directory::{ChunkEntry, Directory, OnDevice};
use super::sequence::Sequence;

/// Where one chunk's K/V comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// On the device, or on its way there for someone else.
    Device(ChunkKey),
    Load(ChunkKey, TierIndex),
    /// The private tail of an earlier turn of the same conversation, with so many rows.
    Tail(ChunkKey, usize),
    /// A tier has it, but computing it is quicker.
    Compute(TierIndex),
    /// Nowhere: compute it.
    Hole,
}

#[derive(Clone, Debug)]
pub(super) struct AdmissionPlan {
    pub(super) sources: Vec<Source>,
    /// Blocks to take.
    pub(super) num_blocks: usize,
    /// Clean blocks that it would use itself, so that they are not there to be taken.
    pub(super) num_own_clean: usize,
}

/// Looks every chunk of the log up; never stops at a miss, since any chunk can be a hole.
///
/// The last token is always computed, for its logits. So a log that ends at a chunk's end computes its last chunk again, into a
/// private block: shared blocks are never written.
pub(super) fn plan(sequence: &mut Sequence, directory: &Directory, chunk_tokens: usize) -> AdmissionPlan {
    let len = sequence.tokens.len();
    let num_shareable = (len - 1) / chunk_tokens;
    let mut plan = AdmissionPlan { sources: Vec::with_capacity(num_shareable + 1), num_blocks: 0, num_own_clean: 0 };
    for index in 0..num_shareable {
        let key = sequence.key(index, chunk_tokens);
        let entry = directory.get(&key);
        let load_source = |e: &ChunkEntry| e.load_source().filter(|_| !sequence.computes_all);
        let source = match entry.map(|e| (e.device(), load_source(e))) {
            Some((OnDevice::Resident(_) | OnDevice::Loading { .. }, _)) => Source::Device(key),
            Some((OnDevice::Absent, Some(tier))) => Source::Load(key, tier),
            Some((OnDevice::Absent, None)) | None => tail_or_hole(sequence, directory, index, chunk_tokens),
        };
        plan.push(source, entry.is_some_and(|e| e.is_clean()));
    }
    let last = tail_or_hole(sequence, directory, num_shareable, chunk_tokens);
    plan.push(last, false);
    plan
}

impl AdmissionPlan {
    fn push(&mut self, source: Source, is_clean: bool) {
        let takes_own = matches!(source, Source::Tail(..));
        self.num_own_clean += usize::from(is_clean || takes_own);
        self.num_blocks += usize::from(matches!(source, Source::Load(..) | Source::Hole));
        self.sources.push(source);
    }
}

/// A chunk that is nowhere as a whole may begin with the tail that an earlier turn left.
fn tail_or_hole(sequence: &mut Sequence, directory: &Directory, index: usize, chunk_tokens: usize) -> Source {
    let parent = sequence.parent_key(index, chunk_tokens);
    let start = index * chunk_tokens;
    let end = (start + chunk_tokens).min(sequence.tokens.len());
    match directory.longest_tail(&parent, &sequence.tokens[start..end]) {
        Some((key, rows)) => Source::Tail(key, rows),
        None => Source::Hole,
    }
}

/// The way from a tier to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) load: RouteCost,
    /// Loads under way, which a new one waits for.
    pub(super) busy: usize,
}

/// Load or recompute: decides for every chunk that a tier holds, by measured costs.
///
/// On a contended device each chunk goes the way that costs less, the lanes' backlog counted as waiting time shared by the chunks.
/// Alone on it, a sequence also uses the device while it waits: it computes from the front while the back is loaded, and the border
/// is where both end together (holes before a pending load can be computed at once, see `Sequence::computable`).
pub(super) fn choose(
    plan: &mut AdmissionPlan,
    chunk_seconds: &CostCurve,
    lanes: &[Lane],
    chunk_tokens: usize,
    is_contended: bool,
) {
    let context = |index: usize| ((index + 1) * chunk_tokens) as u32;
    let loads: Vec<(usize, TierIndex)> = plan
        .sources
        .iter()
        .enumerate()
        .filter_map(|(index, source)| match source {
            Source::Load(_, tier) => Some((index, *tier)),
            _ => None,
        })
        .collect();
    let backlog = |tier: TierIndex| lanes[tier.0].load.latency + lanes[tier.0].busy as f64 * lanes[tier.0].load.chunk;
    let num_computed = if is_contended {
        // All or nothing from the front: what is loaded must be cheaper than computing it, the wait for the lane included.
        let saves = |loads: &[(usize, TierIndex)]| {
            let waits = loads.iter().map(|(_, tier)| backlog(*tier)).fold(0.0, f64::max);
            let copies: f64 = loads.iter().map(|(_, tier)| lanes[tier.0].load.chunk).sum();
            let computes: f64 = loads.iter().map(|(index, _)| chunk_seconds.at(context(*index))).sum();
            copies + waits < computes
        };
        let dear = loads.iter().filter(|(index, tier)| lanes[tier.0].load.chunk >= chunk_seconds.at(context(*index)));
        match saves(&loads) {
            true => dear.count(),
            false => loads.len(),
        }
    } else {
        meeting_point(&loads, |index| chunk_seconds.at(context(index)), lanes, backlog)
    };
    for &(index, tier) in &loads[..num_computed] {
        plan.sources[index] = Source::Compute(tier);
    }
}

/// How many of the loads, from the front, are computed instead so that the last load and the last computed chunk end together.
fn meeting_point(
    loads: &[(usize, TierIndex)],
    compute: impl Fn(usize) -> f64,
    lanes: &[Lane],
    backlog: impl Fn(TierIndex) -> f64,
) -> usize {
    // Lanes of different tiers work side by side; the slowest decides.
    let mut loading = vec![0usize; lanes.len()];
    for (_, tier) in loads {
        loading[tier.0] += 1;
    }
    let time = |loading: &[usize]| {
        let busy = loading.iter().enumerate().filter(|(_, count)| **count > 0);
        busy.map(|(tier, count)| *count as f64 * lanes[tier].load.chunk + backlog(TierIndex(tier))).fold(0.0, f64::max)
    };
    let (mut best, mut best_time, mut computing) = (0, time(&loading), 0.0);
    for (count, (index, tier)) in loads.iter().enumerate() {
        computing += compute(*index);
        loading[tier.0] -= 1;
        let total = time(&loading).max(computing);
        if total < best_time {
            (best, best_time) = (count + 1, total);
        }
        if computing >= best_time {
            break;
        }
    }
    best
}
