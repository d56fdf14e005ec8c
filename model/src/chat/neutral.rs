//! Keeps what clients wrote from being read as control tokens.
//!
//! A marker character, one that occurs nowhere else, is put inside of every spelling of a control token in a message
//! before the template sees it. Rendered text is split at control tokens, which a marker prevents inside of messages,
//! and the markers are removed from the pieces before those are encoded. So message and template text are tokenised
//! together, as Hugging Face does, but only the template can spell a control token.
//!
//! A spelling may also come about where a message meets the template (`<|im_` and `start|>`): a message that ends with
//! the beginning of a spelling, or begins with the end of one, gets a marker at that edge. Edges are those of the text
//! without surrounding white space, since templates trim.

use std::collections::HashSet;

use serde_json::Value;

use crate::tokenizer::Tokenizer;

use super::{ChatError, ChatMessage};

/// Tags at which templates cut an assistant message into reasoning and answer: the cuts are edges too.
const REASONING_TAGS: [&str; 2] = ["<think>", "</think>"];

/// Characters of a Unicode private use area that none of the messages and not the template uses.
pub(super) fn unused_characters(
    template: &str,
    messages: &[&ChatMessage],
    count: usize,
) -> Result<Vec<char>, ChatError> {
    let is_private = |c: &char| matches!(c, '\u{E000}'..='\u{F8FF}' | '\u{F0000}'..='\u{FFFFD}');
    let mut used: HashSet<char> = template.chars().filter(is_private).collect();
    for message in messages {
        for_each_text(message, &mut |text| used.extend(text.chars().filter(is_private)));
    }
    let unused = ('\u{E000}'..='\u{F8FF}').chain('\u{F0000}'..='\u{FFFFD}').filter(|c| !used.contains(c));
    let unused: Vec<char> = unused.take(count).collect();
    if unused.len() < count {
        return Err(ChatError::Render("the messages use every private use character".into()));
    }
    Ok(unused)
}

/// The message with markers in all of its texts.
pub(super) fn neutralise(message: &ChatMessage, tokenizer: &Tokenizer, marker: char) -> ChatMessage {
    let mark = |text: &str| mark_text(text, tokenizer, marker);
    let content =
        if message.role == "assistant" { mark_between_tags(&message.content, &mark) } else { mark(&message.content) };
    ChatMessage {
        role: mark(&message.role),
        content,
        name: message.name.as_deref().map(mark),
        reasoning: message.reasoning.as_deref().map(|text| mark_between_tags(text, &mark)),
        tool_calls: message.tool_calls.as_ref().map(|value| map_strings(value, &mark)),
        tool_call_id: message.tool_call_id.as_deref().map(mark),
    }
}

fn mark_between_tags(text: &str, mark: &dyn Fn(&str) -> String) -> String {
    let next_tag = REASONING_TAGS.iter().filter_map(|tag| Some((text.find(tag)?, *tag))).min();
    let Some((at, tag)) = next_tag else {
        return mark(text);
    };
    let rest = mark_between_tags(&text[at + tag.len()..], mark);
    format!("{}{tag}{rest}", mark(&text[..at]))
}

fn mark_text(text: &str, tokenizer: &Tokenizer, marker: char) -> String {
    let mut marks = marks_inside(text, tokenizer);
    marks.extend(mark_at_start(text, tokenizer));
    marks.extend(mark_at_end(text, tokenizer));
    if marks.is_empty() {
        return text.to_owned();
    }
    marks.sort_unstable();
    marks.dedup();
    let mut marked = String::with_capacity(text.len() + marks.len() * marker.len_utf8());
    let mut from = 0;
    for at in marks {
        marked.push_str(&text[from..at]);
        marked.push(marker);
        from = at;
    }
    marked.push_str(&text[from..]);
    marked
}

/// After the first character of every spelling, also of those that overlap another.
fn marks_inside(text: &str, tokenizer: &Tokenizer) -> Vec<usize> {
    let spellings = tokenizer.special_spellings();
    text.char_indices()
        .filter(|(at, _)| spellings.longest_match(&text.as_bytes()[*at..]).is_some())
        .map(|(at, first)| at + first.len_utf8())
        .collect()
}

/// Before a text that begins with the end of a spelling.
fn mark_at_start(text: &str, tokenizer: &Tokenizer) -> Option<usize> {
    let start = text.len() - text.trim_start().len();
    tokenizer.special_tails().longest_match(&text.as_bytes()[start..])?;
    Some(start)
}

/// After a text that ends with the beginning of a spelling.
fn mark_at_end(text: &str, tokenizer: &Tokenizer) -> Option<usize> {
    let end = text.trim_end().len();
    let bytes = &text.as_bytes()[..end];
    let from = end.saturating_sub(tokenizer.longest_special());
    let spellings = tokenizer.special_spellings();
    (from..end).any(|at| spellings.is_proper_prefix(&bytes[at..])).then_some(end)
}

fn for_each_text(message: &ChatMessage, visit: &mut dyn FnMut(&str)) {
    visit(&message.role);
    visit(&message.content);
    let optional = [&message.name, &message.reasoning, &message.tool_call_id];
    optional.into_iter().flatten().for_each(|text| visit(text));
    if let Some(value) = &message.tool_calls {
        // Escapes inside of JSON strings do not hide private use characters: serde_json writes them as they are.
        visit(&value.to_string());
    }
}

fn map_strings(value: &Value, map: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(map(text)),
        Value::Array(items) => items.iter().map(|item| map_strings(item, map)).collect(),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(key, item)| (map(key), map_strings(item, map))).collect())
        }
        other => other.clone(),
    }
}
