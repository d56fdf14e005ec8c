//! The ranges of a sequence whose K/V has still to be computed.

use std::collections::VecDeque;
use std::ops::Range;

/// Disjoint, ascending, non-adjacent token ranges. The last one ends at the log's end while a prompt is being computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holes(VecDeque<Range<usize>>);

impl Holes {
    /// Adds a range at or after the end of everything present.
    pub(super) fn push(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        match self.0.back_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            Some(last) => {
                debug_assert!(last.end < range.start, "holes ascend");
                self.0.push_back(range);
            }
            None => self.0.push_back(range),
        }
    }

    /// Adds a range anywhere; it overlaps none that is present.
    pub(super) fn insert(&mut self, range: Range<usize>) {
        let mut all: Vec<_> = self.0.drain(..).collect();
        all.push(range);
        all.sort_by_key(|r| r.start);
        for r in all {
            self.push(r);
        }
    }

    /// Takes up to `budget` tokens before position `bound` from the front, as one range.
    pub(super) fn take(&mut self, budget: usize, bound: usize) -> Option<Range<usize>> {
        let front = self.0.front_mut()?;
        let end = front.end.min(front.start + budget).min(bound.max(front.start));
        let taken = front.start..end;
        if end == front.end {
            self.0.pop_front();
        } else {
            front.start = end;
        }
        (!taken.is_empty()).then_some(taken)
    }

    pub(super) fn num_tokens(&self) -> usize {
        self.0.iter().map(|range| range.len()).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
