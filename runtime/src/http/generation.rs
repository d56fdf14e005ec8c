//! What the three generating endpoints have in common: fields that are checked alike, and waiting for a whole reply.

use futures_util::StreamExt;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{wrong_type, Fields};
use super::probes::DEFAULT_MODEL;
use super::service::RunningTurn;
use crate::messages::session::{FinishReason, TurnError, TurnEvent, TurnOutcome};

const MAX_METADATA: usize = 16;
const MAX_METADATA_KEY: usize = 64;
const MAX_METADATA_VALUE: usize = 512;

/// `model`: the served name, "default" or absent.
pub(crate) fn check_model(fields: &mut Fields, served: &str) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(model) if model != served && model != DEFAULT_MODEL => {
            Err(ApiError::model_not_found(&model.chars().take(200).collect::<String>(), served))
        }
        _ => Ok(()),
    }
}

/// `metadata` within OpenAI's limits.
pub(crate) fn metadata(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let map = match fields.take("metadata") {
        None => return Ok(Map::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong_type("metadata", "an object of strings", &other)),
    };
    let refuse = |message: String| Err(ApiError::invalid("metadata", message));
    if map.len() > MAX_METADATA {
        return refuse(format!("metadata may hold at most {MAX_METADATA} pairs, not {}", map.len()));
    }
    for (key, value) in &map {
        if key.chars().count() > MAX_METADATA_KEY {
            return refuse(format!("metadata keys may be at most {MAX_METADATA_KEY} characters long"));
        }
        match value {
            Value::String(text) if text.chars().count() <= MAX_METADATA_VALUE => {}
            Value::String(_) => {
                return refuse(format!("metadata values may be at most {MAX_METADATA_VALUE} characters long"));
            }
            other => return Err(wrong_type("metadata", "an object of strings", other)),
        }
    }
    Ok(map)
}

/// Refuses what would change the reply's meaning if it were ignored, on the chat and completions endpoints.
pub(crate) fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    refuse_tools(fields)?;
    let one = |value: &Value| value.as_i64() == Some(1);
    fields.refuse_unless("n", one, "this server makes one choice a request; n must be 1")?;
    fields.refuse_unless("best_of", one, "this server makes one choice a request; best_of must be 1")?;
    let no_logprobs = "log probabilities are not supported";
    fields.refuse_unless("logprobs", |value| *value == Value::Bool(false), no_logprobs)?;
    fields.refuse_unless("top_logprobs", is_zero, no_logprobs)?;
    fields.refuse_unless("prompt_logprobs", |value| *value == Value::Bool(false), no_logprobs)?;
    let is_text = |value: &Value| value.get("type").and_then(Value::as_str) == Some("text");
    fields.refuse_unless("response_format", is_text, "only {\"type\": \"text\"} is supported")?;
    let constrained = "constrained decoding is not supported";
    for name in ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"] {
        fields.refuse_unless(name, |_| false, constrained)?;
    }
    fields.refuse_unless("use_beam_search", |value| *value == Value::Bool(false), "beam search is not supported")
}

pub(crate) fn refuse_tools(fields: &mut Fields) -> Result<(), ApiError> {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.refuse_unless("tools", empty, "tools are not supported")?;
    fields.refuse_unless("functions", empty, "tools are not supported")?;
    let idle = |value: &Value| matches!(value.as_str(), Some("none" | "auto"));
    fields.refuse_unless("tool_choice", idle, "tools are not supported; leave it out or send \"none\"")?;
    fields.refuse_unless("function_call", idle, "tools are not supported; leave it out or send \"none\"")
}

pub(crate) fn is_zero(value: &Value) -> bool {
    value.as_i64() == Some(0)
}

/// `stream` and `stream_options.include_usage`.
pub(crate) fn stream_options(fields: &mut Fields) -> Result<(bool, bool), ApiError> {
    let stream = fields.bool("stream")?.unwrap_or(false);
    let options = match fields.take("stream_options") {
        None => return Ok((stream, false)),
        Some(Value::Object(options)) => options,
        Some(other) => return Err(wrong_type("stream_options", "an object", &other)),
    };
    match options.get("include_usage") {
        None | Some(Value::Null) => Ok((stream, false)),
        Some(Value::Bool(include)) => Ok((stream, *include)),
        Some(other) => Err(wrong_type("stream_options.include_usage", "a boolean", other)),
    }
}

/// `finish_reason` on the chat and completions endpoints.
pub(crate) fn finish_reason(reason: FinishReason) -> String {
    let reason = match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    };
    reason.to_owned()
}

/// Waits for the whole reply. Dropping this future drops the turn.
pub(crate) async fn outcome(mut turn: RunningTurn) -> Result<TurnOutcome, TurnError> {
    while let Some(event) = turn.events.next().await {
        match event {
            TurnEvent::Started | TurnEvent::Delta(_) => {}
            TurnEvent::Finished(outcome) => return Ok(*outcome),
            TurnEvent::Failed(error) => return Err(error),
        }
    }
    Err(ended_early())
}

/// The turn's task went away without a last event.
pub(crate) fn ended_early() -> TurnError {
    TurnError::Internal("the turn ended without a result".to_owned())
}
