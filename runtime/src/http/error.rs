//! The one place that turns failures into HTTP: status, `type`, `code`, `param` and headers in OpenAI's error shape.

use std::fmt;
use std::time::Duration;

use actix_web::body::BoxBody;
use actix_web::http::{header, StatusCode};
use actix_web::{HttpResponse, ResponseError};
use serde_json::{json, Value};

use crate::messages::session::TurnError;

/// An answer that is not the one the client wanted.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<Duration>,
    /// Methods for the `Allow` header of a 405.
    allow: Option<String>,
}

impl ApiError {
    fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code, retry_after: None, allow: None }
    }

    /// 400: a field's value cannot be used. `message` names the field and its limit.
    pub(crate) fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Some("invalid_value"), message).with_param(param)
    }

    /// 400: the field is understood, what it asks for is not offered here.
    pub(crate) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Some("unsupported_parameter"), message).with_param(param)
    }

    /// 400: a required field is absent.
    pub(crate) fn missing(param: &str) -> Self {
        let message = format!("missing required parameter: '{param}'");
        Self::new(StatusCode::BAD_REQUEST, Some("missing_required_parameter"), message).with_param(param)
    }

    /// 400: the body is not a JSON object.
    pub(crate) fn bad_json(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Some("invalid_json"), message)
    }

    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message)
    }

    pub(crate) fn host_not_allowed(host: &str) -> Self {
        let message = format!("the Host header {host:?} is not one of this server's names (server.allowed_hosts)");
        Self::new(StatusCode::FORBIDDEN, Some("host_not_allowed"), message)
    }

    pub(crate) fn route_not_found(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, Some("unknown_url"), format!("unknown request URL: {path}"))
    }

    pub(crate) fn method_not_allowed(method: &str, path: &str, allow: &str) -> Self {
        let message = format!("{method} is not allowed on {path}; allowed: {allow}");
        let mut error = Self::new(StatusCode::METHOD_NOT_ALLOWED, Some("method_not_allowed"), message);
        error.allow = Some(allow.to_owned());
        error
    }

    pub(crate) fn model_not_found(model: &str, served: &str) -> Self {
        let message = format!("the model {model:?} does not exist; this server serves {served:?}");
        Self::new(StatusCode::NOT_FOUND, Some("model_not_found"), message).with_param("model")
    }

    pub(crate) fn response_not_found(id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, Some("response_not_found"), format!("no response with id {id:?} exists"))
    }

    pub(crate) fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than this server's limit of {limit} bytes (server.max_body)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, Some("request_too_large"), message)
    }

    /// 408, after which the connection is closed: the rest of the body may still be on its way.
    pub(crate) fn body_too_slow(limit: Duration) -> Self {
        let message = format!("the request body did not arrive within {limit:?} (server.body_timeout)");
        Self::new(StatusCode::REQUEST_TIMEOUT, Some("request_timeout"), message)
    }

    pub(crate) fn header_too_large(limit: usize) -> Self {
        let message = format!("the request's headers and URL are larger than {limit} bytes");
        Self::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, Some("headers_too_large"), message)
    }

    pub(crate) fn not_json(content_type: &str) -> Self {
        let message = format!("POST bodies must have content-type application/json, not {content_type:?}");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_media_type"), message)
    }

    pub(crate) fn encoded(encoding: &str) -> Self {
        let message = format!("request bodies must be sent as they are, not with content-encoding {encoding:?}");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_content_encoding"), message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, Some("internal_error"), message)
    }

    /// Names the field, unless the error already names one.
    pub(crate) fn with_param(mut self, param: &str) -> Self {
        self.param.get_or_insert_with(|| param.to_owned());
        self
    }

    /// `{"error": {"message", "type", "param", "code"}}`, all four always present as in OpenAI's answers (openai-protocol's
    /// type leaves empty ones out).
    pub(crate) fn body(&self) -> Value {
        json!({
            "error": {
                "message": self.message,
                "type": error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        })
    }

    /// A refused or failed turn, with the field that is to blame; `prompt` is what the endpoint calls its prompt.
    pub(crate) fn of_turn(error: TurnError, prompt: &str) -> Self {
        let param = match &error {
            TurnError::NotFound(_) | TurnError::Conflict(_) => Some("previous_response_id"),
            TurnError::ContextLengthExceeded { .. } => Some(prompt),
            _ => None,
        };
        let api = Self::from(error);
        match param {
            Some(param) => api.with_param(param),
            None => api,
        }
    }

    /// The `error` of a failed response object: `{"code", "message"}`.
    pub(crate) fn failure(&self) -> Value {
        let code = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_exceeded",
            _ => self.code.filter(|_| self.status.is_client_error()).unwrap_or("server_error"),
        };
        json!({ "code": code, "message": self.message })
    }
}

