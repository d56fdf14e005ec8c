//! The wire formats of good requests: whole replies, streams, stored responses, what reaches the session.

use actix_web::http::Method;
use keepsake_model::sampler::SamplingParams;
use serde_json::{json, Value};

use super::fake::{Fake, Script, CREATED_AT, VOCAB_SIZE};
use super::{config, config_with_keys, post, post_json, request, send, Answer};
use crate::messages::session::{FinishReason, Prompt, TurnError};

fn hello() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(name, _)| name.as_str()).collect()
}

#[actix_web::test]
async fn a_whole_response() {
    let fake = Fake::replying();
    let body = json!({
        "model": "default", "input": "hi", "instructions": "be brief", "temperature": 0.7, "metadata": {"k": "v"},
        "max_output_tokens": 9, "some_future_field": {"x": [1]}, "reasoning": {"effort": "low"}, "service_tier": "auto",
    });
    let answer = post_json(&fake, "/v1/responses", body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let object = answer.json();
    let expected = [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("created_at", json!(CREATED_AT)),
        ("model", json!("org/tiny")),
        ("instructions", json!("be brief")),
        ("temperature", json!(0.7)),
        ("metadata", json!({"k": "v"})),
        ("max_output_tokens", json!(9)),
        ("previous_response_id", Value::Null),
        ("incomplete_details", Value::Null),
        ("error", Value::Null),
        ("store", json!(true)),
        ("truncation", json!("disabled")),
    ];
    for (field, value) in expected {
        assert_eq!(object[field], value, "{field}");
    }
    let item = &object["output"][0];
    assert_eq!((item["role"].as_str(), item["status"].as_str()), (Some("assistant"), Some("completed")));
    assert_eq!(item["content"], json!([{"type": "output_text", "text": "Hello \u{1f600}", "annotations": []}]));
    assert_eq!(
        object["usage"],
        json!({
            "input_tokens": 100, "output_tokens": 2, "total_tokens": 102, "input_tokens_details": {"cached_tokens": 64},
            "output_tokens_details": {"reasoning_tokens": 0},
            "keepsake": {"tiers": {"device": 64}, "recomputed": 0, "ttft_ms": 5.0},
        })
    );
    let turn = fake.last_turn();
    assert_eq!((turn.max_output_tokens, turn.store, turn.parent), (Some(9), true, None));
    assert_eq!(turn.instructions.as_deref(), Some("be brief"));
}

#[actix_web::test]
async fn a_streamed_response_has_the_official_events_in_order() {
    for (finish_reason, last, status) in [
        (FinishReason::Stop, "response.completed", "completed"),
        (FinishReason::Length, "response.incomplete", "incomplete"),
    ] {
        let fake = Fake::new(Script::Reply(vec!["Hel", "lo"], finish_reason));
        let answer = post_json(&fake, "/v1/responses", json!({"input": "hi", "stream": true})).await;
        let events = answer.events();
        let expected = [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            last,
        ];
        assert_eq!(names(&events), expected);
        for (sequence, (name, data)) in events.iter().enumerate() {
            assert_eq!(
                (data["type"].as_str(), data["sequence_number"].as_u64()),
                (Some(name.as_str()), Some(sequence as u64))
            );
        }
        assert_eq!(events[0].1["response"]["status"], "in_progress");
        let item_id = &events[2].1["item"]["id"];
        assert!(events[3..8].iter().all(|(_, data)| data["item_id"] == *item_id));
        assert_eq!(events[6].1["text"], "Hello");
        let response = &events[9].1["response"];
        assert_eq!((response["status"].as_str(), &response["output"][0]["id"]), (Some(status), item_id));
        assert_eq!(response["id"], events[0].1["response"]["id"]);
        assert_eq!(response["usage"]["input_tokens_details"]["cached_tokens"], 64);
        let reason = &response["incomplete_details"]["reason"];
        assert_eq!(reason.as_str(), (finish_reason == FinishReason::Length).then_some("max_output_tokens"));
    }
}

#[actix_web::test]
async fn a_reply_without_text_still_opens_and_closes_its_item() {
    let fake = Fake::new(Script::Reply(vec![], FinishReason::Stop));
    let events = post_json(&fake, "/v1/responses", json!({"input": "hi", "stream": true})).await.events();
    assert_eq!(events.len(), 8);
    assert_eq!(events[4].1["text"], "");
    let events = post_json(&fake, "/v1/chat/completions", json!({"messages": hello(), "stream": true})).await.events();
    assert_eq!(events.len(), 3, "role, finish, [DONE]");
}

#[actix_web::test]
async fn stored_responses_are_continued_read_and_deleted_by_their_tenant_only() {
    let fake = Fake::replying();
    let as_tenant = |request: actix_web::test::TestRequest, key: &str| {
        request.insert_header(("authorization", format!("Bearer {key}")))
    };
    let config = config_with_keys();
    let create = |body: Value| as_tenant(post("/v1/responses", body.to_string()), "key-a");
    let created =
        send(&config, &fake, create(json!({"input": "hi", "top_p": 0.3, "metadata": {"k": "v"}}))).await.json();
    let id = created["id"].as_str().expect("an id").to_owned();
    assert_eq!(id.len(), "resp_".len() + 32);

    let continued = send(&config, &fake, create(json!({"input": "more", "previous_response_id": id}))).await.json();
    assert_eq!(continued["previous_response_id"], json!(id));
    assert_eq!(fake.last_turn().parent.expect("a parent").to_string(), id["resp_".len()..]);

    let path = format!("/v1/responses/{id}");
    let get = |path: &str, key: &str| as_tenant(request(Method::GET, path), key);
    let mut read = send(&config, &fake, get(&path, "key-a")).await.json();
    read["completed_at"] = created["completed_at"].clone();
    assert_eq!(read, created);
    let items = send(&config, &fake, get(&format!("{path}/input_items"), "key-a")).await.json();
    assert_eq!(items["data"][0]["content"], json!([{"type": "input_text", "text": "hi"}]));

    let delete = |key: &str| as_tenant(request(Method::DELETE, &path), key);
    for foreign in [get(&path, "key-b"), get(&format!("{path}/input_items"), "key-b"), delete("key-b")] {
        let answer = send(&config, &fake, foreign).await;
        assert_eq!((answer.status.as_u16(), answer.error()["code"].as_str()), (404, Some("response_not_found")));
    }
    let deleted = send(&config, &fake, delete("key-a")).await.json();
    assert_eq!(deleted, json!({"id": id, "object": "response.deleted", "deleted": true}));
    assert_eq!(send(&config, &fake, get(&path, "key-a")).await.status, 404);
}

#[actix_web::test]
async fn a_stored_chat_completion_can_be_read_as_a_response() {
    let fake = Fake::replying();
    let body = json!({"messages": hello(), "store": true, "metadata": {"k": "v"}});
    let id = post_json(&fake, "/v1/chat/completions", body).await.json()["id"].as_str().expect("an id").to_owned();
    let path = id.replace("chatcmpl-", "/v1/responses/resp_");
    let read = send(&config(), &fake, request(Method::GET, &path)).await.json();
    assert_eq!((&read["metadata"], read["status"].as_str()), (&json!({"k": "v"}), Some("completed")));
    let items = send(&config(), &fake, request(Method::GET, &format!("{path}/input_items"))).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "hi");

    post_json(&fake, "/v1/chat/completions", json!({"messages": hello()})).await;
    assert!(!fake.last_turn().store, "chat completions are stored only if asked");
}

