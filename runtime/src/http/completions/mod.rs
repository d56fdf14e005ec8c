//! `POST /v1/completions`: text or token ids, continued as they are. Several prompts in one request run at once.

mod stream;

use actix_web::{web, HttpResponse};
use futures_util::future::try_join_all;
use openai_protocol::completion::{CompletionChoice, CompletionResponse};
use serde_json::{json, Value};

use self::stream::CompletionEncoder;
use super::body::Body;
use super::error::ApiError;
use super::fields::{token_ids, wrong_type, Fields};
use super::generation::{check_model, finish_reason, metadata, outcome, refuse_unsupported, stream_options};
use super::sampling::Sampling;
use super::service::RunningTurn;
use super::{sse, usage, Http};
use crate::gateway::ModelCard;
use crate::messages::session::{Prompt, StartTurn, TenantId, TurnOutcome};

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;
const MAX_PROMPTS: usize = 32;

pub(crate) async fn create(
    http: web::Data<Http>,
    tenant: web::ReqData<TenantId>,
    body: Body,
) -> Result<HttpResponse, ApiError> {
    let model = http.service.model();
    let request = CompletionRequest::decode(body.0, model, tenant.into_inner())?;
    let mut turns = Vec::with_capacity(request.prompts.len());
    for prompt in request.prompts {
        let turn = StartTurn { prompt, ..request.turn.clone() };
        turns.push(http.service.start_turn(turn).await.map_err(|e| ApiError::of_turn(e, "prompt"))?);
    }
    let completion = Completion::of(&turns[0], model);
    if request.stream {
        let turn = turns.swap_remove(0);
        let encoder = CompletionEncoder::new(completion, request.include_usage);
        return Ok(sse::respond(turn, encoder, http.settings.ping));
    }
    let outcomes = try_join_all(turns.into_iter().map(outcome)).await?;
    Ok(HttpResponse::Ok().json(completion.whole(&outcomes)))
}

/// What every object of one completion carries.
struct Completion {
    id: String,
    created: u64,
    model: String,
}

impl Completion {
    fn of(turn: &RunningTurn, model: &ModelCard) -> Self {
        Self { id: format!("cmpl-{}", turn.id), created: turn.created_at, model: model.name.clone() }
    }

    /// One choice a prompt.
    fn whole(&self, outcomes: &[TurnOutcome]) -> Value {
        let choices = (0..).zip(outcomes).map(|(index, outcome)| CompletionChoice {
            text: outcome.text.clone(),
            index,
            logprobs: None,
            finish_reason: Some(finish_reason(outcome.finish_reason)),
            matched_stop: None,
        });
        let mut whole = json!(CompletionResponse {
            id: self.id.clone(),
            object: "text_completion".to_owned(),
            created: self.created,
            model: self.model.clone(),
            choices: choices.collect(),
            usage: None,
            system_fingerprint: None,
        });
        whole["usage"] = usage::chat(&usage::sum(outcomes.iter().map(|outcome| &outcome.usage)));
        whole
    }
}

struct CompletionRequest {
    /// At least one; exactly one when streamed.
    prompts: Vec<Prompt>,
    /// All but the prompt.
    turn: StartTurn,
    stream: bool,
    include_usage: bool,
}

impl CompletionRequest {
    fn decode(mut fields: Fields, model: &ModelCard, tenant: TenantId) -> Result<Self, ApiError> {
        check_model(&mut fields, &model.name)?;
        let is_false = |value: &Value| *value == Value::Bool(false);
        fields.refuse_unless("echo", is_false, "the prompt is never repeated in the answer")?;
        let is_empty = |value: &Value| value.as_str() == Some("");
        fields.refuse_unless("suffix", is_empty, "insertion is not supported")?;
        refuse_unsupported(&mut fields)?;

        let sampling = Sampling::take(&mut fields, model.vocab_size)?;
        let max_tokens = fields.count("max_tokens", 1..=u32::MAX)?.unwrap_or(DEFAULT_MAX_TOKENS);
        sampling.check_min_tokens(Some(max_tokens))?;
        let (stream, include_usage) = stream_options(&mut fields)?;
        metadata(&mut fields)?;
        let prompt = fields.take("prompt").ok_or_else(|| ApiError::missing("prompt"))?;
        let prompts = prompts(prompt, model.vocab_size)?;
        if stream && prompts.len() > 1 {
            return Err(ApiError::unsupported("prompt", "several prompts in one request cannot be streamed"));
        }
        let turn = StartTurn {
            tenant,
            parent: None,
            instructions: None,
            prompt: Prompt::Tokens(Vec::new()),
            sampling: sampling.params,
            max_output_tokens: Some(max_tokens),
            stop: sampling.stop,
            store: false,
            echo: Value::Null,
        };
        Ok(Self { prompts, turn, stream, include_usage })
    }
}

/// A string, strings, token ids, or lists of token ids.
fn prompts(value: Value, vocab_size: usize) -> Result<Vec<Prompt>, ApiError> {
    let values = match value {
        Value::String(_) => vec![value],
        Value::Array(values) if values.is_empty() => return Err(empty_prompt("prompt")),
        Value::Array(values) if values[0].is_number() => {
            return Ok(vec![Prompt::Tokens(token_ids(&values, "prompt", vocab_size, usize::MAX)?)]);
        }
        Value::Array(values) => values,
        other => return Err(wrong_type("prompt", "a string, an array of strings, or token ids", &other)),
    };
    if values.len() > MAX_PROMPTS {
        let message = format!("prompt may hold at most {MAX_PROMPTS} prompts, not {}", values.len());
        return Err(ApiError::invalid("prompt", message));
    }
    let prompts = values.into_iter().enumerate().map(|(i, value)| match value {
        Value::String(text) if text.is_empty() => Err(empty_prompt("prompt")),
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) if ids.is_empty() => Err(empty_prompt("prompt")),
        Value::Array(ids) => Ok(Prompt::Tokens(token_ids(&ids, &format!("prompt[{i}]"), vocab_size, usize::MAX)?)),
        other => Err(wrong_type(&format!("prompt[{i}]"), "a string or an array of token ids", &other)),
    });
    prompts.collect()
}

fn empty_prompt(name: &str) -> ApiError {
    ApiError::invalid(name, format!("{name} must not be empty"))
}
