//! How a reply ends, and what that leaves in the token log (design.md section 4).

use std::sync::Arc;

use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;

/// Why no more tokens came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyEnd {
    /// The model emitted an end-of-generation token. It is the log's last token and has no K/V row yet; the next delta
    /// begins after it.
    EndOfTurn,
    /// A limit. The last token stays, the next delta supplies the end-of-turn.
    Length,
    /// A stop string or a custom stop token. The log is cut to what the client saw, then as [`ReplyEnd::Length`].
    Stop,
}

/// Where the log of a reply is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyCut {
    /// So many of the reply's tokens stay.
    pub num_kept: usize,
    /// Appended to them: visible text that ends inside of the next token, encoded again.
    pub extra: Vec<u32>,
}

impl ReplyEnd {
    /// The `ends_with_eot` of the next [`delta_tokens`](super::ChatTemplate::delta_tokens).
    pub fn leaves_end_of_turn(self) -> bool {
        self == Self::EndOfTurn
    }
}

/// What the log keeps of a reply that ended with `end`, the client having seen `visible_bytes` bytes of its text.
pub fn close_reply(
    tokenizer: &Arc<Tokenizer>,
    prompt_tail: &[u32],
    reply: &[u32],
    end: ReplyEnd,
    visible_bytes: usize,
) -> ReplyCut {
    match end {
        ReplyEnd::EndOfTurn | ReplyEnd::Length => ReplyCut { num_kept: reply.len(), extra: Vec::new() },
        ReplyEnd::Stop => cut_at_text(tokenizer, prompt_tail, reply, visible_bytes),
    }
}

/// Cuts a reply to the last token wholly inside of its first `visible_bytes` bytes of text, as [`Detokenizer`] gives it.
///
/// The fewest tokens that show the text are kept, so a stop token without text of its own is cut off.
pub fn cut_at_text(tokenizer: &Arc<Tokenizer>, prompt_tail: &[u32], reply: &[u32], visible_bytes: usize) -> ReplyCut {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), prompt_tail);
    let mut text = String::new();
    let (mut num_kept, mut kept_bytes) = (0, 0);
    for (index, &id) in reply.iter().enumerate() {
        if text.len() >= visible_bytes {
            break;
        }
        text.push_str(&detokenizer.push(id));
        if text.len() <= visible_bytes && detokenizer.is_at_boundary() {
            (num_kept, kept_bytes) = (index + 1, text.len());
        }
    }
    let end = (0..=visible_bytes.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let rest = text.get(kept_bytes..end).unwrap_or("");
    ReplyCut { num_kept, extra: tokenizer.encode_continuation(rest) }
}
