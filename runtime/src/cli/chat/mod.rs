//! `keepsake chat`: a terminal chat against a running server, over `/v1/responses` and `previous_response_id`.
//!
//! Standard output is the conversation's replies and nothing else; the line after each turn and errors go to standard
//! error. Deliberately absent: any knowledge of the server beyond its HTTP API, and a history of inputs on disk.

mod client;
mod input;
mod interrupt;
mod sse;
mod usage;

use std::io::Write;

use anyhow::{bail, Context};
use clap::Args;

use client::{Client, Reply, Request};
use input::{Input, Line};
use interrupt::Interrupt;

#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Key of a tenant, if the server wants one; without it, $KEEPSAKE_API_KEY
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Model to ask for; without it, the one that is served
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Instructions for the whole conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
}

const HELP: &str = "/new starts a new conversation, /quit or Ctrl-D ends, Ctrl-C stops a reply; \
                    a message that begins with a slash is typed with a space before it";

pub(super) fn run(args: ChatArgs) -> anyhow::Result<()> {
    let api_key = args.api_key.or_else(|| std::env::var("KEEPSAKE_API_KEY").ok());
    let client = Client::new(&args.url, api_key.as_deref())?;
    // Asked even when a model is named: a server that is not there is best reported before the first message.
    let served = client.served_model()?;
    let model = args.model.unwrap_or(served);
    let mut input = Input::open()?;
    // With piped input Ctrl-C ends the process, as it does for any filter.
    let interrupt = match input.is_terminal() {
        true => Interrupt::watch()?,
        false => Interrupt::never(),
    };
    if input.is_terminal() {
        eprintln!("{model} at {}; {HELP}", args.url);
    }
    let mut conversation = Conversation { client, model, instructions: args.system, previous: None, interrupt };
    let mut num_failed = 0;
    while let Some(line) = input.next()? {
        match line {
            Line::Say(message) => num_failed += usize::from(!conversation.say(&message)?),
            Line::New => {
                conversation.previous = None;
                eprintln!("a new conversation");
            }
            Line::Help => eprintln!("{HELP}"),
            Line::Unknown(command) => eprintln!("error: no command {command}; {HELP}"),
            Line::Quit => break,
        }
    }
    // Whoever pipes input looks at the exit code, not at the screen.
    if num_failed > 0 && !input.is_terminal() {
        bail!("failed turns: {num_failed}");
    }
    Ok(())
}

struct Conversation {
    client: Client,
    model: String,
    instructions: Option<String>,
    /// The last turn that succeeded.
    previous: Option<String>,
    interrupt: Interrupt,
}

impl Conversation {
    /// Plays one turn; false when it failed, which leaves the conversation where it was. An error is one of this
    /// process' own output.
    fn say(&mut self, message: &str) -> anyhow::Result<bool> {
        let request = Request {
            model: &self.model,
            instructions: self.instructions.as_deref(),
            input: message,
            previous_response_id: self.previous.as_deref(),
        };
        self.interrupt.clear();
        let mut output = Output::default();
        let reply = self.client.respond(&request, &self.interrupt, |text| output.write(text));
        output.end_line()?;
        match reply {
            Ok(Reply { id, usage, is_cut }) => {
                self.previous = Some(id);
                let cut = if is_cut { " (cut off by the context limit)" } else { "" };
                eprintln!("[{usage}]{cut}");
                Ok(true)
            }
            Err(error) => {
                let is_of_previous = self.previous.is_some() && error.is_about_the_conversation();
                let hint = if is_of_previous { "; /new starts over" } else { "" };
                eprintln!("error: {error}{hint}");
                Ok(false)
            }
        }
    }
}

/// Standard output within one reply.
#[derive(Default)]
struct Output {
    has_open_line: bool,
    failed: Option<std::io::Error>,
}

impl Output {
    /// Returns whether more is wanted.
    fn write(&mut self, text: &str) -> bool {
        let text = printable(text);
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => {
                self.has_open_line = text.chars().last().map_or(self.has_open_line, |c| c != '\n');
                true
            }
            Err(error) => {
                self.failed = Some(error);
                false
            }
        }
    }

    fn end_line(mut self) -> anyhow::Result<()> {
        if self.has_open_line {
            self.write("\n");
        }
        self.failed.map_or(Ok(()), Err).context("cannot write the reply")
    }
}

/// Without control characters: a model's text must not steer the terminal.
fn printable(text: &str) -> String {
    let is_shown = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().filter(is_shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_cannot_steer_the_terminal() {
        assert_eq!(printable("a\x1b[31m\u{9b}b\r\n\tü"), "a[31mb\n\tü");
    }
}
