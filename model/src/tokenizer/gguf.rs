//! A tokenizer from the vocabulary that a GGUF file carries.

use std::collections::{HashMap, HashSet};

use tokenizers::models::bpe::{Vocab, BPE};
use tokenizers::AddedToken;

use super::pieces::{byte_token, PieceDecoder, PieceSpelling, Pieces};
use super::pre::PreTokenizer;
use super::special::{ends_generation, looks_special};
use super::spm::{SentencePieceBpe, SentencePieceParts};
use super::{CrateEngine, Engine, Tokenizer, TokenizerError, TokenizerParts};

/// The `tokenizer.ggml.*` keys of a GGUF file.
#[derive(Debug, Clone, Default)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
    pub model: String,
    /// `tokenizer.ggml.pre`: the pre-tokeniser of a byte-level vocabulary.
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`, one a token; empty means that all are normal.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`, one a token; SentencePiece only.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.merges`, `left right` in rank order; byte-level BPE only.
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unknown: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_space_prefix: Option<bool>,
}

/// `llama_token_type` of GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    fn from_gguf(value: i32) -> Result<Self, TokenizerError> {
        Ok(match value {
            0 | 1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            other => {
                let message = format!("tokenizer.ggml.token_type holds {other}, types are 1 to 6");
                return Err(TokenizerError::BadVocabulary(message));
            }
        })
    }
}

impl Tokenizer {
    /// Builds a tokenizer from its parts; every inconsistency is an error, none a panic.
    pub fn from_vocab(vocab: &GgufVocab) -> Result<Self, TokenizerError> {
        check_sizes(vocab)?;
        let types = token_types(vocab)?;
        let (engine, spelling, default_add_bos) = match vocab.model.as_str() {
            "gpt2" => {
                let (engine, add_bos) = byte_level(vocab, &types)?;
                (engine, PieceSpelling::ByteLevel, add_bos)
            }
            "llama" => (sentence_piece(vocab, &types)?, PieceSpelling::SentencePiece, true),
            other => return Err(TokenizerError::UnsupportedModel(other.to_owned())),
        };
        let is_special = |t: &TokenType| matches!(t, TokenType::Control | TokenType::Unknown);
        Ok(Tokenizer::assemble(TokenizerParts {
            engine,
            pieces: decode_pieces(vocab, &types, spelling),
            special: types.iter().map(is_special).collect(),
            special_texts: texts_of(vocab, &types, TokenType::Control),
            strips: HashMap::new(),
            bos: vocab.bos,
            eos: vocab.eos,
            eog: end_of_generation(vocab, &types),
            add_bos: vocab.bos.is_some() && vocab.add_bos.unwrap_or(default_add_bos),
            fingerprint: fingerprint(vocab),
        }))
    }
}

fn check_sizes(vocab: &GgufVocab) -> Result<(), TokenizerError> {
    let bad = |message: String| Err(TokenizerError::BadVocabulary(message));
    let num_tokens = vocab.tokens.len();
    if num_tokens == 0 {
        return bad("tokenizer.ggml.tokens is empty".into());
    }
    for (key, len) in [("token_type", vocab.token_types.len()), ("scores", vocab.scores.len())] {
        if len != 0 && len != num_tokens {
            return bad(format!("tokenizer.ggml.{key} has {len} entries for {num_tokens} tokens"));
        }
    }
    if vocab.model == "llama" && vocab.scores.is_empty() {
        return bad("tokenizer.ggml.scores is missing".into());
    }
    let ids = [
        ("bos_token_id", vocab.bos),
        ("eos_token_id", vocab.eos),
        ("eot_token_id", vocab.eot),
        ("eom_token_id", vocab.eom),
        ("unknown_token_id", vocab.unknown),
    ];
    for (key, id) in ids {
        if let Some(id) = id.filter(|&id| id as usize >= num_tokens) {
            return bad(format!("tokenizer.ggml.{key} = {id}: the vocabulary has {num_tokens} tokens"));
        }
    }
    Ok(())
}

/// The file's types, corrected where a file marks a turn boundary or its own BOS or EOS as ordinary text.
fn token_types(vocab: &GgufVocab) -> Result<Vec<TokenType>, TokenizerError> {
    let mut types = Vec::with_capacity(vocab.tokens.len());
    for (id, text) in vocab.tokens.iter().enumerate() {
        let stated = vocab.token_types.get(id).copied().unwrap_or(1);
        let mut kind = TokenType::from_gguf(stated)?;
        let is_boundary = [vocab.bos, vocab.eos, vocab.eot, vocab.eom].contains(&Some(id as u32));
        let is_added = kind == TokenType::UserDefined && looks_special(text);
        if is_boundary || is_added || ends_generation(text) {
            kind = TokenType::Control;
        }
        types.push(kind);
    }
    Ok(types)
}

fn byte_level(vocab: &GgufVocab, types: &[TokenType]) -> Result<(Engine, bool), TokenizerError> {
    let pre = PreTokenizer::by_name(vocab.pre.as_deref().unwrap_or("default"))?;
    // Control tokens are reached through their spelling in template text only, so the model never sees them.
    let model_vocab: Vocab = vocab
        .tokens
        .iter()
        .zip(types)
        .enumerate()
        .filter(|(_, (_, kind))| matches!(kind, TokenType::Normal | TokenType::UserDefined))
        .map(|(id, (text, _))| (text.clone(), id as u32))
        .collect();
    let unreachable: HashSet<&str> = vocab
        .tokens
        .iter()
        .zip(types)
        .filter(|(_, kind)| !matches!(kind, TokenType::Normal | TokenType::UserDefined))
        .map(|(text, _)| text.as_str())
        .collect();
    let mut merges = Vec::with_capacity(vocab.merges.len());
    for (rank, merge) in vocab.merges.iter().enumerate() {
        let Some((left, right)) = merge.split_once(' ') else {
            let message = format!("tokenizer.ggml.merges[{rank}] = {merge:?}: no space");
            return Err(TokenizerError::BadVocabulary(message));
        };
        // As in llama.cpp, merges of tokens that text never becomes (control, unused) are left out.
        let is_reachable = [left, right].iter().all(|part| !unreachable.contains(part));
        if is_reachable && !unreachable.contains(format!("{left}{right}").as_str()) {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    let bpe = BPE::builder()
        .vocab_and_merges(model_vocab, merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(TokenizerError::Library)?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(pre.splits));
    let user_defined: Vec<AddedToken> = texts_of(vocab, types, TokenType::UserDefined)
        .into_iter()
        .map(|(text, _)| AddedToken::from(text, false).normalized(false))
        .collect();
    tokenizer.add_tokens(&user_defined);
    Ok((Engine::Crate(Box::new(CrateEngine::new(tokenizer, None))), pre.add_bos))
}

fn sentence_piece(vocab: &GgufVocab, types: &[TokenType]) -> Result<Engine, TokenizerError> {
    let mut normal = Vec::with_capacity(vocab.tokens.len());
    let mut bytes = [None; 256];
    for (id, (text, kind)) in vocab.tokens.iter().zip(types).enumerate() {
        match kind {
            TokenType::Normal => normal.push((text.as_str(), id as u32, vocab.scores[id])),
            TokenType::Byte => {
                let Some(byte) = byte_token(text) else {
                    let message = format!("token {id} is a byte token spelled {text:?}");
                    return Err(TokenizerError::BadVocabulary(message));
                };
                bytes[byte as usize] = Some(id as u32);
            }
            TokenType::UserDefined | TokenType::Control | TokenType::Unknown | TokenType::Unused => {}
        }
    }
    let byte_ids: Option<Vec<u32>> = bytes.into_iter().collect();
    let user_defined = texts_of(vocab, types, TokenType::UserDefined);
    let model = SentencePieceBpe::new(SentencePieceParts {
        normal,
        user_defined: user_defined.iter().map(|(text, id)| (text.as_str(), *id)).collect(),
        byte_ids: byte_ids.map(|ids| {
            let ids: [u32; 256] = ids.try_into().expect("collected from 256 entries");
            Box::new(ids)
        }),
        unknown: vocab.unknown,
        add_space_prefix: vocab.add_space_prefix.unwrap_or(true),
    });
    Ok(Engine::SentencePiece(Box::new(model)))
}

fn texts_of(vocab: &GgufVocab, types: &[TokenType], kind: TokenType) -> Vec<(String, u32)> {
    vocab
        .tokens
        .iter()
        .zip(types)
        .enumerate()
        .filter(|(_, (_, t))| **t == kind)
        .map(|(id, (text, _))| (text.clone(), id as u32))
        .collect()
}

fn decode_pieces(vocab: &GgufVocab, types: &[TokenType], spelling: PieceSpelling) -> Pieces {
    let decoder = PieceDecoder::new(spelling);
    let mut pieces = Pieces::default();
    for (text, kind) in vocab.tokens.iter().zip(types) {
        match kind {
            TokenType::Control | TokenType::Unknown => pieces.push(text.as_bytes()),
            // Added to a byte-level vocabulary as plain text, not in the byte alphabet.
            TokenType::UserDefined if spelling == PieceSpelling::ByteLevel => pieces.push(text.as_bytes()),
            _ => pieces.push(&decoder.decode(text)),
        }
    }
    pieces
}

fn end_of_generation(vocab: &GgufVocab, types: &[TokenType]) -> Vec<u32> {
    let named = [vocab.eos, vocab.eot, vocab.eom].into_iter().flatten();
    let by_text = texts_of(vocab, types, TokenType::Control)
        .into_iter()
        .filter(|(text, _)| ends_generation(text))
        .map(|(_, id)| id);
    let mut ids: Vec<u32> = named.chain(by_text).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Every field with its length, so that no two vocabularies hash the same bytes.
fn fingerprint(vocab: &GgufVocab) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("keepsake tokenizer gguf 1");
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(vocab.model.as_bytes());
    field(vocab.pre.as_deref().unwrap_or("").as_bytes());
    field(&(vocab.tokens.len() as u64).to_le_bytes());
    vocab.tokens.iter().for_each(|token| field(token.as_bytes()));
    vocab.token_types.iter().for_each(|t| field(&t.to_le_bytes()));
    field(b"scores");
    vocab.scores.iter().for_each(|s| field(&s.to_bits().to_le_bytes()));
    field(b"merges");
    vocab.merges.iter().for_each(|merge| field(merge.as_bytes()));
    let flags = format!(
        "{:?}",
        (vocab.bos, vocab.eos, vocab.eot, vocab.eom, vocab.unknown, vocab.add_bos, vocab.add_space_prefix)
    );
    field(flags.as_bytes());
    *hasher.finalize().as_bytes()
}
