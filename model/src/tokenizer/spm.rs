//! SentencePiece BPE over scores, for vocabularies with `tokenizer.ggml.model = "llama"`.
//!
//! Written out rather than turned into merges for the `tokenizers` crate: there every pair needs a rank of its own,
//! while SentencePiece (`bpe_model.cc`) gives all splits of a piece the piece's score and takes the leftmost of equals.
//! The two differ on overlapping pairs such as `a`+`aa` and `aa`+`a`.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::trie::{Segment, SpellingTrie};
use super::TextPlace;

pub(crate) struct SentencePieceBpe {
    pieces: HashMap<Box<str>, Piece>,
    /// No pair longer than the longest piece is looked up, so a text of one endless word stays cheap.
    max_piece_bytes: usize,
    user_defined: SpellingTrie,
    byte_ids: Option<Box<[u32; 256]>>,
    unknown: Option<u32>,
    add_space_prefix: bool,
}

#[derive(Clone, Copy)]
struct Piece {
    id: u32,
    score: f32,
}

/// What a `SentencePieceBpe` is built from.
pub(crate) struct SentencePieceParts<'a> {
    /// Pieces that merges may produce.
    pub normal: Vec<(&'a str, u32, f32)>,
    pub user_defined: Vec<(&'a str, u32)>,
    /// `None` without a complete byte alphabet.
    pub byte_ids: Option<Box<[u32; 256]>>,
    pub unknown: Option<u32>,
    pub add_space_prefix: bool,
}

#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    /// In bytes; 0 once the symbol was merged into its left neighbour.
    len: usize,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl SentencePieceBpe {
    pub fn new(parts: SentencePieceParts<'_>) -> Self {
        let user_defined: Vec<(String, u32)> =
            parts.user_defined.iter().map(|&(text, id)| (text.replace(' ', "▁"), id)).collect();
        Self {
            max_piece_bytes: parts.normal.iter().map(|p| p.0.len()).max().unwrap_or(0),
            pieces: parts.normal.into_iter().map(|(text, id, score)| (Box::from(text), Piece { id, score })).collect(),
            user_defined: SpellingTrie::new(user_defined.iter().map(|(s, id)| (s.as_str(), *id))),
            byte_ids: parts.byte_ids,
            unknown: parts.unknown,
            add_space_prefix: parts.add_space_prefix,
        }
    }

    pub fn add_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Appends the ids of `text`. The space prefix is repeated after special tokens, as llama.cpp does.
    pub fn encode(&self, text: &str, place: TextPlace, ids: &mut Vec<u32>) {
        let has_prefix = self.add_space_prefix && place != TextPlace::Continuation;
        let prefix = if has_prefix { "▁" } else { "" };
        let normalized = format!("{prefix}{}", text.replace(' ', "▁"));
        for segment in self.user_defined.split(&normalized) {
            match segment {
                Segment::Token(id) => ids.push(id),
                Segment::Text(text) => self.encode_segment(text, ids),
            }
        }
    }

    fn encode_segment(&self, text: &str, ids: &mut Vec<u32>) {
        let mut symbols = characters(text);
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.consider(text, &symbols, right - 1, right, &mut queue);
        }
        while let Some(best) = queue.pop() {
            let (left, right) = (symbols[best.left], symbols[best.right]);
            let is_stale = left.len == 0 || right.len == 0 || left.len + right.len != best.len;
            if is_stale {
                continue;
            }
            symbols[best.left].len = best.len;
            symbols[best.left].next = right.next;
            symbols[best.right].len = 0;
            if right.next != NONE {
                symbols[right.next].prev = best.left;
                self.consider(text, &symbols, best.left, right.next, &mut queue);
            }
            if left.prev != NONE {
                self.consider(text, &symbols, left.prev, best.left, &mut queue);
            }
        }
        for symbol in symbols.iter().filter(|s| s.len > 0) {
            self.push_symbol(&text[symbol.start..symbol.start + symbol.len], ids);
        }
    }

    fn consider(&self, text: &str, symbols: &[Symbol], left: usize, right: usize, queue: &mut BinaryHeap<Candidate>) {
        let len = symbols[left].len + symbols[right].len;
        if len > self.max_piece_bytes {
            return;
        }
        let start = symbols[left].start;
        if let Some(piece) = self.pieces.get(&text[start..start + len]) {
            queue.push(Candidate { score: piece.score, left, right, len });
        }
    }

    fn push_symbol(&self, symbol: &str, ids: &mut Vec<u32>) {
        if let Some(piece) = self.pieces.get(symbol) {
            ids.push(piece.id);
        } else if let Some(byte_ids) = &self.byte_ids {
            ids.extend(symbol.bytes().map(|b| byte_ids[b as usize]));
        } else {
            ids.extend(self.unknown);
        }
    }
}

fn characters(text: &str) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
    for (index, (start, character)) in text.char_indices().enumerate() {
        symbols.push(Symbol { start, len: character.len_utf8(), prev: index.wrapping_sub(1), next: index + 1 });
    }
    if let Some(last) = symbols.last_mut() {
        last.next = NONE;
    }
    symbols
}

/// Highest score first, leftmost of equals. `total_cmp` keeps a file with NaN scores from breaking the order.
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}
