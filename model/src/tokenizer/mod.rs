//! Text to token ids and back.
//!
//! A [`Tokenizer`] is built from a GGUF file's vocabulary ([`GgufVocab`]), from a Hugging Face folder, or as a dummy for
//! models without one. Byte-level BPE and `tokenizer.json` run on the `tokenizers` crate; SentencePiece BPE over scores
//! is written out here (`spm`).
//!
//! Invariants: [`Tokenizer::encode`] never yields a control token, whatever the text spells; only
//! [`Tokenizer::encode_with_special`] does, and only template text may be given to it. Encoding is close to linear in
//! the length of the text. Nothing in a vocabulary makes encoding or decoding panic.
//!
//! May depend on `weights::gguf` for metadata, on nothing else of this crate. Deliberately absent: chat templates (`chat`), streaming
//! (`detokenizer`), truncation, padding, adding BOS (the prompt builder's).

mod error;
mod gguf;
mod hf;
mod metadata;
mod pieces;
mod pre;
mod special;
mod spm;
pub(crate) mod trie;

use std::collections::HashMap;

pub use error::TokenizerError;
pub use gguf::GgufVocab;

use pieces::Pieces;
use spm::SentencePieceBpe;
use trie::{Segment, SpellingTrie};

/// Encodes and decodes one vocabulary. Shared behind an `Arc`; every method takes `&self`.
pub struct Tokenizer {
    engine: Engine,
    pieces: Pieces,
    special: Vec<bool>,
    special_ids: HashMap<String, u32>,
    special_spellings: SpellingTrie,
    /// Every proper suffix of a control token's spelling.
    special_tails: SpellingTrie,
    longest_special: usize,
    strips: HashMap<u32, Strip>,
    bos: Option<u32>,
    eos: Option<u32>,
    eog: Vec<u32>,
    add_bos: bool,
    fingerprint: [u8; 32],
}

/// Where a text stands: SentencePiece vocabularies put a space before the first word of some texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextPlace {
    /// The beginning of everything.
    Start,
    AfterSpecial,
    /// Text goes on in the middle: no prefix.
    Continuation,
}

/// White space that a special token takes with it (`lstrip`, `rstrip` of `tokenizer.json`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strip {
    left: bool,
    right: bool,
}

enum Engine {
    Crate(Box<CrateEngine>),
    SentencePiece(Box<SentencePieceBpe>),
    /// Bytes are ids; see [`Tokenizer::dummy`].
    Bytes {
        vocab_size: u32,
    },
}

/// A pipeline of the `tokenizers` crate.
struct CrateEngine {
    pipeline: tokenizers::Tokenizer,
    /// For pipelines that put a space before a text.
    space: Option<SpacePrefix>,
}

struct SpacePrefix {
    /// The same pipeline without the space.
    bare: tokenizers::Tokenizer,
    /// Llama's "legacy" behaviour: the space also follows special tokens.
    after_special: bool,
}

/// Everything that the constructors find out.
struct TokenizerParts {
    engine: Engine,
    pieces: Pieces,
    special: Vec<bool>,
    /// Control tokens by spelling.
    special_texts: Vec<(String, u32)>,
    strips: HashMap<u32, Strip>,
    bos: Option<u32>,
    eos: Option<u32>,
    eog: Vec<u32>,
    add_bos: bool,
    fingerprint: [u8; 32],
}

impl Tokenizer {
    /// A tokenizer for models without a vocabulary: byte `b` is id `b`, and id `n` above 255 reads ` tn`.
    pub fn dummy(vocab_size: usize) -> Self {
        let vocab_size = u32::try_from(vocab_size.max(1)).unwrap_or(u32::MAX);
        let mut pieces = Pieces::default();
        for id in 0..vocab_size {
            match u8::try_from(id) {
                Ok(byte) => pieces.push(&[byte]),
                Err(_) => pieces.push(format!(" t{id}").as_bytes()),
            }
        }
        let mut hasher = blake3::Hasher::new_derive_key("keepsake tokenizer dummy 1");
        hasher.update(&vocab_size.to_le_bytes());
        Self::assemble(TokenizerParts {
            engine: Engine::Bytes { vocab_size },
            special: vec![false; pieces.len()],
            pieces,
            special_texts: Vec::new(),
            strips: HashMap::new(),
            bos: None,
            eos: None,
            eog: Vec::new(),
            add_bos: false,
            fingerprint: *hasher.finalize().as_bytes(),
        })
    }

