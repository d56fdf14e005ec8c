//! Bad input: everything that is not a request gets a 4xx in OpenAI's error shape, and the server goes on serving.

use keepsake_tests::raw::Connection;
use keepsake_tests::{words, Answer, Ask, Chat, Complete, ModelKind, Server, Settings};
use serde_json::{json, Value};

const POSTS: [&str; 5] = ["/v1/responses", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"];
const GENERATING: [&str; 3] = ["/v1/responses", "/v1/chat/completions", "/v1/completions"];

/// JSON values that no generating route takes, by field.
const BAD_FIELDS: [(&str, &str); 16] = [
    ("temperature", r#"[-1, 2.1, 1e308, "hot", [], true]"#),
    ("top_p", r#"[0, -0.1, 1.1, 1e308, 1e-320, "x"]"#),
    ("top_k", r#"[-2, 1.5, 1e308, "x"]"#),
    ("min_p", r#"[-0.1, 1.1, {}]"#),
    ("repetition_penalty", "[0, -1, 1e308]"),
    ("frequency_penalty", "[-2.1, 1e308]"),
    ("presence_penalty", r#"[2.1, "x"]"#),
    ("seed", r#"["x", 1.5, 1e308, [1]]"#),
    ("min_tokens", r#"[-1, 3, 1e308, "x"]"#),
    ("ignore_eos", r#"["yes", 1]"#),
    ("stream", r#"["true", 1, {}]"#),
    ("stop_token_ids", r#"[5, [-1], [512], [1.5], ["x"]]"#),
    ("logit_bias", r#"[[1], {"x": 1}, {"-1": 1}, {"512": 1}, {"1": "x"}, {"1": 1e308}]"#),
    ("stop", r#"[5, [""], [5], {"a": 1}]"#),
    ("metadata", r#"["x", {"a": 5}]"#),
    ("tools", r#"[[{"type": "function"}], "x"]"#),
];

/// The same for fields that are one route's own.
const BAD_FIELDS_OF_ROUTES: [(&str, &str, &str); 11] = [
    ("/v1/chat/completions", "n", r#"[2, 0, -1, 16384, "x"]"#),
    ("/v1/completions", "n", r#"[2, 0, -1, 16384, "x"]"#),
    ("/v1/chat/completions", "messages", BAD_MESSAGES),
    ("/v1/chat/completions", "messages", r#"["x"]"#),
    ("/v1/responses", "input", BAD_MESSAGES),
    ("/v1/responses", "input", r#"["", 5, true]"#),
    ("/v1/responses", "background", "[true]"),
    ("/v1/responses", "truncation", r#"["auto"]"#),
    ("/v1/responses", "store", r#"["x"]"#),
    ("/v1/responses", "instructions", "[5]"),
    (
        "/v1/completions",
        "prompt",
        r#"["", [], [-1], [512], [1e308], [1.5], [[]], [["a"]], 5, {}, ["a", 5], [5, "a"], [[1], [-1]], [null]]"#,
    ),
];

const BAD_MESSAGES: &str = r#"[
    [], [1], [{}], [{"role": "alien", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": null}], [{"role": 5, "content": "x"}], {"role": "user", "content": "x"},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
]"#;

fn list(json: &str) -> Vec<Value> {
    serde_json::from_str(json).expect("the tables hold JSON arrays")
}

/// Values of some fields that are wrong by their size only.
fn large_values(field: &str) -> Vec<Value> {
    match field {
        "stop_token_ids" => vec![json!(vec![1; 5000])],
        "stop" => vec![json!(vec!["x"; 100]), json!("x".repeat(5000))],
        "metadata" => vec![json!({"a": "x".repeat(5000)})],
        _ => Vec::new(),
    }
}

fn server() -> Server {
    Server::start(Settings::tiers(ModelKind::Tiny, 48, 64, 200))
}

/// A good request of each generating route, for a bad field to be put into.
fn good(path: &str) -> Value {
    match path {
        "/v1/responses" => Ask::new("hello").max(2).body(),
        "/v1/chat/completions" => Chat::new(&[("user", "hello")]).max(2).body(),
        _ => Complete::new(&[1, 2, 3], 2).body(),
    }
}

#[track_caller]
fn assert_refused(answer: &Answer, status: u16, what: &str) {
    let code = answer.refusal();
    assert_eq!(answer.status, status, "{what}: {code} {}", answer.text);
    assert!(answer.text.len() < 4096, "{what}: the refusal repeats the request");
}

fn assert_serves(server: &Server) {
    for path in GENERATING {
        server.client.post(path, &good(path)).ok();
    }
}

#[test]
fn bodies_that_are_not_requests() {
    let server = server();
    let deep = |open: &str, depth: usize| format!("{{\"input\":{}", open.repeat(depth)).into_bytes();
    let bodies: Vec<(&str, Vec<u8>)> = vec![
        ("empty", b"".to_vec()),
        ("spaces", b"   ".to_vec()),
        ("half", b"{\"input\": \"x\"".to_vec()),
        ("trailing", b"{\"input\": \"x\", \"prompt\": \"x\"} x".to_vec()),
        ("list", b"[]".to_vec()),
        ("null", b"null".to_vec()),
        ("text", b"\"x\"".to_vec()),
        ("number", b"1e308".to_vec()),
        ("NaN", b"{\"input\": \"x\", \"prompt\": \"x\", \"temperature\": NaN}".to_vec()),
        ("infinite", b"{\"input\": \"x\", \"prompt\": \"x\", \"temperature\": 1e999}".to_vec()),
        ("bad UTF-8", b"{\"input\": \"\xff\xfe\", \"prompt\": \"\xff\xfe\"}".to_vec()),
        ("half a surrogate", b"{\"input\": \"\\ud800\", \"prompt\": \"\\ud800\"}".to_vec()),
        ("a zero byte", b"{\"input\": \"\0\", \"prompt\": \"\0\"}".to_vec()),
        ("deep lists", deep("[", 200_000)),
        ("deep objects", deep("{\"a\":", 200_000)),
        ("closed deep lists", format!("{{\"input\":{}{}}}", "[".repeat(50_000), "]".repeat(50_000)).into_bytes()),
        ("nothing in it", b"{}".to_vec()),
    ];
    for path in POSTS {
        for (name, body) in &bodies {
            assert_refused(&server.client.post_bytes(path, body), 400, &format!("{path}, {name}"));
        }
    }
    assert_serves(&server);
    server.finish();
}

#[test]
fn fields_of_the_wrong_type_or_size() {
    let server = server();
    let client = &server.client;
    let mut cases: Vec<(&str, &str, Value)> = Vec::new();
    for (field, values) in BAD_FIELDS {
        for value in list(values).into_iter().chain(large_values(field)) {
            cases.extend(GENERATING.map(|path| (path, field, value.clone())));
        }
    }
    for (path, name) in GENERATING.into_iter().zip(["max_output_tokens", "max_tokens", "max_tokens"]) {
        let values = list(r#"[0, -1, 1.5, "5", 1e308, 18446744073709551615, -9223372036854775808]"#);
        cases.extend(values.into_iter().map(|value| (path, name, value)));
    }
    for (path, field, values) in BAD_FIELDS_OF_ROUTES {
        cases.extend(list(values).into_iter().map(|value| (path, field, value)));
    }
    cases.push(("/v1/completions", "prompt", json!(vec!["a"; 1000])));
    for (path, field, value) in &cases {
        let mut body = good(path);
        body[*field] = value.clone();
        let shown: String = value.to_string().chars().take(60).collect();
        assert_refused(&client.post(path, &body), 400, &format!("{path}, {field} = {shown}"));
    }

    for (path, body) in [
        ("/tokenize", json!({"prompt": 5})),
        ("/tokenize", json!({"messages": []})),
        ("/tokenize", json!({"prompt": "x", "messages": [{"role": "user", "content": "x"}]})),
        ("/detokenize", json!({"tokens": "x"})),
        ("/detokenize", json!({"tokens": [-1]})),
        ("/detokenize", json!({"tokens": [512]})),
        ("/detokenize", json!({"tokens": [1e308]})),
    ] {
        assert_refused(&client.post(path, &body), 400, &format!("{path}, {body}"));
    }
    for path in POSTS {
        let mut body = good(path);
        body["model"] = json!("gpt-17");
        assert_refused(&client.post(path, &body), 404, &format!("{path}, another model"));
        body["model"] = json!(5);
        assert_refused(&client.post(path, &body), 400, &format!("{path}, model = 5"));
    }
    assert_serves(&server);
    server.finish();
}

#[test]
fn ids_that_nobody_has() {
    let server = server();
    let client = &server.client;
    let long = "x".repeat(5000);
    let ids = [
        "resp_00000000000000000000000000000000",
        "resp_",
        "resp_zz",
        "x",
        "resp_%00",
        "..%2F..%2Fetc%2Fpasswd",
        long.as_str(),
    ];
    for id in ids {
        for answer in [
            client.get(&format!("/v1/responses/{id}")),
            client.delete(&format!("/v1/responses/{id}")),
            client.get(&format!("/v1/responses/{id}/input_items")),
        ] {
            assert_refused(&answer, 404, id);
        }
        let answer = client.post("/v1/responses", &Ask::new("x").after(id).max(1).body());
        assert_refused(&answer, 404, id);
    }
    assert_refused(
        &client.post("/v1/responses", &Ask::new("x").with("previous_response_id", json!(5)).body()),
        400,
        "a number",
    );
    for path in ["/", "/v1", "/v1/nothing", "/v1/responses/x/y/z", "/v1/conversations", "//v1/models", "/v1/../health"]
    {
        assert_refused(&client.get(path), 404, path);
    }
    for path in POSTS.into_iter().filter(|path| *path != "/v1/models") {
        assert_refused(&client.delete(path), 405, path);
    }
    assert_serves(&server);
    server.finish();
}

#[test]
fn bodies_and_prompts_that_are_too_long() {
    let server = server();
    let client = &server.client;
    let large = json!({ "input": "x".repeat(10 << 20), "prompt": "x", "tokens": [1], "messages": [] });
    for path in POSTS {
        assert_refused(&client.post(path, &large), 413, path);
    }
    // A length that is only claimed, and a body without one that goes on for ever.
    let head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let mut connection = Connection::open(&server.address);
    connection.send(format!("{head}content-length: 99999999999\r\n\r\n{{").as_bytes());
    assert_refused(&connection.answer().expect("an answer"), 413, "a claimed length");
    let mut connection = Connection::open(&server.address);
    connection.send(format!("{head}transfer-encoding: chunked\r\n\r\n").as_bytes());
    let piece = format!("100000\r\n{}\r\n", "x".repeat(1 << 20));
    for _ in 0..12 {
        connection.send(piece.as_bytes());
    }
    assert_refused(&connection.answer().expect("an answer"), 413, "an endless body");

    let limit =
        client.post("/tokenize", &json!({"prompt": "x"})).ok()["max_model_len"].as_u64().expect("a count") as usize;
    assert_eq!(limit, 48 * 32, "the pool is smaller than the model's context");
    let random = &mut words::seeded(1);
    for tokens in [limit, limit + 1, 10 * limit] {
        let answer = client.post("/v1/completions", &Complete::new(&words::tokens(random, tokens), 1).body());
        assert_refused(&answer, 400, "too long");
        assert_eq!(answer.refusal(), "context_length_exceeded");
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(&limit.to_string()) && message.contains(&tokens.to_string()), "{message}");
    }
    // A byte is a token here, so text beyond the limit is too long for the other two as well.
    let text = "x".repeat(2 * limit);
    for body in [Ask::new(&text).body(), Chat::new(&[("user", &text)]).body()] {
        let path = if body.get("input").is_some() { "/v1/responses" } else { "/v1/chat/completions" };
        let answer = client.post(path, &body);
        assert_eq!((answer.status, answer.refusal().as_str()), (400, "context_length_exceeded"), "{}", answer.text);
    }
    // The longest that fits, and output clipped to what is left.
    let longest = Complete::new(&words::tokens(random, limit - 1), 50).send(client);
    assert_eq!((longest.usage.output, longest.stopped), (1, false));
    let clipped = Complete::new(&words::tokens(random, limit - 8), 50).send(client);
    assert_eq!((clipped.usage.output, clipped.stopped), (8, false));
    assert_serves(&server);
    server.finish();
}

#[test]
fn heads_that_no_client_should_send() {
    let server = server();
    let body = good("/v1/responses").to_string();
    let request = |head: &str| {
        let mut connection = Connection::open(&server.address);
        connection.send(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes());
        connection.answer()
    };
    let line = "POST /v1/responses HTTP/1.1\r\n";
    let json_type = "content-type: application/json\r\n";
    for host in
        ["evil.example.org", "127.0.0.1.evil.org", "localhost@evil.org", "", "10.0.0.1", "[::2]:80", "local\u{e9}"]
    {
        let answer = request(&format!("{line}host: {host}\r\n{json_type}")).expect("an answer");
        assert!([400, 403].contains(&answer.status), "host {host:?}: {} {}", answer.status, answer.text);
    }
    for host in ["localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"] {
        let answer = request(&format!("{line}host: {host}\r\n{json_type}")).expect("an answer");
        assert_eq!(answer.status, 200, "host {host:?}: {}", answer.text);
    }
    for kind in [
        "",
        "content-type: text/plain\r\n",
        "content-type: application/x-www-form-urlencoded\r\n",
        "content-type: \r\n",
        "content-type: application/jsonx\r\n",
        "content-type: multipart/form-data; boundary=x\r\n",
    ] {
        let answer = request(&format!("{line}host: localhost\r\n{kind}")).expect("an answer");
        assert_refused(&answer, 415, kind);
    }
    let answer = request(&format!("{line}host: localhost\r\ncontent-type: application/json; charset=utf-8\r\n"));
    assert_eq!(answer.expect("an answer").status, 200);

    let encoded = |encoding: &str| {
        let head = format!("{line}host: localhost\r\n{json_type}content-encoding: {encoding}\r\n");
        request(&head).expect("an answer")
    };
    for encoding in ["gzip", "br", "identity, gzip", "deflate\r\ncontent-encoding: identity"] {
        let answer = encoded(encoding);
        assert_refused(&answer, 415, encoding);
        assert_eq!(answer.refusal(), "unsupported_content_encoding");
    }
    assert_eq!(encoded("identity").status, 200);

    // Not HTTP, or nearly: an answer in the 400s, or a closed connection.
    let heads: [&[u8]; 12] = [
        b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00\xff\xfe\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nhost localhost\r\n\r\n",
        b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabc",
        b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET http://evil.example.org/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ];
    for head in heads {
        let mut connection = Connection::open(&server.address);
        connection.send(head);
        connection.close_writing();
        let shown = String::from_utf8_lossy(head);
        if let Some(answer) = connection.answer() {
            assert!((400..500).contains(&answer.status) || answer.status == 505, "{shown:?}: {}", answer.status);
        }
    }
    let answer = {
        let mut connection = Connection::open(&server.address);
        connection.send(
            format!("GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "x".repeat(100_000)).as_bytes(),
        );
        connection.answer().expect("an answer")
    };
    assert_refused(&answer, 431, "a head of 100 KB");
    assert_serves(&server);
    server.finish();
}

/// A client that sends its body drop by drop holds nothing for ever.
#[test]
fn bodies_that_never_end() {
    let server = Server::start(Settings::roomy(ModelKind::Tiny).set("server", "body_timeout", "\"500ms\""));
    let head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    for rest in ["content-length: 1000\r\n\r\n{\"input\": \"a", "transfer-encoding: chunked\r\n\r\n5\r\n{\"inp\r\n"] {
        let mut connection = Connection::open(&server.address);
        connection.send(format!("{head}{rest}").as_bytes());
        let answer = connection.answer().expect("an answer");
        assert_refused(&answer, 408, rest);
        assert_eq!(answer.refusal(), "request_timeout");
        assert!(connection.answer().is_none(), "the connection is closed");
    }
    assert_serves(&server);
    server.finish();
}
