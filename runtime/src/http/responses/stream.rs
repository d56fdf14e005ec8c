//! The events of a streamed response, in OpenAI's order, each with the next `sequence_number`. There is no `[DONE]`: the
//! stream ends after `response.completed`, `response.incomplete` or `response.failed`.

use openai_protocol::event_types::{ContentPartEvent, OutputItemEvent, OutputTextEvent, ResponseEvent};
use serde_json::{json, Map, Value};

use super::object::{text_part, ResponseObject};
use super::unix_now;
use crate::http::error::ApiError;
use crate::http::sse::{push_frame, Encoder};
use crate::messages::session::{FinishReason, TurnError, TurnEvent, TurnOutcome};

pub(super) struct ResponseEncoder {
    object: ResponseObject,
    item_id: String,
    next_sequence: u64,
    phase: Phase,
}

/// How far the stream has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Created,
    InProgress,
    ItemOpen,
}

impl ResponseEncoder {
    pub(super) fn new(object: ResponseObject) -> Self {
        let item_id = object.item_id();
        Self { object, item_id, next_sequence: 0, phase: Phase::Created }
    }

    /// Emits what must come before `phase` is reached, once.
    fn advance(&mut self, out: &mut String, phase: Phase) {
        if self.phase < Phase::InProgress {
            self.phase = Phase::InProgress;
            let response = self.object.in_progress();
            self.push(out, ResponseEvent::IN_PROGRESS, json!({ "response": response }));
        }
        if phase == Phase::ItemOpen && self.phase < phase {
            self.phase = phase;
            let item = self.object.output_item("", None);
            self.push(out, OutputItemEvent::ADDED, json!({ "output_index": 0, "item": item }));
            self.push_in_part(out, ContentPartEvent::ADDED, json!({ "part": text_part("") }));
        }
    }

    fn finish(&mut self, out: &mut String, outcome: &TurnOutcome) {
        self.advance(out, Phase::ItemOpen);
        self.push_in_part(out, OutputTextEvent::DONE, json!({ "text": outcome.text, "logprobs": [] }));
        self.push_in_part(out, ContentPartEvent::DONE, json!({ "part": text_part(&outcome.text) }));
        let item = self.object.output_item(&outcome.text, Some(outcome.finish_reason));
        self.push(out, OutputItemEvent::DONE, json!({ "output_index": 0, "item": item }));
        let last = match outcome.finish_reason {
            FinishReason::Stop => ResponseEvent::COMPLETED,
            FinishReason::Length => ResponseEvent::INCOMPLETE,
        };
        let response = self.object.finished(outcome, Some(unix_now()));
        self.push(out, last, json!({ "response": response }));
    }

    fn fail(&mut self, out: &mut String, error: TurnError) {
        let response = self.object.failed(&ApiError::from(error));
        self.push(out, ResponseEvent::FAILED, json!({ "response": response }));
    }

    /// An event inside the one text part of the one item.
    fn push_in_part(&mut self, out: &mut String, kind: &str, mut fields: Value) {
        fields["item_id"] = json!(self.item_id);
        fields["output_index"] = json!(0);
        fields["content_index"] = json!(0);
        self.push(out, kind, fields);
    }

    fn push(&mut self, out: &mut String, kind: &str, fields: Value) {
        let mut event = Map::new();
        event.insert("type".to_owned(), json!(kind));
        event.insert("sequence_number".to_owned(), json!(self.next_sequence));
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        self.next_sequence += 1;
        push_frame(out, Some(kind), &event);
    }
}

impl Encoder for ResponseEncoder {
    fn open(&mut self) -> String {
        let mut out = String::new();
        let response = self.object.in_progress();
        self.push(&mut out, ResponseEvent::CREATED, json!({ "response": response }));
        out
    }

    fn encode(&mut self, event: TurnEvent) -> String {
        let mut out = String::new();
        match event {
            TurnEvent::Started => self.advance(&mut out, Phase::InProgress),
            TurnEvent::Delta(text) => {
                self.advance(&mut out, Phase::ItemOpen);
                self.push_in_part(&mut out, OutputTextEvent::DELTA, json!({ "delta": text, "logprobs": [] }));
            }
            TurnEvent::Finished(outcome) => self.finish(&mut out, &outcome),
            TurnEvent::Failed(error) => self.fail(&mut out, error),
        }
        out
    }
}
