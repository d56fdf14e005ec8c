//! `/v1/responses`: the stateful endpoint. A request names the turn it continues and carries only what is new.

mod object;
mod request;
mod stream;

use actix_web::{web, HttpResponse};
use serde_json::{json, Value};

use self::object::{Echo, ResponseObject};
use self::request::ResponseRequest;
use self::stream::ResponseEncoder;
use super::body::Body;
use super::error::ApiError;
use super::generation::outcome;
use super::{sse, Http};
use crate::messages::session::{TenantId, TurnId};

const ID_PREFIX: &str = "resp_";

pub(crate) async fn create(
    http: web::Data<Http>,
    tenant: web::ReqData<TenantId>,
    body: Body,
) -> Result<HttpResponse, ApiError> {
    let model = http.service.model();
    let request = ResponseRequest::decode(body.0, model, tenant.into_inner())?;
    let turn = http.service.start_turn(request.turn).await.map_err(|e| ApiError::of_turn(e, "input"))?;
    let object = ResponseObject::new(turn.id, turn.created_at, &model.name, request.echo);
    if request.stream {
        return Ok(sse::respond(turn, ResponseEncoder::new(object), http.settings.ping));
    }
    let outcome = outcome(turn).await?;
    Ok(HttpResponse::Ok().json(object.finished(&outcome, Some(unix_now()))))
}

pub(crate) async fn get(
    http: web::Data<Http>,
    tenant: web::ReqData<TenantId>,
    id: web::Path<String>,
) -> Result<HttpResponse, ApiError> {
    let stored = http.service.get_turn(&tenant, parse_id(&id)?).await?;
    let echo = Echo::restore(stored.echo, stored.parent);
    let object = ResponseObject::new(stored.id, stored.created_at, &http.service.model().name, echo);
    Ok(HttpResponse::Ok().json(object.finished(&stored.outcome, None)))
}

pub(crate) async fn delete(
    http: web::Data<Http>,
    tenant: web::ReqData<TenantId>,
    id: web::Path<String>,
) -> Result<HttpResponse, ApiError> {
    let turn = parse_id(&id)?;
    http.service.delete_turn(&tenant, turn).await?;
    Ok(HttpResponse::Ok().json(json!({ "id": response_id(turn), "object": "response.deleted", "deleted": true })))
}

/// The items that this turn itself brought; its ancestors' are under their own ids.
pub(crate) async fn input_items(
    http: web::Data<Http>,
    tenant: web::ReqData<TenantId>,
    id: web::Path<String>,
) -> Result<HttpResponse, ApiError> {
    let stored = http.service.get_turn(&tenant, parse_id(&id)?).await?;
    let mut items = Echo::restore(stored.echo, stored.parent).input_items(stored.id);
    // Newest first, as OpenAI lists them by default.
    items.reverse();
    let end = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    Ok(HttpResponse::Ok().json(json!({
        "object": "list",
        "first_id": end(items.first()),
        "last_id": end(items.last()),
        "has_more": false,
        "data": items,
    })))
}

fn response_id(turn: TurnId) -> String {
    format!("{ID_PREFIX}{turn}")
}

/// An id that this server cannot have made is unknown, like any other: 404.
fn parse_id(id: &str) -> Result<TurnId, ApiError> {
    let turn = id.strip_prefix(ID_PREFIX).and_then(TurnId::parse);
    turn.ok_or_else(|| ApiError::response_not_found(&id.chars().take(100).collect::<String>()))
}

fn unix_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |elapsed| elapsed.as_secs())
}
