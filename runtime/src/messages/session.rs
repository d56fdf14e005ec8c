//! Messages between HTTP and sessions: one turn from its request to its last event.
//!
//! HTTP decodes wire formats into [`StartTurn`] and encodes [`TurnEvent`]s; it never sees the scheduler, tiers or tokens' K/V.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::Message;
use keepsake_model::chat::ChatMessage;
use keepsake_model::sampler::SamplingParams;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, OwnedSemaphorePermit};

/// Whose data this is. Conversations, turn ids and K/V never cross tenants.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(Arc<str>);

impl TenantId {
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// The tenant of a server without API keys.
    pub fn anonymous() -> Self {
        Self::new("anonymous")
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A turn's identity: 128 random bits, so that it cannot be guessed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnId(pub [u8; 16]);

impl TurnId {
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// Parses the 32 hexadecimal digits that [`fmt::Display`] prints; `None` for anything else.
    pub fn parse(hex: &str) -> Option<Self> {
        let digits = hex.as_bytes();
        if digits.len() != 32 {
            return None;
        }
        let mut id = [0; 16];
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| match c {
                b'0'..=b'9' => Some(c - b'0'),
                b'a'..=b'f' => Some(c - b'a' + 10),
                _ => None,
            };
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(id))
    }
}

impl fmt::Display for TurnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TurnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a turn appends to its conversation.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Chat messages, rendered by the model's chat template. With a parent: only the new ones.
    Messages(Vec<ChatMessage>),
    /// Raw text, tokenised as it is (`/v1/completions`).
    Text(String),
    /// Token ids as they are (`/v1/completions`); every id was checked against the vocabulary.
    Tokens(Vec<u32>),
}

/// Start one turn. Dropping the returned [`TurnStream`](crate::gateway::TurnStream) cancels it.
#[derive(Clone, Debug)]
pub struct StartTurn {
    pub tenant: TenantId,
    /// The turn to continue; `None` starts a conversation.
    pub parent: Option<TurnId>,
    /// System text for this turn; changing it from the parent's starts a new root (design: rebase).
    pub instructions: Option<String>,
    pub prompt: Prompt,
    pub sampling: SamplingParams,
    /// `None`: whatever the context leaves. More than that is clipped.
    pub max_output_tokens: Option<u32>,
    /// Stop strings; the text ends before the first of them.
    pub stop: Vec<String>,
    /// Keep the turn so that it can be continued and read by its id.
    pub store: bool,
    /// What HTTP wants back from [`StoredTurn::echo`]: the request's own fields. Opaque to sessions.
    pub echo: serde_json::Value,
}

/// What a running turn tells its client, in order: one `Started`, any number of `Delta`, then `Finished` or `Failed`.
#[derive(Clone, Debug)]
pub enum TurnEvent {
    /// Admitted: the prompt is being computed.
    Started,
    /// Text that is final: whole characters, never part of a stop string.
    Delta(String),
    Finished(Box<TurnOutcome>),
    Failed(TurnError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End-of-turn token, stop token or stop string.
    Stop,
    /// `max_output_tokens` or the context limit.
    Length,
}

/// A finished turn.
#[derive(Clone, Debug)]
pub struct TurnOutcome {
    pub text: String,
    pub finish_reason: FinishReason,
    pub usage: TurnUsage,
}

/// What a turn cost, in tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnUsage {
    /// Every token the reply was conditioned on: the whole conversation plus this turn's input.
    pub input_tokens: u32,
    /// Input tokens whose K/V was loaded or already on the device: not computed again.
    pub cached_tokens: u32,
    pub output_tokens: u32,
    /// Cached tokens by the tier that held them, in tier order: ("device", n), ("dram", n), ("rocks", n).
    pub cached_by_tier: Vec<(String, u32)>,
    /// Input tokens of earlier turns that were computed again because no tier held them.
    pub recomputed_tokens: u32,
    /// From the request's arrival at the session to its first sampled token.
    pub ttft: Duration,
}

/// A turn read back by its id.
#[derive(Clone, Debug)]
pub struct StoredTurn {
    pub id: TurnId,
    pub parent: Option<TurnId>,
    /// Unix seconds.
    pub created_at: u64,
    pub echo: serde_json::Value,
    pub outcome: TurnOutcome,
}

/// Why a turn could not start or go on; `http/error.rs` maps each to a status.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TurnError {
    /// Unknown, deleted, or another tenant's: indistinguishable on purpose.
    #[error("no response with id {0} exists")]
    NotFound(String),
    /// The parent was made with another model, tokenizer or template, or is not finished.
    #[error("{0}")]
    Conflict(String),
    #[error(
        "the prompt has {prompt_tokens} tokens but this server's limit is {limit} (model context and device pool)"
    )]
    ContextLengthExceeded { prompt_tokens: usize, limit: usize },
    /// The request itself is wrong; `param` names its field.
    #[error("{message}")]
    Invalid { message: String, param: Option<&'static str> },
    /// The queue is full: 429.
    #[error("too many requests are waiting; try again in {} s", .retry_after.as_secs())]
    Overloaded { retry_after: Duration },
    /// Stored turns cannot be written now: 503; `store=false` still works.
    #[error("turns cannot be stored now: {0}")]
    StoreUnavailable(String),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("{0}")]
    Internal(String),
}

/// Begin a turn in this session. The session answers once the turn is queued; its events go to `events`.
#[derive(Debug, Message)]
#[rtype(result = "Result<(), TurnError>")]
pub struct BeginTurn {
    pub id: TurnId,
    pub turn: StartTurn,
    /// Unix seconds.
    pub created_at: u64,
    pub arrived: Instant,
    /// Bounded by the tokens that the turn may sample.
    pub events: mpsc::UnboundedSender<TurnEvent>,
    /// Held until the turn has ended.
    pub permit: OwnedSemaphorePermit,
}

/// The client went away.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct CancelTurn(pub TurnId);

/// The shutdown's deadline has passed: running turns end with an error.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct CutTurns;

/// A client deleted a turn: it can no longer be continued or read.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct ForgetTurn(pub TurnId);
