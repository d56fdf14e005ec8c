//! The chunks of a streamed text completion: text, finish, usage if asked for, `[DONE]`.

use openai_protocol::completion::{CompletionStreamChoice, CompletionStreamResponse};
use serde_json::json;

use super::Completion;
use crate::http::error::ApiError;
use crate::http::generation::finish_reason;
use crate::http::sse::{push_frame, Encoder};
use crate::http::usage;
use crate::messages::session::{FinishReason, TurnEvent};

pub(super) struct CompletionEncoder {
    completion: Completion,
    include_usage: bool,
}

impl CompletionEncoder {
    pub(super) fn new(completion: Completion, include_usage: bool) -> Self {
        Self { completion, include_usage }
    }

    fn chunk(&self, choices: Vec<CompletionStreamChoice>) -> CompletionStreamResponse {
        CompletionStreamResponse {
            id: self.completion.id.clone(),
            object: "text_completion".to_owned(),
            created: self.completion.created,
            choices,
            model: self.completion.model.clone(),
            system_fingerprint: None,
            usage: None,
        }
    }
}

impl Encoder for CompletionEncoder {
    fn open(&mut self) -> String {
        String::new()
    }

    fn encode(&mut self, event: TurnEvent) -> String {
        let mut out = String::new();
        match event {
            TurnEvent::Started => {}
            TurnEvent::Delta(text) => push_frame(&mut out, None, &self.chunk(vec![choice(text, None)])),
            TurnEvent::Finished(outcome) => {
                let finish = choice(String::new(), Some(outcome.finish_reason));
                push_frame(&mut out, None, &self.chunk(vec![finish]));
                if self.include_usage {
                    let mut last = json!(self.chunk(Vec::new()));
                    last["usage"] = usage::chat(&outcome.usage);
                    push_frame(&mut out, None, &last);
                }
                out.push_str("data: [DONE]\n\n");
            }
            TurnEvent::Failed(error) => push_frame(&mut out, Some("error"), &ApiError::from(error).body()),
        }
        out
    }
}

fn choice(text: String, finished: Option<FinishReason>) -> CompletionStreamChoice {
    CompletionStreamChoice { text, index: 0, logprobs: None, finish_reason: finished.map(finish_reason) }
}