#[actix_web::test]
async fn a_whole_chat_completion() {
    let fake = Fake::new(Script::Reply(vec!["Hello"], FinishReason::Length));
    let body = json!({"model": "org/tiny", "messages": hello(), "max_completion_tokens": 3, "max_tokens": 7});
    let object = post_json(&fake, "/v1/chat/completions", body).await.json();
    assert_eq!((object["object"].as_str(), object["created"].as_u64()), (Some("chat.completion"), Some(CREATED_AT)));
    let choice = &object["choices"][0];
    assert_eq!(
        (choice["message"]["content"].as_str(), choice["finish_reason"].as_str()),
        (Some("Hello"), Some("length"))
    );
    assert_eq!(object["usage"]["prompt_tokens_details"]["cached_tokens"], 64);
    assert_eq!(fake.last_turn().max_output_tokens, Some(3));
}

fn check_chunks(answer: &Answer, object: &str, usage: bool) -> Vec<Value> {
    let mut chunks: Vec<Value> = answer
        .events()
        .into_iter()
        .map(|(name, data)| {
            assert_eq!(name, "", "chat streams have no event names");
            data
        })
        .collect();
    assert_eq!(chunks.pop().expect("a last event"), "[DONE]");
    for chunk in &chunks {
        assert_eq!(
            (&chunk["id"], &chunk["model"], &chunk["created"]),
            (&chunks[0]["id"], &json!("org/tiny"), &json!(CREATED_AT))
        );
        assert_eq!(chunk["object"], object);
    }
    if usage {
        let last = chunks.pop().expect("a usage chunk");
        assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &json!(102)));
    }
    assert!(chunks
        .iter()
        .all(|chunk| chunk["choices"].as_array().expect("choices").len() == 1 && chunk["usage"].is_null()));
    chunks
}

#[actix_web::test]
async fn streamed_chat_chunks() {
    let fake = Fake::replying();
    for usage in [true, false] {
        let body = json!({"messages": hello(), "stream": true, "stream_options": {"include_usage": usage}});
        let answer = post_json(&fake, "/v1/chat/completions", body).await;
        let chunks = check_chunks(&answer, "chat.completion.chunk", usage);
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(text, "Hello \u{1f600}");
        let reasons: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["finish_reason"].as_str()).collect();
        assert_eq!(reasons, [None, None, None, Some("stop")]);
    }
}

