//! Server-sent events, as they come.

use std::io::{BufRead, BufReader};

use anyhow::Context;
use serde_json::Value;
use ureq::BodyReader;

/// The events of one stream. Dropping it closes the connection.
pub struct Events {
    reader: BufReader<BodyReader<'static>>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The `event:` line, if there was one, and the parsed `data:`.
    Data(Option<String>, Value),
    /// `data: [DONE]`.
    Done,
}

impl Events {
    pub(crate) fn new(reader: BodyReader<'static>) -> Self {
        Self { reader: BufReader::new(reader) }
    }

    /// `None` at the orderly end of the body. A broken connection is an error.
    pub fn next_event(&mut self) -> anyhow::Result<Option<Event>> {
        let mut kind = None;
        let mut line = String::new();
        loop {
            line.clear();
            if self.reader.read_line(&mut line).context("the stream broke off")? == 0 {
                return Ok(None);
            }
            let line = line.trim_end_matches('\n');
            if let Some(name) = line.strip_prefix("event: ") {
                kind = Some(name.to_owned());
            } else if line == "data: [DONE]" {
                return Ok(Some(Event::Done));
            } else if let Some(data) = line.strip_prefix("data: ") {
                let data = serde_json::from_str(data).with_context(|| format!("data is not JSON: {data}"))?;
                return Ok(Some(Event::Data(kind, data)));
            } else {
                anyhow::ensure!(line.is_empty() || line.starts_with(':'), "not a line of an event stream: {line:?}");
            }
        }
    }
}
