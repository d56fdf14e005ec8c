//! The whole app against a fake service: routes and guard, wire formats, hostile input, clients that go away.

mod fake;
mod guarding;
mod hostile;
mod leaving;
mod wire;

use std::sync::Arc;

use actix_web::body::to_bytes;
use actix_web::http::header::{self, HeaderMap};
use actix_web::http::{Method, StatusCode};
use actix_web::test::{init_service, try_call_service, TestRequest};
use actix_web::web;
use keepsake_config::{Config, Secret, TenantConfig};
use serde_json::Value;

use self::fake::Fake;
use super::{app, Http};

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// Checks OpenAI's error shape on the way.
    fn error(&self) -> Value {
        let body = self.json();
        let error = &body["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{body}");
        assert!(
            error.as_object().expect("an object").contains_key("param") && body.as_object().expect("one").len() == 1,
            "{body}"
        );
        error.clone()
    }

    /// The events of a stream: name (or "") and data (parsed, or a string such as `[DONE]`); comments are left out.
    fn events(&self) -> Vec<(String, Value)> {
        let frames = self.body.split_terminator("\n\n").filter(|frame| !frame.starts_with(':'));
        let events = frames.map(|frame| {
            let (mut name, mut data) = ("", "");
            for line in frame.lines() {
                match line.split_once(": ").expect("field: value") {
                    ("event", value) => name = value,
                    ("data", value) => data = value,
                    other => panic!("unexpected line {other:?}"),
                }
            }
            (name.to_owned(), serde_json::from_str(data).unwrap_or_else(|_| data.into()))
        });
        events.collect()
    }
}

fn config() -> Config {
    Config::default()
}

fn config_with_keys() -> Config {
    let tenant =
        |name: &str, key: &str| TenantConfig { name: name.to_owned(), keys: vec![Secret::new(key)], weight: 1.0 };
    Config { tenants: vec![tenant("a", "key-a"), tenant("b", "key-b")], ..Config::default() }
}

async fn send(config: &Config, fake: &Arc<Fake>, request: TestRequest) -> Answer {
    let http = web::Data::new(Http::new(config, fake.clone()));
    let service = init_service(app(http)).await;
    let response = match try_call_service(&service, request.to_request()).await {
        Ok(response) => response.map_into_boxed_body().into_parts().1,
        Err(error) => error.error_response(),
    };
    let (status, headers) = (response.status(), response.headers().clone());
    let body = to_bytes(response.into_body()).await.expect("the body ends");
    Answer { status, headers, body: String::from_utf8(body.to_vec()).expect("UTF-8") }
}

fn request(method: Method, path: &str) -> TestRequest {
    TestRequest::with_uri(path).method(method).insert_header((header::HOST, "127.0.0.1:8000"))
}

fn post(path: &str, body: impl Into<web::Bytes>) -> TestRequest {
    request(Method::POST, path).insert_header((header::CONTENT_TYPE, "application/json")).set_payload(body)
}

async fn post_json(fake: &Arc<Fake>, path: &str, body: Value) -> Answer {
    send(&config(), fake, post(path, body.to_string())).await
}
