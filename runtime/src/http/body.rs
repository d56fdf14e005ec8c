//! The request body as an extractor: read up to the limit, then parsed as a JSON object.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header;
use actix_web::web::{Bytes, BytesMut};
use actix_web::{FromRequest, HttpRequest};
use futures_util::StreamExt;

use super::error::ApiError;
use super::fields::Fields;
use super::Http;

/// Until the answer to a slow body has been decided on.
const HOLD: Duration = Duration::from_secs(1);

/// A POST's decoded body.
pub(crate) struct Body(pub(crate) Fields);

impl FromRequest for Body {
    type Error = ApiError;
    type Future = Pin<Box<dyn Future<Output = Result<Self, ApiError>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let (limit, timeout) = {
            let settings = &Http::of(request).settings;
            (settings.max_body, settings.body_timeout)
        };
        let declared =
            request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let mut payload = payload.take();
        Box::pin(async move {
            let reading = read(&mut payload, declared.unwrap_or(0), limit);
            let Ok(read) = actix_web::rt::time::timeout(timeout, reading).await else {
                // actix waits for the rest of a chunked body that nobody holds, and closes the connection of one that somebody does.
                actix_web::rt::spawn(async move {
                    actix_web::rt::time::sleep(HOLD).await;
                    drop(payload);
                });
                return Err(ApiError::body_too_slow(timeout));
            };
            let bytes = read?;
            Fields::parse(&bytes).map(Body)
        })
    }
}

async fn read(payload: &mut Payload, declared: usize, limit: usize) -> Result<Bytes, ApiError> {
    if declared > limit {
        return Err(ApiError::body_too_large(limit));
    }
    // The declared length is the client's word: grow with what really comes.
    let mut body = BytesMut::with_capacity(declared.min(64 * 1024));
    while let Some(chunk) = payload.next().await {
        let chunk = chunk.map_err(|error| ApiError::bad_json(format!("the body could not be read: {error}")))?;
        if body.len() + chunk.len() > limit {
            return Err(ApiError::body_too_large(limit));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}
