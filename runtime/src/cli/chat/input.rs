//! What the user types or pipes in, a line at a time.

use std::io::{IsTerminal, Lines, StdinLock};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::DefaultEditor;

const PROMPT: &str = "> ";

pub(super) enum Input {
    Terminal(Box<DefaultEditor>),
    /// No prompt, no editing.
    Piped(Lines<StdinLock<'static>>),
}

/// One line that means something.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Say(String),
    New,
    Help,
    Quit,
    Unknown(String),
}

impl Input {
    pub(super) fn open() -> anyhow::Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Ok(Self::Piped(std::io::stdin().lines()));
        }
        let editor = DefaultEditor::new().context("cannot use this terminal")?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// The next line that is not empty; `None` at the end of input.
    pub(super) fn next(&mut self) -> anyhow::Result<Option<Line>> {
        loop {
            let Some(line) = self.read()? else {
                return Ok(None);
            };
            if let Some(line) = Line::parse(&line) {
                return Ok(Some(line));
            }
        }
    }

    fn read(&mut self) -> anyhow::Result<Option<String>> {
        match self {
            Self::Piped(lines) => lines.next().transpose().context("cannot read the input"),
            Self::Terminal(editor) => match editor.readline(PROMPT) {
                Ok(line) => {
                    // Without its history a line can still be sent.
                    let _ = editor.add_history_entry(&line);
                    Ok(Some(line))
                }
                Err(ReadlineError::Eof) => Ok(None),
                // Ctrl-C gives up the line, as in a shell.
                Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                Err(error) => Err(error).context("cannot read from the terminal"),
            },
        }
    }
}

impl Line {
    /// `None` for a blank line.
    fn parse(line: &str) -> Option<Self> {
        let trimmed = line.trim();
        if trimmed.is_empty() {
            return None;
        }
        if !line.starts_with('/') {
            return Some(Self::Say(trimmed.to_owned()));
        }
        Some(match trimmed {
            "/new" => Self::New,
            "/help" => Self::Help,
            "/quit" | "/exit" => Self::Quit,
            _ => {
                let command = trimmed.split_whitespace().next().unwrap_or(trimmed);
                Self::Unknown(command.to_owned())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_messages_and_blank_lines() {
        assert_eq!(Line::parse("  \t"), None);
        assert_eq!(Line::parse("/new "), Some(Line::New));
        assert_eq!(Line::parse("/quit"), Some(Line::Quit));
        assert_eq!(Line::parse("/help"), Some(Line::Help));
        assert_eq!(Line::parse("/new one"), Some(Line::Unknown("/new".into())));
        assert_eq!(Line::parse(" /etc is a folder"), Some(Line::Say("/etc is a folder".into())));
        assert_eq!(Line::parse("is 1/2 one half? "), Some(Line::Say("is 1/2 one half?".into())));
    }
}
