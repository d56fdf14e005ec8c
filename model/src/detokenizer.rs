//! Tokens to text as they come, never half a character.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// Decodes one reply incrementally. The texts of all pushes and `finish`, put together, equal
/// [`Tokenizer::decode`] of all ids with special tokens skipped.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// Bytes of a character that is not complete yet: at most 3 after every push.
    pending: Vec<u8>,
    /// How many of `pending` came from the prompt: they may complete a character, but are never shown as a lost one.
    num_prompt_bytes: usize,
    /// The next piece begins a text: SentencePiece's space prefix is dropped.
    at_start: bool,
}

impl Detokenizer {
    /// `prompt_tail` is the end of what the reply continues, at least its last 4 tokens (fewer if it is shorter).
    pub fn new(tokenizer: Arc<Tokenizer>, prompt_tail: &[u32]) -> Self {
        let at_start = prompt_tail.last().is_none_or(|&id| tokenizer.is_special(id));
        let pending = unfinished_character(&tokenizer, prompt_tail);
        Self { tokenizer, num_prompt_bytes: pending.len(), pending, at_start }
    }

    /// The characters that `id` completes. Special tokens are empty.
    pub fn push(&mut self, id: u32) -> String {
        if self.tokenizer.is_special(id) {
            return String::new();
        }
        let mut piece = self.tokenizer.token_bytes(id);
        if std::mem::take(&mut self.at_start) {
            piece = self.tokenizer.without_space_prefix(piece);
        }
        self.pending.extend_from_slice(piece);
        self.take_whole_characters()
    }

    /// What is left: U+FFFD for a character that never became whole.
    pub fn finish(mut self) -> String {
        let reply_bytes = self.pending.split_off(self.num_prompt_bytes);
        String::from_utf8_lossy(&reply_bytes).into_owned()
    }

    /// Whether everything pushed so far has been shown.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.pending.is_empty()
    }

    fn take_whole_characters(&mut self) -> String {
        let mut text = String::new();
        let mut from = 0;
        loop {
            let (valid, broken) = match std::str::from_utf8(&self.pending[from..]) {
                Ok(valid) => (valid, None),
                Err(error) => {
                    let valid = &self.pending[from..from + error.valid_up_to()];
                    let valid = std::str::from_utf8(valid).expect("checked up to here");
                    (valid, error.error_len().or(Some(0)))
                }
            };
            text.push_str(valid);
            from += valid.len();
            match broken {
                None | Some(0) => break,
                Some(len) => {
                    // Bytes of the prompt that the reply did not complete are dropped, not shown.
                    if from + len > self.num_prompt_bytes {
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                    from += len;
                }
            }
        }
        self.pending.drain(..from);
        self.num_prompt_bytes = self.num_prompt_bytes.saturating_sub(from);
        text
    }
}

/// The bytes at the end of `ids` that begin a character without ending it.
fn unfinished_character(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u8> {
    // A token has at least one byte, so four tokens cover the longest character.
    let tail = &ids[ids.len().saturating_sub(4)..];
    let since_special = tail.iter().rposition(|&id| tokenizer.is_special(id)).map_or(0, |at| at + 1);
    let bytes: Vec<u8> =
        tail[since_special..].iter().flat_map(|&id| tokenizer.token_bytes(id).iter().copied()).collect();
    for len in (1..=bytes.len().min(3)).rev() {
        let end = &bytes[bytes.len() - len..];
        if let Err(error) = std::str::from_utf8(end) {
            if error.valid_up_to() == 0 && error.error_len().is_none() {
                return end.to_vec();
            }
        }
    }
    Vec::new()
}
