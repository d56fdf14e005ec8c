//! Server-sent events: the data of each event of a stream, and what a `/v1/responses` event means to a chat.

use std::io::BufRead;

use serde_json::Value;

/// Iterates over the `data` of the events in a byte stream (WHATWG, "Server-sent events", section 9.2.6).
pub(super) struct EventData<R>(pub(super) R);

impl<R: BufRead> Iterator for EventData<R> {
    type Item = std::io::Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut data: Option<String> = None;
        let mut line = String::new();
        loop {
            line.clear();
            match self.0.read_line(&mut line) {
                // An event that the end of the stream cuts off is dropped.
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
            let line = line.trim_end_matches(['\n', '\r']);
            if line.is_empty() {
                if let Some(data) = data.take() {
                    return Some(Ok(data));
                }
            } else if let Some(rest) = line.strip_prefix("data:") {
                let rest = rest.strip_prefix(' ').unwrap_or(rest);
                match &mut data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(rest);
                    }
                    None => data = Some(rest.to_owned()),
                }
            }
        }
    }
}

/// An event of a streamed response, as far as a chat is concerned.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    Text(String),
    /// The response ended well; `is_cut` when a limit ended it.
    Finished {
        id: String,
        usage: Value,
        is_cut: bool,
    },
    Failed(String),
    Other,
}

impl Event {
    pub(super) fn parse(data: &str) -> Self {
        let Ok(mut event) = serde_json::from_str::<Value>(data) else {
            return Self::Failed("the server sent an event that is not JSON".to_owned());
        };
        let kind = event["type"].take();
        match kind.as_str() {
            Some("response.output_text.delta") => Self::Text(event["delta"].as_str().unwrap_or_default().to_owned()),
            Some(kind @ ("response.completed" | "response.incomplete")) => {
                let response = &mut event["response"];
                let id = response["id"].as_str().unwrap_or_default().to_owned();
                let usage = response["usage"].take();
                Self::Finished { id, usage, is_cut: kind == "response.incomplete" }
            }
            Some("response.failed") => Self::Failed(message(&event["response"]["error"])),
            // The message is at the top in OpenAI's streams, under `error` in those of others.
            Some("error") if event["message"].is_string() => Self::Failed(message(&event)),
            Some("error") => Self::Failed(message(&event["error"])),
            _ => Self::Other,
        }
    }
}

fn message(error: &Value) -> String {
    error["message"].as_str().unwrap_or("the server gave no reason").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn data(stream: &str) -> Vec<String> {
        EventData(stream.as_bytes()).map(|data| data.unwrap()).collect()
    }

    #[test]
    fn comments_names_and_line_ends_are_not_data() {
        let stream = ": ping\n\nevent: a\ndata: {\"x\":1}\n\ndata:two\r\ndata: lines\r\n\r\n";
        assert_eq!(data(stream), ["{\"x\":1}", "two\nlines"]);
    }

    #[test]
    fn an_event_that_is_cut_off_is_dropped() {
        assert_eq!(data("data: whole\n\ndata: ha"), ["whole"]);
        assert_eq!(data("data: whole\n\ndata: no blank line\n"), ["whole"]);
    }

    #[test]
    fn events_of_a_response() {
        let parse = |event: Value| Event::parse(&event.to_string());
        let delta = json!({"type": "response.output_text.delta", "delta": "hé"});
        assert_eq!(parse(delta), Event::Text("hé".into()));
        let end = |kind: &str| json!({"type": kind, "response": {"id": "resp_1", "usage": {"input_tokens": 3}}});
        let finished = |is_cut| Event::Finished { id: "resp_1".into(), usage: json!({"input_tokens": 3}), is_cut };
        assert_eq!(parse(end("response.completed")), finished(false));
        assert_eq!(parse(end("response.incomplete")), finished(true));
        let failed = json!({"type": "response.failed", "response": {"error": {"code": "x", "message": "disk full"}}});
        assert_eq!(parse(failed), Event::Failed("disk full".into()));
        assert_eq!(parse(json!({"type": "error", "message": "no"})), Event::Failed("no".into()));
        assert_eq!(parse(json!({"type": "error", "error": {"message": "no"}})), Event::Failed("no".into()));
        assert_eq!(parse(json!({"type": "response.created"})), Event::Other);
        assert!(matches!(Event::parse("[DONE]"), Event::Failed(_)));
    }
}
