//! The chunks of a streamed chat completion: role, deltas, finish, usage if asked for, `[DONE]`.

use openai_protocol::chat::{ChatCompletionStreamResponse, ChatMessageDelta, ChatStreamChoice};
use serde_json::json;

use super::Completion;
use crate::http::error::ApiError;
use crate::http::generation::finish_reason;
use crate::http::sse::{push_frame, Encoder};
use crate::http::usage;
use crate::messages::session::{FinishReason, TurnEvent};

pub(super) struct ChatEncoder {
    completion: Completion,
    include_usage: bool,
    role_sent: bool,
}

impl ChatEncoder {
    pub(super) fn new(completion: Completion, include_usage: bool) -> Self {
        Self { completion, include_usage, role_sent: false }
    }

    fn chunk(&self, choices: Vec<ChatStreamChoice>) -> ChatCompletionStreamResponse {
        ChatCompletionStreamResponse {
            id: self.completion.id.clone(),
            object: "chat.completion.chunk".to_owned(),
            created: self.completion.created,
            model: self.completion.model.clone(),
            system_fingerprint: None,
            choices,
            usage: None,
        }
    }

    /// The role goes out with the first text, so that a client's time to the first chunk is the time to the first token.
    fn push_role(&mut self, out: &mut String) {
        if !self.role_sent {
            self.role_sent = true;
            let delta = ChatMessageDelta { role: Some("assistant".to_owned()), ..delta(Some(String::new())) };
            push_frame(out, None, &self.chunk(vec![choice(delta, None)]));
        }
    }
}

impl Encoder for ChatEncoder {
    fn open(&mut self) -> String {
        String::new()
    }

    fn encode(&mut self, event: TurnEvent) -> String {
        let mut out = String::new();
        match event {
            TurnEvent::Started => {}
            TurnEvent::Delta(text) => {
                self.push_role(&mut out);
                push_frame(&mut out, None, &self.chunk(vec![choice(delta(Some(text)), None)]));
            }
            TurnEvent::Finished(outcome) => {
                self.push_role(&mut out);
                let finish = choice(delta(None), Some(outcome.finish_reason));
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

fn choice(delta: ChatMessageDelta, finished: Option<FinishReason>) -> ChatStreamChoice {
    ChatStreamChoice { index: 0, delta, logprobs: None, finish_reason: finished.map(finish_reason), matched_stop: None }
}

fn delta(content: Option<String>) -> ChatMessageDelta {
    ChatMessageDelta { role: None, content, tool_calls: None, reasoning_content: None }
}
