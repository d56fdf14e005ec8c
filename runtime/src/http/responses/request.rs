//! Decoding of a `POST /v1/responses` body.
//!
//! openai-protocol's `ResponsesRequest` denies unknown fields and does not know vLLM's extras, so it is wrapped: fields that
//! this server acts on are taken first, with their limits; the fields it knows and that do no harm go through the wire type;
//! the rest is ignored.

use openai_protocol::responses::ResponsesRequest;
use serde_json::{json, Map, Value};

use super::object::Echo;
use super::parse_id;
use crate::gateway::ModelCard;
use crate::http::chat_input;
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::http::generation::{check_model, is_zero, metadata, refuse_tools};
use crate::http::sampling::Sampling;
use crate::messages::session::{Prompt, StartTurn, TenantId};

/// Accepted, checked by the wire type, echoed in the response object, and otherwise without effect here.
const PASSED_ON: [&str; 10] = [
    "include",
    "max_tool_calls",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "text",
    "user",
];

/// Echoed as the client wrote them: the wire type's f32 would print 0.7 as 0.699999988079071.
const NUMBERS: [&str; 4] = ["temperature", "top_p", "frequency_penalty", "presence_penalty"];

pub(super) struct ResponseRequest {
    pub(super) turn: StartTurn,
    pub(super) stream: bool,
    pub(super) echo: Echo,
}

impl ResponseRequest {
    pub(super) fn decode(mut fields: Fields, model: &ModelCard, tenant: TenantId) -> Result<Self, ApiError> {
        check_model(&mut fields, &model.name)?;
        refuse_unsupported(&mut fields)?;
        let numbers = NUMBERS.iter().filter_map(|&name| Some((name.to_owned(), fields.get(name)?.clone()))).collect();
        let sampling = Sampling::take(&mut fields, model.vocab_size)?;
        let max_output_tokens = fields.count("max_output_tokens", 1..=u32::MAX)?;
        sampling.check_min_tokens(max_output_tokens)?;
        let metadata = metadata(&mut fields)?;
        let instructions = fields.string("instructions")?;
        let previous_response_id = fields.string("previous_response_id")?;
        let parent = previous_response_id.as_deref().map(parse_id).transpose();
        let parent = parent.map_err(|error| error.with_param("previous_response_id"))?;
        let store = fields.bool("store")?.unwrap_or(true);
        let stream = fields.bool("stream")?.unwrap_or(false);
        let input = fields.take("input").ok_or_else(|| ApiError::missing("input"))?;
        let messages = chat_input::response_input(input)?;

        let mut wire = through_wire_type(fields.into_map())?;
        wire.model.clone_from(&model.name);
        wire.instructions.clone_from(&instructions);
        wire.max_output_tokens = max_output_tokens;
        wire.metadata = Some(metadata.into_iter().collect());
        wire.previous_response_id = previous_response_id;
        wire.store = Some(store);
        let echo = Echo::new(wire, numbers, &messages);
        let turn = StartTurn {
            tenant,
            parent,
            instructions,
            prompt: Prompt::Messages(messages),
            sampling: sampling.params,
            max_output_tokens,
            stop: sampling.stop,
            store,
            echo: if store { echo.save() } else { Value::Null },
        };
        Ok(Self { turn, stream, echo })
    }
}

fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    refuse_tools(fields)?;
    let is_false = |value: &Value| *value == Value::Bool(false);
    fields.refuse_unless("background", is_false, "background responses are not supported; use stream")?;
    fields.refuse_unless("conversation", |_| false, "conversations are not supported; use previous_response_id")?;
    fields.refuse_unless("prompt", |_| false, "prompt templates are not supported; use input and instructions")?;
    let is_disabled = |value: &Value| value.as_str() == Some("disabled");
    fields.refuse_unless("truncation", is_disabled, "nothing is truncated silently; only \"disabled\" is supported")?;
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.refuse_unless("context_management", is_empty, "context management is not supported")?;
    fields.refuse_unless("top_logprobs", is_zero, "log probabilities are not supported")?;
    let is_text = |format: &Value| format.is_null() || format.get("type").and_then(Value::as_str) == Some("text");
    if !fields.get("text").and_then(|text| text.get("format")).is_none_or(is_text) {
        return Err(ApiError::unsupported("text.format", "text.format: only {\"type\": \"text\"} is supported"));
    }
    let wants_logprobs = |value: &Value| value.as_str() == Some("message.output_text.logprobs");
    if fields.get("include").and_then(Value::as_array).is_some_and(|include| include.iter().any(wants_logprobs)) {
        return Err(ApiError::unsupported("include", "include: log probabilities are not supported"));
    }
    Ok(())
}

/// The wire type of those remaining fields that it knows.
fn through_wire_type(mut fields: Map<String, Value>) -> Result<ResponsesRequest, ApiError> {
    let known = PASSED_ON.iter().filter_map(|&name| {
        let value = fields.remove(name).filter(|value| !value.is_null())?;
        Some((name, value))
    });
    let known: Vec<(&str, Value)> = known.collect();
    let with = |fields: &[(&str, Value)]| {
        let mut body = json!({ "input": "", "model": "" });
        for (name, value) in fields {
            body[*name] = value.clone();
        }
        serde_json::from_value::<ResponsesRequest>(body)
    };
    with(&known).map_err(|error| {
        // serde does not say which field it was: ask for each alone.
        let culprit = known.iter().find_map(|field| Some((field.0, with(std::slice::from_ref(field)).err()?)));
        match culprit {
            Some((name, error)) => ApiError::invalid(name, format!("{name}: {error}")),
            None => ApiError::bad_json(error.to_string()),
        }
    })
}
