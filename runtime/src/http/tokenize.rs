//! `POST /tokenize` and `POST /detokenize`, in vLLM's shapes.

use actix_web::{web, HttpResponse};
use serde_json::{json, Value};

use super::body::Body;
use super::chat_input;
use super::error::ApiError;
use super::fields::{token_ids, wrong_type};
use super::generation::check_model;
use super::Http;

/// `{prompt, add_special_tokens}` or `{messages}` to `{count, max_model_len, tokens}`.
pub(crate) async fn tokenize(http: web::Data<Http>, body: Body) -> Result<HttpResponse, ApiError> {
    let mut fields = body.0;
    let model = http.service.model();
    check_model(&mut fields, &model.name)?;
    let tokens = match (fields.string("prompt")?, fields.take("messages")) {
        (Some(_), Some(_)) => return Err(ApiError::invalid("messages", "send either prompt or messages, not both")),
        (None, None) => return Err(ApiError::missing("prompt")),
        (Some(prompt), None) => {
            let add_bos = fields.bool("add_special_tokens")?.unwrap_or(true);
            http.service.encode(prompt, add_bos).await?
        }
        (None, Some(messages)) => http.service.encode_chat(chat_input::messages(messages, "messages")?).await?,
    };
    Ok(HttpResponse::Ok().json(json!({ "count": tokens.len(), "max_model_len": model.max_context, "tokens": tokens })))
}

/// `{tokens}` to `{prompt}`.
pub(crate) async fn detokenize(http: web::Data<Http>, body: Body) -> Result<HttpResponse, ApiError> {
    let mut fields = body.0;
    let model = http.service.model();
    check_model(&mut fields, &model.name)?;
    let tokens = match fields.take("tokens") {
        None => return Err(ApiError::missing("tokens")),
        Some(Value::Array(ids)) => token_ids(&ids, "tokens", model.vocab_size, usize::MAX)?,
        Some(other) => return Err(wrong_type("tokens", "an array of token ids", &other)),
    };
    let prompt = http.service.decode(tokens).await?;
    Ok(HttpResponse::Ok().json(json!({ "prompt": prompt })))
}
