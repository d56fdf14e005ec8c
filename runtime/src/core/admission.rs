//! What admitting a sequence would take: for each chunk of its log, where its K/V comes from.

use keepsake_tiers::ChunkKey;

use super::command::TierIndex;
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