impl From<TurnError> for ApiError {
    fn from(error: TurnError) -> Self {
        let message = match &error {
            // Sessions know the bare id.
            TurnError::NotFound(id) => format!("no response with id resp_{} exists", id.trim_start_matches("resp_")),
            other => other.to_string(),
        };
        let status_code = match &error {
            TurnError::NotFound(_) => (StatusCode::NOT_FOUND, "response_not_found"),
            TurnError::Conflict(_) => (StatusCode::CONFLICT, "conflict"),
            TurnError::ContextLengthExceeded { .. } => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
            TurnError::Invalid { .. } => (StatusCode::BAD_REQUEST, "invalid_value"),
            TurnError::Overloaded { .. } => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded"),
            TurnError::StoreUnavailable(_) => (StatusCode::SERVICE_UNAVAILABLE, "store_unavailable"),
            TurnError::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
            TurnError::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        };
        let mut api = Self::new(status_code.0, Some(status_code.1), message);
        match error {
            TurnError::Invalid { param, .. } => api.param = param.map(str::to_owned),
            TurnError::Overloaded { retry_after } => api.retry_after = Some(retry_after),
            TurnError::StoreUnavailable(_) | TurnError::ShuttingDown => api.retry_after = Some(Duration::from_secs(5)),
            TurnError::Internal(reason) => tracing::error!(%reason, "turn failed"),
            _ => {}
        }
        api
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status.as_u16(), self.message)
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        let mut response = HttpResponse::build(self.status);
        if let Some(retry_after) = self.retry_after {
            // Whole seconds, rounded up: a client that came back too early would only be refused again.
            let seconds = (retry_after.as_secs_f64().ceil() as u64).max(1);
            response.insert_header((header::RETRY_AFTER, seconds));
        }
        if let Some(allow) = &self.allow {
            response.insert_header((header::ALLOW, allow.as_str()));
        }
        if self.status == StatusCode::REQUEST_TIMEOUT {
            response.force_close();
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.insert_header((header::WWW_AUTHENTICATE, "Bearer"));
        }
        response.json(self.body())
    }
}

fn error_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_turn_error_has_its_status_and_code() {
        let long = TurnError::ContextLengthExceeded { prompt_tokens: 9, limit: 8 };
        let retry_after = Duration::from_millis(1200);
        let table = [
            (TurnError::NotFound("resp_1".into()), 404, "response_not_found"),
            (TurnError::Conflict("other model".into()), 409, "conflict"),
            (long, 400, "context_length_exceeded"),
            (TurnError::Invalid { message: "x".into(), param: Some("stop") }, 400, "invalid_value"),
            (TurnError::Overloaded { retry_after }, 429, "rate_limit_exceeded"),
            (TurnError::StoreUnavailable("disk full".into()), 503, "store_unavailable"),
            (TurnError::ShuttingDown, 503, "shutting_down"),
            (TurnError::Internal("x".into()), 500, "internal_error"),
        ];
        for (error, status, code) in table {
            let api = ApiError::from(error.clone());
            assert_eq!((api.status.as_u16(), api.code), (status, Some(code)), "{error:?}");
        }
    }

    #[test]
    fn retry_after_is_rounded_up_to_whole_seconds() {
        for (millis, expected) in [(0, "1"), (900, "1"), (1200, "2"), (3000, "3")] {
            let retry_after = Duration::from_millis(millis);
            let response = ApiError::from(TurnError::Overloaded { retry_after }).error_response();
            assert_eq!(response.headers().get(header::RETRY_AFTER).expect("a 429 says when"), expected);
        }
    }
}
