//! A reply as it comes: tokens in, final text out, and at the end what of it the log keeps.

use std::sync::Arc;

use keepsake_model::chat::{close_reply, ReplyCut, ReplyEnd};
use keepsake_model::detokenizer::Detokenizer;
use keepsake_model::stop::StopMatcher;
use keepsake_model::tokenizer::Tokenizer;

use crate::core::FinishCause;
use crate::messages::session::FinishReason;

/// What one token changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyProgress {
    /// Final text: whole characters, no part of a stop string. May be empty.
    pub text: String,
    /// A stop string is complete: sampling can end.
    pub stopped: bool,
}

/// One running reply.
pub struct Reply {
    tokenizer: Arc<Tokenizer>,
    /// The last tokens of the prompt, in which a character may have begun.
    prompt_tail: Vec<u32>,
    tokens: Vec<u32>,
    text: String,
    detokenizer: Option<Detokenizer>,
    stops: Option<StopMatcher>,
    stopped: bool,
    /// Tokens that end the reply without being the model's end-of-turn.
    stop_tokens: Vec<u32>,
}

impl Reply {
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], stops: Vec<String>, stop_tokens: Vec<u32>) -> Self {
        let prompt_tail = prompt[prompt.len().saturating_sub(4)..].to_vec();
        let detokenizer = Detokenizer::new(Arc::clone(&tokenizer), &prompt_tail);
        Self {
            tokenizer,
            prompt_tail,
            tokens: Vec::new(),
            text: String::new(),
            detokenizer: Some(detokenizer),
            stops: Some(StopMatcher::new(stops)),
            stopped: false,
            stop_tokens,
        }
    }

    /// Takes the next sampled token. After a stop string nothing more is shown.
    pub fn push(&mut self, token: u32) -> ReplyProgress {
        if self.stopped {
            return ReplyProgress { text: String::new(), stopped: true };
        }
        self.tokens.push(token);
        let piece = match &mut self.detokenizer {
            Some(detokenizer) if !self.stop_tokens.contains(&token) => detokenizer.push(token),
            _ => String::new(),
        };
        let (text, stopped) = match &mut self.stops {
            Some(stops) => {
                let step = stops.push(&piece);
                (step.text, step.stopped)
            }
            None => (piece, false),
        };
        self.stopped = stopped;
        self.text.push_str(&text);
        ReplyProgress { text, stopped }
    }

    /// Ends the reply; returns the text that was held back until now.
    pub fn finish(&mut self) -> String {
        let rest = self.detokenizer.take().map(Detokenizer::finish).unwrap_or_default();
        let mut text = String::new();
        if let Some(mut stops) = self.stops.take().filter(|_| !self.stopped) {
            let step = stops.push(&rest);
            text = step.text;
            self.stopped = step.stopped;
            if !step.stopped {
                text.push_str(&stops.finish());
            }
        }
        self.text.push_str(&text);
        text
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// A stop string ended it.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// How it ended, for the client and for the log.
    pub fn end(&self, cause: FinishCause) -> (FinishReason, ReplyEnd) {
        if self.stopped {
            return (FinishReason::Stop, ReplyEnd::Stop);
        }
        match cause {
            FinishCause::Length => (FinishReason::Length, ReplyEnd::Length),
            FinishCause::Stopped => (FinishReason::Stop, ReplyEnd::Stop),
            FinishCause::EndToken => {
                let is_custom = self.tokens.last().is_some_and(|t| self.stop_tokens.contains(t));
                (FinishReason::Stop, if is_custom { ReplyEnd::Stop } else { ReplyEnd::EndOfTurn })
            }
        }
    }

    /// What the log keeps of the reply.
    pub fn cut(&self, end: ReplyEnd) -> ReplyCut {
        close_reply(&self.tokenizer, &self.prompt_tail, &self.tokens, end, self.text.len())
    }

    /// The kept tokens themselves.
    pub fn log(&self, cut: &ReplyCut) -> Vec<u32> {
        let kept = &self.tokens[..cut.num_kept];
        kept.iter().chain(&cut.extra).copied().collect()
    }
}