#[actix_web::test]
async fn streamed_completion_chunks() {
    let fake = Fake::replying();
    let body = json!({"prompt": "hi", "stream": true, "stream_options": {"include_usage": true}});
    let answer = post_json(&fake, "/v1/completions", body).await;
    let chunks = check_chunks(&answer, "text_completion", true);
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "Hello \u{1f600}");
    assert_eq!(chunks.last().expect("a finish chunk")["choices"][0]["finish_reason"], "stop");
}

#[actix_web::test]
async fn completions_take_text_ids_and_batches() {
    let fake = Fake::replying();
    let last = VOCAB_SIZE - 1;
    for (prompt, num_choices) in [
        (json!("a"), 1),
        (json!(["a"]), 1),
        (json!([1, 2, last]), 1),
        (json!([[1, 2]]), 1),
        (json!(["a", "b", "c"]), 3),
        (json!([[1], [2, 3]]), 2),
    ] {
        let answer = post_json(&fake, "/v1/completions", json!({"prompt": prompt})).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let object = answer.json();
        let indices: Vec<_> =
            object["choices"].as_array().expect("choices").iter().map(|choice| choice["index"].as_u64()).collect();
        assert_eq!(indices, (0..num_choices).map(Some).collect::<Vec<_>>());
        assert_eq!(object["usage"]["prompt_tokens"], 100 * num_choices);
    }
    let turns = fake.turns.lock();
    assert!(matches!(&turns[0].prompt, Prompt::Text(text) if text == "a"));
    assert!(matches!(&turns[2].prompt, Prompt::Tokens(ids) if *ids == [1, 2, last as u32]));
    assert!(turns.iter().all(|turn| turn.max_output_tokens == Some(16) && !turn.store));
}

#[actix_web::test]
async fn sampling_fields_reach_the_session_from_all_three_endpoints() {
    let fields = json!({
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": -0.5,
        "presence_penalty": 2, "seed": 42, "logit_bias": {"7": -100, "8": 1.5}, "min_tokens": 2, "ignore_eos": true,
        "stop_token_ids": [5, 6], "stop": ["own fox", "x"],
    });
    let expected = SamplingParams {
        temperature: 0.5,
        top_k: Some(40),
        top_p: 0.9,
        min_p: 0.05,
        repetition_penalty: 1.1,
        frequency_penalty: -0.5,
        presence_penalty: 2.0,
        seed: 42,
        logit_bias: vec![(7, -100.0), (8, 1.5)],
        min_tokens: 2,
        ignore_eos: true,
        stop_token_ids: vec![5, 6],
    };
    let fake = Fake::replying();
    for path in ["/v1/responses", "/v1/chat/completions", "/v1/completions"] {
        let mut body = fields.clone();
        body["input"] = json!("x");
        body["prompt"] = json!("x");
        body["messages"] = hello();
        if path == "/v1/responses" {
            body["prompt"] = Value::Null;
        }
        let answer = post_json(&fake, path, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        let turn = fake.last_turn();
        assert_eq!(format!("{:?}", turn.sampling), format!("{expected:?}"), "{path}");
        assert_eq!(turn.stop, ["own fox", "x"], "{path}");
    }
}

#[actix_web::test]
async fn failures_in_mid_stream_are_told() {
    for script in [Script::FailMidway(TurnError::Internal("device lost".into())), Script::EndEarly] {
        let fake = Fake::new(script);
        let chat = post_json(&fake, "/v1/chat/completions", json!({"messages": hello(), "stream": true})).await;
        let (name, data) = chat.events().pop().expect("events");
        assert_eq!((name.as_str(), data["error"]["type"].as_str()), ("error", Some("server_error")));
        let events = post_json(&fake, "/v1/responses", json!({"input": "x", "stream": true})).await.events();
        let (name, data) = events.last().expect("events");
        assert_eq!((name.as_str(), data["response"]["status"].as_str()), ("response.failed", Some("failed")));
        assert_eq!(data["response"]["error"]["code"], "server_error");
        assert!(data["response"]["error"]["message"].is_string());
        for (path, body) in [("/v1/completions", json!({"prompt": "x"})), ("/v1/responses", json!({"input": "x"}))] {
            assert_eq!(post_json(&fake, path, body).await.status, 500, "{path}");
        }
    }
}

#[actix_web::test]
async fn tokenize_and_detokenize() {
    let fake = Fake::replying();
    let table = [
        (json!({"prompt": "hi"}), json!([256, 104, 105])),
        (json!({"prompt": "hi", "add_special_tokens": false}), json!([104, 105])),
        (json!({"prompt": ""}), json!([256])),
        (json!({"messages": hello()}), json!([256, 104, 105])),
    ];
    for (body, tokens) in table {
        let answer = post_json(&fake, "/tokenize", body).await.json();
        let count = tokens.as_array().expect("ids").len();
        assert_eq!(answer, json!({"count": count, "max_model_len": 2048, "tokens": tokens}));
    }
    assert_eq!(post_json(&fake, "/detokenize", json!({"tokens": [104, 105]})).await.json(), json!({"prompt": "hi"}));
    assert_eq!(post_json(&fake, "/detokenize", json!({"tokens": []})).await.json(), json!({"prompt": ""}));
}