    /// The ids of user text. What spells a control token stays text; added tokens that are not control tokens are
    /// matched, as Hugging Face and llama.cpp do. No BOS.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.encode_text(text, TextPlace::Start, &mut ids);
        ids
    }

    /// The ids of template text: spellings of control tokens become those tokens. No BOS beyond what the text spells.
    pub fn encode_with_special(&self, text: &str) -> Vec<u32> {
        self.encode_template(text, None, TextPlace::Start)
    }

    /// The ids of text that follows other text: no space prefix.
    pub fn encode_continuation(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.encode_text(text, TextPlace::Continuation, &mut ids);
        ids
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        let mut is_first = true;
        for &id in ids {
            if self.is_special(id) {
                if !skip_special {
                    bytes.extend_from_slice(self.token_bytes(id));
                    is_first = false;
                }
                continue;
            }
            let piece = self.token_bytes(id);
            bytes.extend_from_slice(if is_first { self.without_space_prefix(piece) } else { piece });
            is_first = false;
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that a token stands for; of a control token its spelling. Empty outside of the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The id of the control token spelled `text`.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.special_ids.get(text).copied()
    }

    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Tokens that end a generation, ascending.
    pub fn eog_ids(&self) -> &[u32] {
        &self.eog
    }

    /// Whether a prompt begins with BOS.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Bytes of the longest token: a text of n bytes has at least `n / longest` tokens.
    pub fn longest_token_bytes(&self) -> usize {
        (0..self.pieces.len() as u32).map(|id| self.pieces.get(id).len()).max().unwrap_or(1).max(1)
    }

    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Changes with everything that changes how text becomes ids or back.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// `encode_with_special` for a text that may hold `marker` characters: they keep what they stand in from being read
    /// as a special token and are gone from the result. `place` is where the text begins.
    pub(crate) fn encode_template(&self, text: &str, marker: Option<char>, place: TextPlace) -> Vec<u32> {
        let mut segments = self.special_spellings.split(text);
        self.strip_around_specials(&mut segments);
        let mut ids = Vec::new();
        let mut place = place;
        for segment in segments {
            match segment {
                Segment::Token(id) => {
                    ids.push(id);
                    place = TextPlace::AfterSpecial;
                }
                Segment::Text(text) => match marker {
                    Some(marker) => self.encode_text(&text.replace(marker, ""), place, &mut ids),
                    None => self.encode_text(text, place, &mut ids),
                },
            }
        }
        ids
    }

    /// Spellings of control tokens, for telling where a text begins or ends inside of one.
    pub(crate) fn special_spellings(&self) -> &SpellingTrie {
        &self.special_spellings
    }

    pub(crate) fn special_tails(&self) -> &SpellingTrie {
        &self.special_tails
    }

    /// Bytes of the longest control token's spelling.
    pub(crate) fn longest_special(&self) -> usize {
        self.longest_special
    }

    /// A first piece without the space that encoding put before it.
    pub(crate) fn without_space_prefix<'a>(&self, piece: &'a [u8]) -> &'a [u8] {
        let adds_space = match &self.engine {
            Engine::Crate(engine) => engine.space.is_some(),
            Engine::SentencePiece(model) => model.add_space_prefix(),
            Engine::Bytes { .. } => false,
        };
        match piece.strip_prefix(b" ") {
            Some(rest) if adds_space => rest,
            _ => piece,
        }
    }

    fn assemble(parts: TokenizerParts) -> Self {
        // A control token spelled with one character cannot be told from that character in user text: never parsed.
        let parsed: Vec<&(String, u32)> =
            parts.special_texts.iter().filter(|(text, _)| text.chars().count() > 1).collect();
        let tails =
            parsed.iter().flat_map(|(text, id)| text.char_indices().skip(1).map(|(start, _)| (&text[start..], *id)));
        Self {
            special_spellings: SpellingTrie::new(parsed.iter().map(|(text, id)| (text.as_str(), *id))),
            special_tails: SpellingTrie::new(tails),
            longest_special: parsed.iter().map(|(text, _)| text.len()).max().unwrap_or(0),
            engine: parts.engine,
            pieces: parts.pieces,
            special: parts.special,
            special_ids: parts.special_texts.into_iter().collect(),
            strips: parts.strips,
            bos: parts.bos,
            eos: parts.eos,
            eog: parts.eog,
            add_bos: parts.add_bos,
            fingerprint: parts.fingerprint,
        }
    }

    fn encode_text(&self, text: &str, place: TextPlace, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        match &self.engine {
            Engine::Crate(engine) => engine.encode(text, place, ids),
            Engine::SentencePiece(model) => model.encode(text, place, ids),
            Engine::Bytes { vocab_size } => ids.extend(text.bytes().map(|b| u32::from(b) % vocab_size)),
        }
    }

    fn strip_around_specials(&self, segments: &mut [Segment<'_>]) {
        if self.strips.is_empty() {
            return;
        }
        for at in 0..segments.len() {
            let Segment::Token(id) = segments[at] else {
                continue;
            };
            let Some(&strip) = self.strips.get(&id) else {
                continue;
            };
            if let (true, Some(Segment::Text(before))) = (strip.left && at > 0, segments.get_mut(at.wrapping_sub(1))) {
                *before = before.trim_end();
            }
            if let (true, Some(Segment::Text(after))) = (strip.right, segments.get_mut(at + 1)) {
                *after = after.trim_start();
            }
        }
    }
}

impl CrateEngine {
    fn new(mut pipeline: tokenizers::Tokenizer, space: Option<SpacePrefix>) -> Self {
        pipeline.set_encode_special_tokens(true);
        let space = space.map(|mut space| {
            space.bare.set_encode_special_tokens(true);
            space
        });
        Self { pipeline, space }
    }

    fn encode(&self, text: &str, place: TextPlace, ids: &mut Vec<u32>) {
        let pipeline = match (&self.space, place) {
            (None, _) | (Some(_), TextPlace::Start) => &self.pipeline,
            (Some(space), TextPlace::AfterSpecial) if space.after_special => &self.pipeline,
            (Some(space), _) => &space.bare,
        };
        // Fails only when a model lacks its own unknown token, which the constructors exclude.
        let encoding = pipeline.encode_fast(text, false).expect("encoding text with a checked vocabulary");
        ids.extend_from_slice(encoding.get_ids());
    }
}
