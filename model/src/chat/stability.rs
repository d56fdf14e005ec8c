//! Does a template append to what it rendered before?
//!
//! Tested with replies as opaque characters, because that is how replies enter the log: by their ids. A template that
//! strips reasoning from the text of old replies is stable in this sense, since no old reply is rendered again.

use super::{ChatError, ChatMessage, ChatTemplate};

/// Stands for a reply in probes; no probe text has it.
const SENTINEL: char = '\u{E000}';

/// How a template's renders of a growing conversation relate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stability {
    /// Each render begins with the one before it.
    Stable,
    /// All but a reasoning block or white space right before a reply, which the generation prompt writes and later
    /// renders leave out: deltas can be appended and the log keeps what it has, but a whole render differs there.
    OpensReply,
    /// Earlier text changes: every turn needs a rebase.
    Unstable(&'static str),
}

/// Where a render goes on after a reply.
pub(super) struct Continuation<'a> {
    pub stability: Stability,
    /// White space that the template puts between prompt and reply. In the log it is the reply's to begin with it.
    pub gap: &'a str,
    pub tail: &'a str,
}

/// Renders conversations of several turns and compares. Probes that the template refuses (no system role) are skipped.
pub(super) fn probe(template: &ChatTemplate) -> Result<Stability, ChatError> {
    let mut worst = Stability::Stable;
    for turns in probes() {
        match probe_conversation(template, &turns) {
            Ok(Stability::Stable) => {}
            Ok(Stability::OpensReply) => worst = Stability::OpensReply,
            Ok(unstable) => return Ok(unstable),
            Err(ChatError::NotPrefixStable(reason)) => return Ok(Stability::Unstable(reason)),
            Err(ChatError::Refused(_)) if turns[0][0].role == "system" => {}
            Err(error) => return Err(error),
        }
    }
    Ok(worst)
}

/// Whether the text of a reply's reasoning is still there a turn later.
pub(super) fn keeps_reasoning(template: &ChatTemplate) -> bool {
    let messages = [
        ChatMessage::new("user", "question"),
        ChatMessage::new("assistant", format!("<think>\n{SENTINEL}\n</think>\n\nanswer")),
        ChatMessage::new("user", "question"),
    ];
    template.render(&messages, true).is_ok_and(|text| text.contains(SENTINEL))
}

/// Splits a render at the reply: `before` is the prompt that the reply was generated from, `after` the render with the
/// sentinel for the reply and what follows it. The error says that nothing can be appended.
pub(super) fn continue_at<'a>(before: &str, after: &'a str, sentinel: char) -> Result<Continuation<'a>, ChatError> {
    let Some((head, tail)) = after.split_once(sentinel) else {
        return Err(ChatError::NotPrefixStable("it leaves replies out"));
    };
    if tail.contains(sentinel) {
        return Err(ChatError::NotPrefixStable("it repeats replies"));
    }
    let found = |stability, gap| Ok(Continuation { stability, gap, tail });
    if let Some(added) = head.strip_prefix(before) {
        if added.trim().is_empty() {
            return found(Stability::Stable, added);
        }
        if added.trim_start().starts_with("<think>") {
            return found(Stability::OpensReply, "");
        }
    }
    if let Some(removed) = before.strip_prefix(head) {
        if removed.trim().is_empty() || removed.trim_start().starts_with("<think>") {
            return found(Stability::OpensReply, "");
        }
    }
    Err(ChatError::NotPrefixStable("it changes what stands before a reply"))
}

/// The white space that the template puts between a prompt and its reply; empty where that cannot be told.
pub(super) fn reply_gap(template: &ChatTemplate) -> String {
    let question = ChatMessage::new("user", "question");
    let answer = ChatMessage::new("assistant", SENTINEL);
    let prompt = template.render(std::slice::from_ref(&question), true);
    let whole = template.render(&[question.clone(), answer, question], true);
    let (Ok(prompt), Ok(whole)) = (prompt, whole) else {
        return String::new();
    };
    continue_at(&prompt, &whole, SENTINEL).map(|found| found.gap.to_owned()).unwrap_or_default()
}

fn probe_conversation(template: &ChatTemplate, turns: &[Vec<ChatMessage>]) -> Result<Stability, ChatError> {
    let mut worst = Stability::Stable;
    let mut history: Vec<ChatMessage> = turns[0].clone();
    for (base, new) in turns.iter().zip(&turns[1..]) {
        let prompt = template.render(&history, true)?;
        history.push(ChatMessage::new("assistant", SENTINEL));
        history.extend_from_slice(new);
        let whole = template.render(&history, true)?;
        // Earlier replies hold the sentinel as well: both texts must agree up to the last one.
        let (whole_head, whole_tail) =
            whole.rsplit_once(SENTINEL).ok_or(ChatError::NotPrefixStable("it leaves replies out"))?;
        let before = prompt.replace(SENTINEL, "");
        let after = format!("{}{SENTINEL}{whole_tail}", whole_head.replace(SENTINEL, ""));
        let stability = continue_at(&before, &after, SENTINEL)?.stability;
        if stability != Stability::Stable {
            worst = stability;
        }
        if delta_text(template, base, new)? != whole_tail {
            return Ok(Stability::Unstable("what follows a reply depends on earlier turns"));
        }
    }
    Ok(worst)
}

fn delta_text(template: &ChatTemplate, base: &[ChatMessage], new: &[ChatMessage]) -> Result<String, ChatError> {
    let mut messages = base.to_vec();
    let before = template.render(&messages, true)?;
    messages.push(ChatMessage::new("assistant", SENTINEL));
    messages.extend_from_slice(new);
    let after = template.render(&messages, true)?;
    Ok(continue_at(&before, &after, SENTINEL)?.tail.to_owned())
}

fn probes() -> Vec<Vec<Vec<ChatMessage>>> {
    let user = |text: &str| ChatMessage::new("user", text);
    let system = |text: &str| ChatMessage::new("system", text);
    vec![
        vec![vec![user("One.")], vec![user("Two?")], vec![user("Three")], vec![user("Four")]],
        vec![vec![user(" a \n")], vec![user("\n\nb  ")], vec![user("c\t")]],
        vec![vec![user("<think>x</think>")], vec![user("")], vec![user("\u{301}é")]],
        vec![vec![system("Be kind."), user("One.")], vec![user("Two?")], vec![user("Three")]],
        vec![vec![system(" s \n"), user(" a ")], vec![user(" b ")], vec![user(" c ")]],
    ]
}
