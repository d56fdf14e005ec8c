//! The bytes that each token of a vocabulary stands for.

use std::collections::HashMap;

/// How a vocabulary spells bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceSpelling {
    /// GPT-2's byte-level alphabet: every byte is one printable character.
    ByteLevel,
    /// SentencePiece: text, with `▁` for a space and `<0xNN>` for single bytes.
    SentencePiece,
}

/// Token bytes in one arena: a vocabulary has up to a quarter of a million entries.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Pieces {
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        let end = u32::try_from(self.bytes.len()).expect("token texts are far below 4 GiB");
        self.ends.push(end);
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Empty for an id outside of the vocabulary.
    pub fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

/// Decodes vocabulary spellings into bytes.
pub(crate) struct PieceDecoder {
    spelling: PieceSpelling,
    byte_of_char: HashMap<char, u8>,
}

impl PieceDecoder {
    pub fn new(spelling: PieceSpelling) -> Self {
        let byte_of_char = (0..=255).map(|b| (byte_level_char(b), b)).collect();
        Self { spelling, byte_of_char }
    }

    pub fn decode(&self, piece: &str) -> Vec<u8> {
        match self.spelling {
            PieceSpelling::ByteLevel => {
                let bytes: Option<Vec<u8>> = piece.chars().map(|c| self.byte_of_char.get(&c).copied()).collect();
                // A character outside of the alphabet: the token is spelled literally.
                bytes.unwrap_or_else(|| piece.as_bytes().to_vec())
            }
            PieceSpelling::SentencePiece => match byte_token(piece) {
                Some(byte) => vec![byte],
                None => piece.replace('▁', " ").into_bytes(),
            },
        }
    }
}

/// The value of a SentencePiece byte token, `<0x0A>`.
pub(crate) fn byte_token(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

/// GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100.
pub(crate) fn byte_level_char(byte: u8) -> char {
    fn is_printable(byte: u8) -> bool {
        matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
    }
    if is_printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !is_printable(b)).count() as u32;
    char::from_u32(0x100 + rank).expect("68 code points from U+0100 are characters")
}
