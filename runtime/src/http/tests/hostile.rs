//! Bad requests: each gets a 4xx that names the field, none reaches a session, and the server goes on.

use serde_json::{json, Value};

use super::fake::{Fake, Script};
use super::{config, post, post_json, send};
use crate::messages::session::TurnError;

const GENERATING: [&str; 3] = ["/v1/responses", "/v1/chat/completions", "/v1/completions"];
const POSTS: [&str; 5] = ["/v1/responses", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"];

/// A good body of this endpoint with one field replaced.
fn body_with(path: &str, field: &str, value: Value) -> Value {
    let mut body = match path {
        "/v1/responses" => json!({"input": "x"}),
        "/v1/chat/completions" => json!({"messages": [{"role": "user", "content": "x"}]}),
        "/v1/completions" | "/tokenize" => json!({"prompt": "x"}),
        "/detokenize" => json!({"tokens": [1]}),
        other => panic!("no such endpoint {other}"),
    };
    body[field] = value;
    body
}

/// Sends raw text so that numbers beyond f64 and the like arrive as they are.
async fn expect_400(path: &str, body: String) -> Value {
    let fake = Fake::replying();
    let answer = send(&config(), &fake, post(path, body.clone())).await;
    let shown: String = body.chars().take(200).collect();
    assert_eq!(answer.status, 400, "{path} {shown}: {}", answer.body);
    assert!(fake.turns.lock().is_empty(), "{path} {shown} reached the session");
    let error = answer.error();
    assert_eq!(error["type"], "invalid_request_error", "{path} {shown}");
    error
}

#[actix_web::test]
async fn bodies_that_are_not_json_objects() {
    let deep = format!(r#"{{"input": {}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"{".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"\"x\"".to_vec(),
        b"{} {}".to_vec(),
        b"{'input': 'x'}".to_vec(),
        b"{\"input\": \"x\",}".to_vec(),
        b"{\"input\": \"\xff\xfe\"}".to_vec(),
        b"\xef\xbb\xbf{\"input\": \"x\"}".to_vec(),
        b"{\"input\": \"\\ud83d\"}".to_vec(),
        b"{\"input\": \"\\ude00\\ud83d\"}".to_vec(),
        b"{\"input\": \"a\nb\"}".to_vec(),
        b"{\"temperature\": NaN}".to_vec(),
        b"{\"temperature\": Infinity}".to_vec(),
        b"{\"temperature\": -Infinity}".to_vec(),
        b"{\"temperature\": 1e999}".to_vec(),
        b"{\"temperature\": 0x1}".to_vec(),
        b"{\"temperature\": 01}".to_vec(),
        b"\0\0\0\0".to_vec(),
        deep.into_bytes(),
    ];
    let fake = Fake::replying();
    for path in POSTS {
        for body in &bodies {
            let answer = send(&config(), &fake, post(path, body.clone())).await;
            let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
            assert_eq!(
                (answer.status.as_u16(), answer.error()["code"].as_str()),
                (400, Some("invalid_json")),
                "{path} {shown}"
            );
        }
    }
    assert!(fake.turns.lock().is_empty());
}

#[actix_web::test]
async fn numbers_out_of_range_or_of_the_wrong_type() {
    let floats = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"];
    let bad_floats = [
        "-2.5",
        "1e308",
        "-1e308",
        "100",
        "\"1\"",
        "\"NaN\"",
        "true",
        "[]",
        "{}",
        "[0.5]",
        "1e30",
        "123456789012345678901234567890",
    ];
    let integers = ["seed", "top_k", "min_tokens", "max_tokens", "max_output_tokens", "max_completion_tokens"];
    let bad_integers = [
        "0.5",
        "1.0",
        "1e3",
        "1e308",
        "\"1\"",
        "true",
        "[]",
        "{}",
        "123456789012345678901234567890",
        "-123456789012345678901234567890",
    ];
    for path in GENERATING {
        for (fields, values) in [(&floats, &bad_floats[..]), (&integers, &bad_integers[..])] {
            for field in fields.iter().filter(|field| applies(path, field)) {
                for value in values {
                    let error = expect_400(path, raw(path, field, value)).await;
                    assert_eq!(error["param"], *field, "{path} {field}={value}");
                    assert!(error["message"].as_str().expect("text").contains(field), "{error}");
                }
            }
        }
        for (field, value) in [
            ("top_p", "0"),
            ("top_p", "1.01"),
            ("top_p", "1e-300"),
            ("repetition_penalty", "0"),
            ("min_p", "-0.1"),
            ("temperature", "2.01"),
            ("top_k", "-2"),
            ("min_tokens", "-1"),
            ("seed", "18446744073709551616"),
            ("min_tokens", "4294967296"),
            ("n", "2"),
            ("n", "0"),
        ] {
            if applies(path, field) {
                assert_eq!(expect_400(path, raw(path, field, value)).await["param"], field, "{path} {field}={value}");
            }
        }
    }
    for (path, field) in [
        ("/v1/responses", "max_output_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/completions", "max_tokens"),
    ] {
        for value in ["0", "-1", "4294967296"] {
            assert_eq!(expect_400(path, raw(path, field, value)).await["param"], field, "{path} {value}");
        }
        let mut body = body_with(path, "min_tokens", json!(9));
        body[field] = json!(8);
        assert_eq!(expect_400(path, body.to_string()).await["param"], "min_tokens");
    }
}

fn applies(path: &str, field: &str) -> bool {
    match field {
        "max_tokens" => path != "/v1/responses",
        "max_output_tokens" => path == "/v1/responses",
        "max_completion_tokens" => path == "/v1/chat/completions",
        "n" => path != "/v1/responses",
        _ => true,
    }
}

fn raw(path: &str, field: &str, value: &str) -> String {
    body_with(path, field, json!("VALUE")).to_string().replace("\"VALUE\"", value)
}

#[actix_web::test]
async fn fields_that_ask_for_what_is_not_offered() {
    let long = "x".repeat(2000);
    let many: Vec<String> = (0..17).map(|i| i.to_string()).collect();
    let everywhere = [
        ("stop", json!("")),
        ("stop", json!([""])),
        ("stop", json!([1])),
        ("stop", json!({})),
        ("stop", json!(many)),
        ("stop", json!([long])),
        ("stop_token_ids", json!([300])),
        ("stop_token_ids", json!([-1])),
        ("stop_token_ids", json!("1")),
        ("logit_bias", json!([])),
        ("logit_bias", json!({"300": 1})),
        ("logit_bias", json!({"-1": 1})),
        ("logit_bias", json!({"x": 1})),
        ("logit_bias", json!({"1": 101})),
        ("logit_bias", json!({"1": "1"})),
        ("ignore_eos", json!(1)),
        ("stream", json!("true")),
        ("metadata", json!("x")),
        ("metadata", json!({"k": 1})),
        ("metadata", json!({"k": long})),
        ("metadata", json!({long.as_str(): "v"})),
        ("metadata", many.iter().map(|key| (key.clone(), json!("v"))).collect()),
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("tool_choice", json!("required")),
        ("model", json!(1)),
    ];
    let chat_and_completions = [
        ("logprobs", json!(true)),
        ("logprobs", json!(5)),
        ("top_logprobs", json!(1)),
        ("response_format", json!({"type": "json_object"})),
        ("best_of", json!(2)),
        ("stream_options", json!([])),
        ("stream_options", json!({"include_usage": 1})),
        ("guided_regex", json!("x")),
    ];
    let by_path = [
        ("/v1/responses", "input", json!("")),
        ("/v1/responses", "input", json!([])),
        ("/v1/responses", "input", json!(null)),
        ("/v1/responses", "input", json!(7)),
        ("/v1/responses", "input", json!({"role": "user"})),
        ("/v1/responses", "instructions", json!(["x"])),
        ("/v1/responses", "truncation", json!("auto")),
        ("/v1/responses", "text.format", json!({"type": "json_schema"})),
        ("/v1/responses", "background", json!(true)),
        ("/v1/responses", "conversation", json!("conv_1")),
        ("/v1/responses", "prompt", json!({"id": "pmpt_1"})),
        ("/v1/responses", "store", json!("yes")),
        ("/v1/responses", "service_tier", json!("gold")),
        ("/v1/responses", "include", json!(["message.output_text.logprobs"])),
        ("/v1/responses", "previous_response_id", json!(5)),
        ("/v1/chat/completions", "messages", json!([])),
        ("/v1/chat/completions", "messages", json!(null)),
        ("/v1/chat/completions", "messages", json!("x")),
        ("/v1/chat/completions", "messages[0]", json!([null])),
        ("/v1/chat/completions", "messages[0].content", json!([{"role": "user"}])),
        ("/v1/chat/completions", "messages[0].role", json!([{"role": "root", "content": "x"}])),
        ("/v1/chat/completions", "modalities", json!(["text", "audio"])),
        ("/v1/completions", "prompt", json!("")),
        ("/v1/completions", "prompt", json!([])),
        ("/v1/completions", "prompt", json!([[]])),
        ("/v1/completions", "prompt", json!({"x": 1})),
        ("/v1/completions", "prompt[1]", json!([1, "x"])),
        ("/v1/completions", "prompt[1]", json!(["x", 1])),
        ("/v1/completions", "prompt[0]", json!([300])),
        ("/v1/completions", "prompt[0]", json!([-1])),
        ("/v1/completions", "prompt[0]", json!([1.5])),
        ("/v1/completions", "prompt[0][1]", json!([[1, 300]])),
        ("/v1/completions", "prompt", json!(vec!["x"; 33])),
        ("/v1/completions", "echo", json!(true)),
        ("/v1/completions", "suffix", json!("x")),
        ("/tokenize", "prompt", json!(null)),
        ("/tokenize", "prompt", json!(["x"])),
        ("/tokenize", "messages", json!([{"role": "user", "content": "x"}])),
        ("/tokenize", "add_special_tokens", json!("no")),
        ("/detokenize", "tokens", json!(null)),
        ("/detokenize", "tokens", json!("x")),
        ("/detokenize", "tokens[0]", json!([300])),
    ];
    for path in GENERATING {
        for (field, value) in &everywhere {
            let error = expect_400(path, body_with(path, field, value.clone()).to_string()).await;
            assert!(error["param"].as_str().expect("a param").starts_with(field), "{path} {field}={value}: {error}");
        }
    }
    for path in &GENERATING[1..] {
        for (field, value) in &chat_and_completions {
            let error = expect_400(path, body_with(path, field, value.clone()).to_string()).await;
            assert!(error["param"].as_str().expect("a param").starts_with(field), "{path} {field}={value}: {error}");
        }
    }
    for (path, param, value) in by_path {
        let body = match param {
            "text.format" => body_with(path, "text", json!({"format": value})),
            _ => body_with(path, param.split(['[', '.']).next().expect("a name"), value),
        };
        assert_eq!(expect_400(path, body.to_string()).await["param"], param, "{path} {body}");
    }
}

#[actix_web::test]
async fn harmless_values_of_refused_fields_are_accepted() {
    let fake = Fake::replying();
    for (path, field, value) in [
        ("/v1/responses", "tools", json!([])),
        ("/v1/responses", "tool_choice", json!("none")),
        ("/v1/responses", "truncation", json!("disabled")),
        ("/v1/responses", "text", json!({"format": {"type": "text"}})),
        ("/v1/responses", "background", json!(false)),
        ("/v1/responses", "parallel_tool_calls", json!(true)),
        ("/v1/responses", "previous_response_id", json!(null)),
        ("/v1/responses", "temperature", json!(1e-300)),
        ("/v1/chat/completions", "n", json!(1)),
        ("/v1/chat/completions", "logprobs", json!(false)),
        ("/v1/chat/completions", "response_format", json!({"type": "text"})),
        ("/v1/chat/completions", "unknown", json!({"a": [1, {"b": null}]})),
        ("/v1/chat/completions", "seed", json!(-1)),
        ("/v1/chat/completions", "seed", json!(u64::MAX)),
        ("/v1/chat/completions", "top_k", json!(-1)),
        ("/v1/chat/completions", "stop", json!(null)),
        ("/v1/completions", "echo", json!(false)),
        ("/v1/completions", "suffix", json!(null)),
        ("/v1/completions", "max_tokens", json!(u32::MAX)),
    ] {
        let answer = post_json(&fake, path, body_with(path, field, value)).await;
        assert_eq!(answer.status, 200, "{path} {field}: {}", answer.body);
    }
}

#[actix_web::test]
async fn of_duplicated_keys_the_last_counts() {
    let fake = Fake::replying();
    let body = r#"{"input": "a", "input": "b", "temperature": "x", "temperature": 0}"#;
    assert_eq!(send(&config(), &fake, post("/v1/responses", body)).await.status, 200);
    assert_eq!(fake.last_turn().sampling.temperature, 0.0);
}

#[actix_web::test]
async fn unknown_models_and_ids_are_404() {
    let fake = Fake::replying();
    for path in POSTS {
        for model in ["gpt-4", "", "ORG/TINY"] {
            let answer = post_json(&fake, path, body_with(path, "model", json!(model))).await;
            assert_eq!(
                (answer.status.as_u16(), answer.error()["code"].as_str()),
                (404, Some("model_not_found")),
                "{path}"
            );
        }
    }
    for id in [
        "",
        "x",
        "resp_",
        "resp_1",
        "resp_0123456789ABCDEF0123456789ABCDEF",
        "msg_0123456789abcdef0123456789abcdef",
        &"x".repeat(5000),
    ] {
        let answer = post_json(&fake, "/v1/responses", json!({"input": "x", "previous_response_id": id})).await;
        let error = answer.error();
        assert_eq!((answer.status.as_u16(), error["param"].as_str()), (404, Some("previous_response_id")), "{id:.40}");
        assert!(error["message"].as_str().expect("text").len() < 200);
    }
    assert!(fake.turns.lock().is_empty());
}

#[actix_web::test]
async fn what_a_session_refuses_keeps_its_status() {
    let too_long = TurnError::ContextLengthExceeded { prompt_tokens: 5000, limit: 2048 };
    for (error, status, code) in [
        (too_long.clone(), 400, "context_length_exceeded"),
        (TurnError::Overloaded { retry_after: std::time::Duration::from_secs(2) }, 429, "rate_limit_exceeded"),
        (TurnError::StoreUnavailable("disk full".into()), 503, "store_unavailable"),
        (TurnError::Conflict("made with another model".into()), 409, "conflict"),
        (TurnError::NotFound("resp_1".into()), 404, "response_not_found"),
    ] {
        let fake = Fake::new(Script::Refuse(error));
        for path in GENERATING {
            for stream in [false, true] {
                let answer = post_json(&fake, path, body_with(path, "stream", json!(stream))).await;
                assert_eq!((answer.status.as_u16(), answer.error()["code"].as_str()), (status, Some(code)), "{path}");
                assert_eq!(answer.headers.contains_key("retry-after"), matches!(status, 429 | 503));
            }
        }
    }
    let fake = Fake::new(Script::Refuse(too_long));
    for (path, param) in GENERATING.into_iter().zip(["input", "messages", "prompt"]) {
        let answer = post_json(&fake, path, body_with(path, "stream", json!(true))).await;
        assert_eq!(answer.error()["param"], param, "{path}");
    }
}
