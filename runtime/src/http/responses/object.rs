//! The Response object: from a running turn, a finished one, or one read back from the store.

use keepsake_model::chat::ChatMessage;
use openai_protocol::responses::{
    IncompleteDetails, IncompleteReason, ResponseContentPart, ResponseOutputItem, ResponseStatus, ResponsesRequest,
    ResponsesResponse,
};
use serde_json::{json, Map, Value};

use super::response_id;
use crate::http::error::ApiError;
use crate::http::usage;
use crate::messages::session::{FinishReason, TurnId, TurnOutcome};

/// What a response repeats of its request.
#[derive(Clone)]
pub(super) struct Echo {
    wire: ResponsesRequest,
    /// Sampling numbers as the client wrote them, by name.
    numbers: Map<String, Value>,
    /// The turn's own input: `[{"role", "content"}]`.
    input: Vec<Value>,
}

impl Echo {
    pub(super) fn new(wire: ResponsesRequest, numbers: Map<String, Value>, messages: &[ChatMessage]) -> Self {
        let input = messages.iter().map(|message| json!({ "role": message.role, "content": message.content }));
        Self { wire, numbers, input: input.collect() }
    }

    /// The form that sessions keep with a stored turn.
    pub(super) fn save(&self) -> Value {
        json!({ "api": "responses", "request": self.wire, "numbers": self.numbers, "input": self.input })
    }

    /// Of any stored turn: chat completions with `store` have ids here too, with less to repeat, and a field that an older
    /// version wrote differently is left out rather than making the turn unreadable.
    pub(super) fn restore(mut saved: Value, parent: Option<TurnId>) -> Self {
        let request = saved.get_mut("request").map(Value::take).unwrap_or_default();
        let mut wire: ResponsesRequest = serde_json::from_value(request).unwrap_or_default();
        wire.store = Some(true);
        wire.previous_response_id = parent.map(response_id);
        if let Some(Value::Object(metadata)) = saved.get_mut("metadata").map(Value::take) {
            wire.metadata = Some(metadata.into_iter().collect());
        }
        let numbers = match saved.get_mut("numbers").map(Value::take) {
            Some(Value::Object(numbers)) => numbers,
            _ => Map::new(),
        };
        let input = match saved.get_mut("input").map(Value::take) {
            Some(Value::Array(input)) => input,
            _ => Vec::new(),
        };
        Self { wire, numbers, input }
    }

    /// As message items.
    pub(super) fn input_items(self, turn: TurnId) -> Vec<Value> {
        let items = self.input.into_iter().enumerate().map(|(i, message)| {
            let content = match &message["content"] {
                Value::String(text) if message["role"] == "assistant" => {
                    json!([{ "type": "output_text", "text": text, "annotations": [] }])
                }
                Value::String(text) => json!([{ "type": "input_text", "text": text }]),
                parts => parts.clone(),
            };
            json!({
                "id": format!("msg_{turn}_{i}"),
                "type": "message",
                "status": "completed",
                "role": message["role"],
                "content": content,
            })
        });
        items.collect()
    }
}

#[derive(Clone)]
pub(super) struct ResponseObject {
    id: TurnId,
    created_at: u64,
    model: String,
    echo: Echo,
}

impl ResponseObject {
    pub(super) fn new(id: TurnId, created_at: u64, model: &str, echo: Echo) -> Self {
        Self { id, created_at, model: model.to_owned(), echo }
    }

    /// The id of the one output item.
    pub(super) fn item_id(&self) -> String {
        format!("msg_{}", self.id)
    }

    pub(super) fn in_progress(&self) -> Value {
        self.render(ResponseStatus::InProgress, |_| {})
    }

    /// `completed_at` is unknown for a turn read back from the store.
    pub(super) fn finished(&self, outcome: &TurnOutcome, completed_at: Option<u64>) -> Value {
        let (status, reason) = match outcome.finish_reason {
            FinishReason::Stop => (ResponseStatus::Completed, None),
            FinishReason::Length => (ResponseStatus::Incomplete, Some(IncompleteReason::MaxOutputTokens)),
        };
        let details = reason.map(|reason| IncompleteDetails { reason });
        self.render(status, |object| {
            object["completed_at"] = json!(completed_at);
            object["incomplete_details"] = json!(details);
            object["output"] = json!([self.output_item(&outcome.text, Some(outcome.finish_reason))]);
            object["usage"] = usage::responses(&outcome.usage);
        })
    }

    pub(super) fn failed(&self, error: &ApiError) -> Value {
        self.render(ResponseStatus::Failed, |object| object["error"] = error.failure())
    }

    /// The reply as an item; without a finish reason it is the empty item that a stream opens with.
    pub(super) fn output_item(&self, text: &str, finished: Option<FinishReason>) -> ResponseOutputItem {
        let status = match finished {
            None => "in_progress",
            Some(FinishReason::Stop) => "completed",
            Some(FinishReason::Length) => "incomplete",
        };
        ResponseOutputItem::Message {
            id: self.item_id(),
            role: "assistant".to_owned(),
            content: finished.map(|_| text_part(text)).into_iter().collect(),
            status: status.to_owned(),
            phase: None,
        }
    }

    fn render(&self, status: ResponseStatus, fill: impl FnOnce(&mut Value)) -> Value {
        let object = ResponsesResponse::builder(response_id(self.id), self.model.as_str())
            .copy_from_request(&self.echo.wire)
            .created_at(i64::try_from(self.created_at).unwrap_or(i64::MAX))
            .status(status)
            .build();
        let mut object = json!(object);
        for (name, number) in &self.echo.numbers {
            object[name] = number.clone();
        }
        fill(&mut object);
        object
    }
}

pub(super) fn text_part(text: &str) -> ResponseContentPart {
    ResponseContentPart::OutputText { text: text.to_owned(), annotations: Vec::new(), logprobs: None }
}
