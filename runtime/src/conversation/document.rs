//! What a turn leaves behind beside its tokens: `TurnRecord::items`, as JSON.

use keepsake_model::chat::ChatMessage;
use keepsake_tiers::TurnRecord;
use serde::{Deserialize, Serialize};

use crate::messages::session::{FinishReason, StoredTurn, TurnError, TurnId, TurnOutcome, TurnUsage};

/// How a turn's input reached the log; a conversation stays of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Messages, rendered by the chat template.
    Chat,
    /// Text or token ids as they are.
    Raw,
}

/// A finished turn without its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnDocument {
    pub kind: Kind,
    /// The turn it continues, also when it is a new root of the token log.
    pub parent: Option<String>,
    /// This turn's input; a new root holds the whole conversation up to it.
    pub messages: Vec<ChatMessage>,
    /// Turns before it were deleted while it ran: `messages` does not reach back to the beginning.
    #[serde(default)]
    pub is_cut: bool,
    /// The system text in force, rendered before `messages` at a root.
    pub instructions: Option<String>,
    /// The reply as the client saw it.
    pub text: String,
    /// Where the reply begins in the record's tokens.
    pub num_prompt: usize,
    /// The log ends with the model's end-of-turn token.
    pub ends_with_eot: bool,
    pub finish_reason: FinishReason,
    pub usage: TurnUsage,
    /// What HTTP wants back, as it gave it.
    pub echo: serde_json::Value,
}

/// A turn as its session holds it.
#[derive(Clone, Debug)]
pub struct Node {
    pub record: TurnRecord,
    /// `None`: a tombstone, of which only the tokens are left.
    pub document: Option<TurnDocument>,
}

impl Node {
    /// Reads a record back.
    pub fn from_record(mut record: TurnRecord) -> Result<Self, TurnError> {
        let items = std::mem::take(&mut record.items);
        let document = match items.as_slice() {
            [] => None,
            json => Some(serde_json::from_slice(json).map_err(|error| {
                TurnError::Internal(format!("the stored turn {} cannot be read: {error}", TurnId(record.id)))
            })?),
        };
        Ok(Self { record, document })
    }

    pub fn id(&self) -> TurnId {
        TurnId(self.record.id)
    }

    /// The reply's own tokens, end-of-turn included.
    pub fn reply_tokens(&self) -> &[u32] {
        let from = self.document.as_ref().map_or(0, |d| d.num_prompt);
        &self.record.tokens[from.min(self.record.tokens.len())..]
    }

    /// The turn with the tokens before it as its own: what is left when its parent was deleted.
    pub fn into_root(mut self, past: &[u32]) -> Self {
        self.record.parent = None;
        self.record.tokens.splice(0..0, past.iter().copied());
        if let Some(document) = &mut self.document {
            document.num_prompt += past.len();
            document.is_cut = true;
            self.record.items = serde_json::to_vec(document).expect("a document has string keys only");
        }
        self
    }

    /// What a client reads back; `None` for a tombstone.
    pub fn to_stored(&self) -> Option<StoredTurn> {
        let document = self.document.as_ref()?;
        Some(StoredTurn {
            id: self.id(),
            parent: document.parent.as_deref().and_then(TurnId::parse),
            created_at: self.record.created_at,
            echo: document.echo.clone(),
            outcome: TurnOutcome {
                text: document.text.clone(),
                finish_reason: document.finish_reason,
                usage: document.usage.clone(),
            },
        })
    }
}
