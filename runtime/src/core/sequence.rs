//! One running or waiting sequence: its log, its page table, and what is still to be computed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use keepsake_kernels::BlockId;
use keepsake_tiers::eviction::Class;
use keepsake_tiers::ChunkKey;

use super::holes::Holes;
use super::request::{FinishCause, SequenceRequest, SequenceUsage};

/// Who answers for a page's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// This sequence alone; `rows` of its slots hold K/V, counted from the chunk's start.
    Private { rows: usize },
    /// The directory's entry; the sequence holds one reference.
    Shared(ChunkKey),
    /// Nobody: its load failed and no block was left, so the sequence is about to give all pages up.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) block: BlockId,
    pub(super) owner: Owner,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: SequenceRequest,
    /// Prompt and every sampled token that was applied.
    pub(super) tokens: Vec<u32>,
    pub(super) num_sampled: usize,
    /// Samples in steps that were planned and not yet applied.
    pub(super) num_pending: usize,
    /// Steps in flight with rows of this sequence.
    pub(super) num_steps: usize,
    /// Keys of the log's full chunks, in order, as far as they were needed.
    keys: Vec<ChunkKey>,
    pub(super) pages: Vec<Page>,
    pub(super) holes: Holes,
    /// Pages whose chunk is being loaded.
    pub(super) loading: BTreeSet<usize>,
    pub(super) load_deadline: Duration,
    /// A page has no block: it goes back to the queue once no step of it is in flight.
    pub(super) is_lost: bool,
    /// A load came late for it: it computes what is not on the device, so that a slow tier cannot hold it up for ever.
    pub(super) computes_all: bool,
    pub(super) arrived: Duration,
    pub(super) class: Class,
    /// Of its conversation, from 1.
    pub(super) turn: u32,
    pub(super) admitted_before: bool,
    /// Set when it ended; it retires once no step of it is in flight.
    pub(super) finished: Option<FinishCause>,
    /// Tokens of the log that stay, when a stop cut it.
    pub(super) keep: usize,
    /// Of the current admission, until its first sample; then `usage` keeps the first.
    pub(super) admission: Option<SequenceUsage>,
    pub(super) usage: SequenceUsage,
}

impl Sequence {
    pub(super) fn new(request: SequenceRequest, now: Duration) -> Self {
        Self {
            tokens: request.tokens.clone(),
            request,
            num_sampled: 0,
            num_pending: 0,
            num_steps: 0,
            keys: Vec::new(),
            pages: Vec::new(),
            holes: Holes::default(),
            loading: BTreeSet::new(),
            load_deadline: Duration::ZERO,
            is_lost: false,
            computes_all: false,
            arrived: now,
            class: Class::default(),
            turn: 1,
            admitted_before: false,
            finished: None,
            keep: usize::MAX,
            admission: None,
            usage: SequenceUsage::default(),
        }
    }

    /// The log's length once every planned step has been applied.
    pub(super) fn planned_len(&self) -> usize {
        self.tokens.len() + self.num_pending
    }

    /// May a decode row be planned? Lengths are known before tokens are.
    pub(super) fn can_decode(&self) -> bool {
        self.finished.is_none()
            && !self.is_lost
            && self.loading.is_empty()
            && self.holes.is_empty()
            && self.num_sampled + self.num_pending > 0
            && self.num_sampled + self.num_pending < self.request.max_new_tokens
    }

    /// Up to where holes may be computed now: rows attend to everything before them, so not past a chunk that is still being loaded.
    pub(super) fn computable(&self, chunk_tokens: usize) -> usize {
        self.loading.first().map_or(usize::MAX, |page| page * chunk_tokens)
    }

    /// A number that all sequences of the tenant share.
    pub(super) fn tenant(&self) -> u64 {
        let bytes = self.request.root.0;
        u64::from_le_bytes(bytes[..8].try_into().expect("a key has sixteen bytes"))
    }

    /// The key of full chunk `index`; its tokens are known.
    pub(super) fn key(&mut self, index: usize, chunk_tokens: usize) -> ChunkKey {
        while self.keys.len() <= index {
            let start = self.keys.len() * chunk_tokens;
            let parent = self.keys.last().copied().unwrap_or(self.request.root);
            self.keys.push(parent.child(&self.tokens[start..start + chunk_tokens]));
        }
        self.keys[index]
    }

    /// The key of the chunk before `index`: the chain root for the first.
    pub(super) fn parent_key(&mut self, index: usize, chunk_tokens: usize) -> ChunkKey {
        match index {
            0 => self.request.root,
            _ => self.key(index - 1, chunk_tokens),
        }
    }

    /// What ended it with this last token, if anything did.
    pub(super) fn end_after(&self, token: u32) -> Option<FinishCause> {
        let may_end = self.num_sampled > self.request.min_new_tokens || self.request.min_new_tokens == 0;
        if may_end && self.request.end_tokens.contains(&token) {
            return Some(FinishCause::EndToken);
        }
        (self.num_sampled >= self.request.max_new_tokens).then_some(FinishCause::Length)
    }

    /// Running sequences keep their order of arrival; ids break ties.
    pub(super) fn arrival_order(&self) -> (Duration, u64) {
        (self.arrived, self.request.id.0)
    }

    pub(super) fn prompt(&self) -> Arc<[u32]> {
        self.request.tokens.as_slice().into()
    }
}
