//! Keys, hosts, content types, limits, unknown routes: what the guard lets through.

use actix_web::http::{header, Method};
use serde_json::json;

use super::fake::{Fake, Script};
use super::{config, config_with_keys, post, post_json, request, send};
use crate::http::routes::endpoints;
use crate::messages::session::TurnError;

/// A path that the pattern matches.
fn example(pattern: &str) -> String {
    pattern.replace("{id}", "resp_0123456789abcdef0123456789abcdef").replace("{id:.+}", "org/tiny")
}

#[actix_web::test]
async fn every_route_but_health_needs_a_key() {
    let fake = Fake::replying();
    let mut num_open = 0;
    for endpoint in endpoints() {
        let path = example(endpoint.path);
        for authorization in [None, Some("Bearer wrong"), Some("Basic key-a"), Some("key-a"), Some("Bearer")] {
            let mut without = request(endpoint.method.clone(), &path);
            if let Some(authorization) = authorization {
                without = without.insert_header((header::AUTHORIZATION, authorization));
            }
            let answer = send(&config_with_keys(), &fake, without).await;
            if endpoint.path == "/health" {
                assert_eq!(answer.status, 200);
                num_open += 1;
                continue;
            }
            assert_eq!(answer.status, 401, "{} {path} with {authorization:?}", endpoint.method);
            assert_eq!(answer.error()["code"], "invalid_api_key");
            assert_eq!(answer.headers.get(header::WWW_AUTHENTICATE).expect("a challenge"), "Bearer");
        }
        let with = request(endpoint.method.clone(), &path).insert_header((header::AUTHORIZATION, "bearer key-b"));
        let answer = send(&config_with_keys(), &fake, with).await;
        assert_ne!(answer.status, 401, "{} {path}", endpoint.method);
    }
    assert_eq!(num_open, 5, "/health was tried with every header");
    assert!(fake.turns.lock().is_empty());
}

#[actix_web::test]
async fn unknown_routes_and_methods_are_behind_the_key_too() {
    let fake = Fake::replying();
    let strange = [
        (Method::GET, "/"),
        (Method::GET, "/v1"),
        (Method::POST, "/invocations"),
        (Method::GET, "/health/"),
        (Method::GET, "//health"),
        (Method::GET, "/%68ealth"),
        (Method::GET, "/v1/../health"),
        (Method::PUT, "/v1/responses"),
        (Method::DELETE, "/v1/models"),
        (Method::OPTIONS, "/v1/chat/completions"),
        (Method::TRACE, "/metrics"),
    ];
    for (method, path) in strange {
        let answer = send(&config_with_keys(), &fake, request(method.clone(), path)).await;
        assert_eq!(answer.status, 401, "{method} {path}");
        let answer = send(&config(), &fake, request(method.clone(), path)).await;
        assert!(matches!(answer.status.as_u16(), 404 | 405 | 415 | 200), "{method} {path}: {}", answer.status);
    }
}

#[actix_web::test]
async fn unknown_urls_are_404_and_wrong_methods_405_in_the_error_shape() {
    let fake = Fake::replying();
    let answer = send(&config(), &fake, request(Method::GET, "/v2/nothing")).await;
    assert_eq!((answer.status.as_u16(), answer.error()["code"].as_str()), (404, Some("unknown_url")));
    for (method, path, allow) in [
        (Method::GET, "/v1/responses", "POST"),
        (Method::PUT, "/v1/responses/resp_1", "GET, HEAD, DELETE"),
        (Method::DELETE, "/metrics", "GET, HEAD"),
    ] {
        let answer = send(&config(), &fake, request(method, path)).await;
        assert_eq!((answer.status.as_u16(), answer.error()["code"].as_str()), (405, Some("method_not_allowed")));
        assert_eq!(answer.headers.get(header::ALLOW).expect("a 405 names the methods"), allow);
    }
    let head = send(&config(), &fake, request(Method::HEAD, "/health")).await;
    assert_eq!(head.status, 200);
}

#[actix_web::test]
async fn a_loopback_server_answers_only_to_its_own_names() {
    let fake = Fake::replying();
    let mut with_name = config();
    with_name.server.allowed_hosts = vec!["chat.example.org".to_owned()];
    let mut public = config();
    public.server.bind = "0.0.0.0:8000".parse().expect("an address");
    for (config, host, status) in [
        (config(), "localhost:8000", 200),
        (config(), "[::1]:8000", 200),
        (config(), "evil.example.org", 403),
        (config(), "chat.example.org", 403),
        (with_name.clone(), "chat.example.org", 200),
        (with_name, "evil.example.org", 403),
        (public, "anything.example.org", 200),
    ] {
        let request = request(Method::GET, "/v1/models").insert_header((header::HOST, host));
        let answer = send(&config, &fake, request).await;
        assert_eq!(answer.status, status, "{host}");
    }
    let absolute = request(Method::GET, "http://evil.example.org/v1/models");
    assert_eq!(send(&config(), &fake, absolute).await.status, 403);
    let nameless = actix_web::test::TestRequest::with_uri("/v1/models");
    assert_eq!(send(&config(), &fake, nameless).await.status, 403);
}

