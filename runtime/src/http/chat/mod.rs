//! `POST /v1/chat/completions`: stateless, the client sends the whole conversation; shared prefixes are found by content.

mod stream;

use actix_web::{web, HttpResponse};
use openai_protocol::chat::{ChatChoice, ChatCompletionMessage, ChatCompletionResponse};
use serde_json::{json, Value};

use self::stream::ChatEncoder;
use super::body::Body;
use super::chat_input;
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{check_model, finish_reason, metadata, outcome, refuse_unsupported, stream_options};
use super::sampling::Sampling;
use super::service::RunningTurn;
use super::{sse, usage, Http};
use crate::gateway::ModelCard;
use crate::messages::session::{Prompt, StartTurn, TenantId, TurnOutcome};

pub(crate) async fn create(
    http: web::Data<Http>,
    tenant: web::ReqData<TenantId>,
    body: Body,
) -> Result<HttpResponse, ApiError> {
    let model = http.service.model();
    let request = ChatRequest::decode(body.0, model, tenant.into_inner())?;
    let turn = http.service.start_turn(request.turn).await.map_err(|e| ApiError::of_turn(e, "messages"))?;
    let completion = Completion::of(&turn, model);
    if request.stream {
        let encoder = ChatEncoder::new(completion, request.include_usage);
        return Ok(sse::respond(turn, encoder, http.settings.ping));
    }
    let outcome = outcome(turn).await?;
    Ok(HttpResponse::Ok().json(completion.whole(&outcome)))
}

/// What every object of one completion carries.
#[derive(Clone)]
struct Completion {
    id: String,
    created: u64,
    model: String,
}

impl Completion {
    fn of(turn: &RunningTurn, model: &ModelCard) -> Self {
        Self { id: format!("chatcmpl-{}", turn.id), created: turn.created_at, model: model.name.clone() }
    }

    fn whole(&self, outcome: &TurnOutcome) -> Value {
        let message = ChatCompletionMessage {
            role: "assistant".to_owned(),
            content: Some(outcome.text.clone()),
            refusal: None,
            annotations: Vec::new(),
            tool_calls: None,
            reasoning_content: None,
        };
        let choice = ChatChoice {
            index: 0,
            message,
            logprobs: None,
            finish_reason: Some(finish_reason(outcome.finish_reason)),
            matched_stop: None,
            hidden_states: None,
        };
        let mut whole = json!(ChatCompletionResponse {
            id: self.id.clone(),
            object: "chat.completion".to_owned(),
            created: self.created,
            model: self.model.clone(),
            choices: vec![choice],
            usage: None,
            system_fingerprint: None,
            service_tier: "default".to_owned(),
        });
        whole["usage"] = usage::chat(&outcome.usage);
        whole
    }
}

struct ChatRequest {
    turn: StartTurn,
    stream: bool,
    include_usage: bool,
}

impl ChatRequest {
    fn decode(mut fields: Fields, model: &ModelCard, tenant: TenantId) -> Result<Self, ApiError> {
        check_model(&mut fields, &model.name)?;
        refuse_unsupported(&mut fields)?;
        let only_text = |value: &Value| *value == json!(["text"]);
        fields.refuse_unless("modalities", only_text, "only [\"text\"] is supported")?;
        fields.refuse_unless("audio", |_| false, "audio is not supported")?;
        let is_false = |value: &Value| *value == Value::Bool(false);
        fields.refuse_unless("continue_final_message", is_false, "a reply always starts a new message")?;
        let is_true = |value: &Value| *value == Value::Bool(true);
        fields.refuse_unless("add_generation_prompt", is_true, "a reply always starts a new message")?;

        let sampling = Sampling::take(&mut fields, model.vocab_size)?;
        let max_tokens = fields.count("max_tokens", 1..=u32::MAX)?;
        let max_output_tokens = fields.count("max_completion_tokens", 1..=u32::MAX)?.or(max_tokens);
        sampling.check_min_tokens(max_output_tokens)?;
        let (stream, include_usage) = stream_options(&mut fields)?;
        let metadata = metadata(&mut fields)?;
        let store = fields.bool("store")?.unwrap_or(false);
        let messages = fields.take("messages").ok_or_else(|| ApiError::missing("messages"))?;
        let echo = if store { json!({ "api": "chat", "metadata": metadata, "input": messages }) } else { Value::Null };
        let turn = StartTurn {
            tenant,
            parent: None,
            instructions: None,
            prompt: Prompt::Messages(chat_input::messages(messages, "messages")?),
            sampling: sampling.params,
            max_output_tokens,
            stop: sampling.stop,
            store,
            echo,
        };
        Ok(Self { turn, stream, include_usage })
    }
}
