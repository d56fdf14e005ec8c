//! What every request passes before its handler, in this order: request id and span, panic fence, header size, Host, API key,
//! content type and encoding. One middleware around the whole app, so no route can be forgotten.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use actix_web::body::BoxBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::http::Method;
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage, HttpRequest};
use futures_util::FutureExt;
use tracing::Instrument;

use super::error::ApiError;
use super::Http;

/// The one route that needs no key: a supervisor asks it.
pub(crate) const OPEN_PATH: &str = "/health";

/// Request line and headers together. actix's own parser stops at 128 KiB.
const MAX_HEADER_BYTES: usize = 32 * 1024;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

pub(crate) async fn guard(request: ServiceRequest, next: Next<BoxBody>) -> Result<ServiceResponse<BoxBody>, Error> {
    let started = Instant::now();
    let request_id = request_id(request.request());
    let span = tracing::info_span!(
        "http",
        method = %request.method(),
        path = %shorten(request.path(), 200),
        request_id = request_id.to_str().unwrap_or_default(),
        tenant = tracing::field::Empty,
    );
    let metrics = Http::of(request.request()).service.metrics().clone();
    async move {
        let refused = admit(&request).err();
        let answer = match refused {
            Some(refused) => Ok(request.error_response(refused)),
            None => match AssertUnwindSafe(next.call(request)).catch_unwind().await {
                Ok(answer) => answer,
                Err(_panic) => Err(panicked()),
            },
        };
        // Errors of extractors arrive as responses; these are what the framework itself gave up on.
        let status = match &answer {
            Ok(response) => response.status(),
            Err(error) => error.as_response_error().status_code(),
        };
        metrics.http_response(status.as_u16());
        tracing::debug!(status = status.as_u16(), elapsed = ?started.elapsed(), "answered");
        answer.map(|mut response| {
            response.headers_mut().insert(REQUEST_ID, request_id);
            response
        })
    }
    .instrument(span)
    .await
}

fn admit(request: &ServiceRequest) -> Result<(), ApiError> {
    let settings = &Http::of(request.request()).settings;
    check_header_size(request)?;
    settings.hosts.check(request.request())?;
    if request.path() != OPEN_PATH {
        let authorization = request.headers().get(header::AUTHORIZATION);
        let tenant = settings.keys.tenant(authorization.map(HeaderValue::as_bytes))?;
        tracing::Span::current().record("tenant", tenant.as_str());
        request.extensions_mut().insert(tenant);
    }
    if *request.method() == Method::POST {
        check_content_type(request)?;
        check_content_encoding(request)?;
    }
    Ok(())
}

fn check_header_size(request: &ServiceRequest) -> Result<(), ApiError> {
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    let line = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    match headers.sum::<usize>() + line {
        size if size > MAX_HEADER_BYTES => Err(ApiError::header_too_large(MAX_HEADER_BYTES)),
        _ => Ok(()),
    }
}

/// Besides being right, this keeps web pages out: a cross-site form can post text, but not JSON without a preflight, which
/// this server never grants.
fn check_content_type(request: &ServiceRequest) -> Result<(), ApiError> {
    let content_type = request.headers().get(header::CONTENT_TYPE);
    let content_type = content_type.map_or("", |value| value.to_str().unwrap_or("\u{fffd}"));
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    match essence.eq_ignore_ascii_case("application/json") {
        true => Ok(()),
        false => Err(ApiError::not_json(&shorten(content_type, 80))),
    }
}

/// A packed body would be read as JSON, and refused for the wrong reason.
fn check_content_encoding(request: &ServiceRequest) -> Result<(), ApiError> {
    let encodings = request.headers().get_all(header::CONTENT_ENCODING);
    let mut texts = encodings.map(|value| value.to_str().unwrap_or("\u{fffd}").trim());
    match texts.find(|text| !text.is_empty() && !text.eq_ignore_ascii_case("identity")) {
        Some(encoding) => Err(ApiError::encoded(&shorten(encoding, 80))),
        None => Ok(()),
    }
}

/// The client's own id if it is a plain short token, else a random one.
fn request_id(request: &HttpRequest) -> HeaderValue {
    let is_plain = |value: &&HeaderValue| {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        !value.is_empty() && value.len() <= 128 && value.as_bytes().iter().all(plain)
    };
    match request.headers().get(&REQUEST_ID).filter(is_plain) {
        Some(value) => value.clone(),
        None => HeaderValue::from_str(&format!("req_{:032x}", rand::random::<u128>())).expect("hexadecimal digits"),
    }
}

fn panicked() -> Error {
    tracing::error!("a request handler panicked");
    ApiError::internal("the server failed to handle this request").into()
}

fn shorten(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).collect()
}
