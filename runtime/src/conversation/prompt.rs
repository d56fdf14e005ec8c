//! From a request to the tokens that it appends.

use keepsake_model::chat::{ChatError, ChatMessage, ChatTemplate, Reply};
use keepsake_model::tokenizer::Tokenizer;

use super::document::{Kind, Node};
use crate::messages::session::{Prompt, TurnError};

/// A turn's input, as tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptTokens {
    pub kind: Kind,
    /// The log up to and with the parent's reply; empty at a root.
    pub past: Vec<u32>,
    /// What this turn adds: never empty.
    pub appended: Vec<u32>,
    /// Items to keep: this turn's, or the whole conversation's at a new root.
    pub messages: Vec<ChatMessage>,
    /// The conversation was rendered anew, so the turn has no parent in the token log.
    pub rebased: bool,
}

/// Builds the prompt of a turn that continues `path` (root to parent; empty for a new conversation).
pub fn build(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    path: &[Node],
    instructions: Option<&str>,
    prompt: &Prompt,
) -> Result<PromptTokens, TurnError> {
    let built = match prompt {
        Prompt::Messages(new) => match path.split_last() {
            None => root(tokenizer, template, instructions, new),
            Some((parent, _)) => continued(tokenizer, template, path, parent, instructions, new),
        },
        Prompt::Text(text) => Ok(raw(path, with_bos(tokenizer, path.is_empty(), tokenizer.encode(text)))),
        Prompt::Tokens(tokens) => Ok(raw(path, tokens.clone())),
    }?;
    if built.appended.is_empty() {
        return Err(TurnError::Invalid { message: "the prompt has no tokens".to_owned(), param: None });
    }
    Ok(built)
}

fn raw(path: &[Node], appended: Vec<u32>) -> PromptTokens {
    PromptTokens { kind: Kind::Raw, past: log_of(path), appended, messages: Vec::new(), rebased: false }
}

fn with_bos(tokenizer: &Tokenizer, is_start: bool, tokens: Vec<u32>) -> Vec<u32> {
    let bos = tokenizer.bos().filter(|_| is_start && tokenizer.add_bos());
    bos.into_iter().chain(tokens).collect()
}

fn root(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    instructions: Option<&str>,
    new: &[ChatMessage],
) -> Result<PromptTokens, TurnError> {
    let items = with_system(instructions, new);
    let appended = template.prompt_tokens(tokenizer, &items, true).map_err(refused)?;
    Ok(PromptTokens { kind: Kind::Chat, past: Vec::new(), appended, messages: new.to_vec(), rebased: false })
}

fn continued(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    path: &[Node],
    parent: &Node,
    instructions: Option<&str>,
    new: &[ChatMessage],
) -> Result<PromptTokens, TurnError> {
    let Some(document) = parent.document.as_ref().filter(|d| d.kind == Kind::Chat) else {
        return Err(TurnError::Conflict("the previous response was not made from messages".to_owned()));
    };
    let is_unchanged = document.instructions.as_deref() == instructions;
    if !is_unchanged || !template.can_append() {
        return rebase(tokenizer, template, path, instructions, new);
    }
    let is_root = parent.record.parent.is_none();
    let system = document.instructions.as_deref().filter(|_| is_root);
    let base = with_system(system, &document.messages);
    let appended = match template.delta_tokens(tokenizer, &base, document.ends_with_eot, new) {
        Ok(appended) => appended,
        // Stable in general, but not for these messages.
        Err(ChatError::NotPrefixStable(_)) => return rebase(tokenizer, template, path, instructions, new),
        Err(error) => return Err(refused(error)),
    };
    Ok(PromptTokens { kind: Kind::Chat, past: log_of(path), appended, messages: new.to_vec(), rebased: false })
}

/// Renders the whole conversation again, each reply as the ids that were sampled.
fn rebase(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    path: &[Node],
    instructions: Option<&str>,
    new: &[ChatMessage],
) -> Result<PromptTokens, TurnError> {
    let mut history: Vec<ChatMessage> = Vec::new();
    let mut replies: Vec<(usize, &[u32])> = Vec::new();
    for node in path {
        let Some(document) = node.document.as_ref().filter(|d| !d.is_cut) else {
            let message = "the conversation must be rendered anew, but one of its turns was deleted".to_owned();
            return Err(TurnError::Conflict(message));
        };
        history.extend_from_slice(&document.messages);
        replies.push((history.len(), node.reply_tokens()));
        history.push(ChatMessage::new("assistant", document.text.clone()));
    }
    history.extend_from_slice(new);
    let items = with_system(instructions, &history);
    let shift = items.len() - history.len();
    let replies: Vec<Reply> = replies.iter().map(|(message, ids)| Reply { message: message + shift, ids }).collect();
    let appended = template.rebase_tokens(tokenizer, &items, &replies).map_err(refused)?;
    Ok(PromptTokens { kind: Kind::Chat, past: Vec::new(), appended, messages: history, rebased: true })
}

fn with_system(instructions: Option<&str>, messages: &[ChatMessage]) -> Vec<ChatMessage> {
    let system = instructions.map(|text| ChatMessage::new("system", text));
    system.into_iter().chain(messages.iter().cloned()).collect()
}

fn log_of(path: &[Node]) -> Vec<u32> {
    path.iter().flat_map(|node| node.record.tokens.iter().copied()).collect()
}

/// What a template will not render is the request's fault.
fn refused(error: ChatError) -> TurnError {
    TurnError::Invalid { message: error.to_string(), param: Some("messages") }
}
