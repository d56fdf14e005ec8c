//! Models, health, readiness and metrics.

use actix_web::{web, HttpResponse};
use openai_protocol::models::{ListModelsResponse, ModelObject};
use serde_json::json;

use super::error::ApiError;
use super::Http;
use crate::gateway::ModelCard;

/// The served model's name, or this word, or nothing: requests may use any.
pub(crate) const DEFAULT_MODEL: &str = "default";

pub(crate) async fn models(http: web::Data<Http>) -> HttpResponse {
    let data = vec![model_object(http.service.model())];
    HttpResponse::Ok().json(ListModelsResponse { object: "list".to_owned(), data })
}

pub(crate) async fn model(http: web::Data<Http>, id: web::Path<String>) -> Result<HttpResponse, ApiError> {
    let served = http.service.model();
    if *id != served.name && *id != DEFAULT_MODEL {
        return Err(ApiError::model_not_found(&id, &served.name));
    }
    Ok(HttpResponse::Ok().json(model_object(served)))
}

/// 200 as long as the process answers.
pub(crate) async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({ "status": "ok" }))
}

/// 503 while the server starts or drains: a load balancer should not send work.
pub(crate) async fn ready(http: web::Data<Http>) -> HttpResponse {
    match http.service.is_ready() {
        true => HttpResponse::Ok().json(json!({ "status": "ready" })),
        false => HttpResponse::ServiceUnavailable().json(json!({ "status": "not ready" })),
    }
}

pub(crate) async fn metrics(http: web::Data<Http>) -> HttpResponse {
    let text = http.service.metrics().render();
    HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(text)
}

fn model_object(card: &ModelCard) -> ModelObject {
    ModelObject {
        id: card.name.clone(),
        object: "model".to_owned(),
        created: i64::try_from(card.created).unwrap_or(0),
        owned_by: "keepsake".to_owned(),
    }
}