#[actix_web::test]
async fn posts_must_be_json_by_content_type() {
    let fake = Fake::replying();
    for (content_type, status) in [
        (Some("application/json"), 200),
        (Some("Application/JSON; charset=utf-8"), 200),
        (Some("text/plain"), 415),
        (Some("application/x-www-form-urlencoded"), 415),
        (Some("application/jsonx"), 415),
        (Some("text/plain, application/json"), 415),
        (None, 415),
    ] {
        let mut request = request(Method::POST, "/tokenize").set_payload(r#"{"prompt": "x"}"#);
        if let Some(content_type) = content_type {
            request = request.insert_header((header::CONTENT_TYPE, content_type));
        }
        assert_eq!(send(&config(), &fake, request).await.status, status, "{content_type:?}");
    }
}

#[actix_web::test]
async fn bodies_and_headers_have_limits() {
    let fake = Fake::replying();
    let mut small = config();
    small.server.max_body = "100 B".parse().expect("a size");
    let body = |length: usize| {
        let json = r#"{"prompt": "x"}"#;
        json.to_owned() + &" ".repeat(length - json.len())
    };
    assert_eq!(send(&small, &fake, post("/tokenize", body(100))).await.status, 200);
    for length in [101, 10_000_000] {
        let answer = send(&small, &fake, post("/tokenize", body(length))).await;
        assert_eq!((answer.status.as_u16(), answer.error()["code"].as_str()), (413, Some("request_too_large")));
    }
    let ten_megabytes = send(&config(), &fake, post("/v1/responses", body(10_000_000))).await;
    assert_eq!(ten_megabytes.status, 413);

    let long = request(Method::GET, "/v1/models").insert_header(("x-long", "x".repeat(40_000)));
    let answer = send(&config(), &fake, long).await;
    assert_eq!((answer.status.as_u16(), answer.error()["code"].as_str()), (431, Some("headers_too_large")));
}

#[actix_web::test]
async fn a_panic_is_a_500_and_the_next_request_works() {
    let panicking = Fake::new(Script::Panic);
    for (path, body) in [
        ("/v1/responses", json!({"input": "x"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]})),
        ("/v1/completions", json!({"prompt": "x"})),
    ] {
        let answer = post_json(&panicking, path, body).await;
        assert_eq!((answer.status.as_u16(), answer.error()["type"].as_str()), (500, Some("server_error")), "{path}");
    }
    assert_eq!(send(&config(), &panicking, request(Method::GET, "/v1/models")).await.status, 200);
}

#[actix_web::test]
async fn request_ids_come_back() {
    let fake = Fake::replying();
    for (sent, kept) in [("abc-123", true), ("two words", false), ("", false)] {
        let request = request(Method::GET, "/health").insert_header(("x-request-id", sent));
        let answer = send(&config(), &fake, request).await;
        let id = answer.headers.get("x-request-id").expect("every answer has one").to_str().expect("text").to_owned();
        assert_eq!(id == sent, kept, "{sent:?} came back as {id:?}");
        assert!(!id.is_empty());
    }
}

#[actix_web::test]
async fn probes() {
    let fake = Fake::replying();
    assert_eq!(send(&config(), &fake, request(Method::GET, "/ready")).await.status, 200);
    let draining = Fake::new(Script::Refuse(TurnError::ShuttingDown));
    assert_eq!(send(&config(), &draining, request(Method::GET, "/ready")).await.status, 503);
    assert_eq!(send(&config(), &draining, request(Method::GET, "/health")).await.status, 200);
    let refused = post_json(&draining, "/v1/responses", json!({"input": "x"})).await;
    assert_eq!(refused.status, 503);
    assert!(refused.headers.contains_key(header::RETRY_AFTER));

    let metrics = send(&config(), &draining, request(Method::GET, "/metrics")).await;
    assert!(metrics.body.contains("keepsake_http_responses_total{status=\"503\"} 2"), "{}", metrics.body);

    let models = send(&config(), &fake, request(Method::GET, "/v1/models")).await.json();
    assert_eq!(models["data"][0]["id"], "org/tiny");
    for (path, status) in [("/v1/models/org/tiny", 200), ("/v1/models/default", 200), ("/v1/models/gpt-4", 404)] {
        assert_eq!(send(&config(), &fake, request(Method::GET, path)).await.status, status, "{path}");
    }
}
