//! Traces of conversations: JSON lines of `{"turns": [{"input": tokens, "output": tokens, "think_s": seconds}]}`.

use std::path::Path;

use anyhow::{bail, Context};
use serde::Deserialize;

/// Other keys of a line, such as its `id`, are of no use here.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Conversation {
    pub turns: Vec<TraceTurn>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TraceTurn {
    /// Tokens that the user adds.
    pub input: u32,
    /// Tokens of the reply.
    pub output: u32,
    /// Seconds between the reply before and this turn.
    pub think_s: f64,
}

pub fn read(file: &Path) -> anyhow::Result<Vec<Conversation>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("--trace {}", file.display()))?;
    parse(&text).with_context(|| format!("--trace {}", file.display()))
}

fn parse(text: &str) -> anyhow::Result<Vec<Conversation>> {
    let mut conversations = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let number = index + 1;
        let conversation: Conversation = serde_json::from_str(line).with_context(|| format!("line {number}"))?;
        for turn in &conversation.turns {
            // Far beyond any sane pause, and within what a `Duration` holds.
            if !(0.0..=1e9).contains(&turn.think_s) {
                bail!("line {number}: think_s = {}: must be 0 to 1e9", turn.think_s);
            }
            if turn.input == 0 || turn.output == 0 {
                bail!("line {number}: a turn needs at least one token of input and one of output");
            }
        }
        conversations.push(conversation);
    }
    if conversations.is_empty() {
        bail!("no conversations in it");
    }
    Ok(conversations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_chat_trace() {
        let text = r#"{"id": "c0", "turns": [{"input": 53, "output": 26, "think_s": 0.0}, {"input": 8, "output": 41, "think_s": 1.724}]}

{"id": "c1", "turns": []}
"#;
        let conversations = parse(text).unwrap();
        assert_eq!(conversations.len(), 2);
        assert_eq!(conversations[0].turns[1], TraceTurn { input: 8, output: 41, think_s: 1.724 });
        assert!(conversations[1].turns.is_empty());
    }

    #[test]
    fn what_cannot_be_played_names_its_line() {
        let refusal = |turn: &str| {
            let text = format!("{{\"turns\": []}}\n{{\"turns\": [{turn}]}}\n");
            format!("{:#}", parse(&text).unwrap_err())
        };
        assert!(refusal(r#"{"input": 1, "output": 1}"#).starts_with("line 2: missing field `think_s`"));
        assert!(refusal(r#"{"input": -1, "output": 1, "think_s": 0}"#).starts_with("line 2: invalid value"));
        assert!(refusal(r#"{"input": 0, "output": 1, "think_s": 0}"#).starts_with("line 2: a turn needs"));
        assert_eq!(refusal(r#"{"input": 1, "output": 1, "think_s": -1}"#), "line 2: think_s = -1: must be 0 to 1e9");
        assert_eq!(parse("\n").unwrap_err().to_string(), "no conversations in it");
    }
}
