//! Tenants never see each other's turns, nor learn from the cache what others asked.

use keepsake_tests::{words, Ask, Chat, ModelKind, Server, Settings};

#[test]
fn ids_and_cached_prefixes_stay_with_their_tenant() {
    let settings = Settings::roomy(ModelKind::Demo).tenant("web", "key-of-web").tenant("lab", "key-of-lab");
    let server = Server::start(settings);
    let (web, lab) = (server.client.clone(), server.client_with_key("key-of-lab"));

    let text = words::plain(&mut words::seeded(5), 60);
    let ours = Ask::new(&text).max(8).send(&web);
    for answer in [
        lab.get(&format!("/v1/responses/{}", ours.id)),
        lab.get(&format!("/v1/responses/{}/input_items", ours.id)),
        lab.delete(&format!("/v1/responses/{}", ours.id)),
        lab.post("/v1/responses", &Ask::new("Go on.").after(&ours.id).max(2).body()),
    ] {
        assert_eq!((answer.status, answer.refusal().as_str()), (404, "response_not_found"));
    }
    // An unknown id gets the same words, but for the id.
    let unknown = format!("resp_{}", "0".repeat(32));
    let said = |id: &str| lab.get(&format!("/v1/responses/{id}")).text.replace(id, "ID").replace(&id[5..], "ID");
    assert_eq!(said(&ours.id), said(&unknown));

    let chat = Chat::new(&[("user", &text)]).max(4);
    let (first, theirs, again) = (chat.send(&web), chat.send(&lab), chat.send(&web));
    assert!(first.usage.cached > 0, "the same prompt as the response above: {:?}", first.usage);
    assert_eq!(theirs.usage.cached, 0, "another tenant's prefix is not in the cache");
    assert!(again.usage.cached > 0);
    assert!(chat.send(&lab).usage.cached > 0, "its own is");
    assert_eq!((&theirs.text, &again.text), (&first.text, &first.text));
    // A salt in the request changes nothing.
    let salted = Chat::new(&[("user", &format!("{text} more"))]).max(2);
    salted.send(&web);
    let salted = salted.with("cache_salt", serde_json::json!("key-of-web"));
    let foreign = salted.send(&lab);
    let own_prefix = chat.send(&lab).usage.cached;
    assert!(foreign.usage.cached <= own_prefix, "{:?}", foreign.usage);

    // It is still there, and its owner can go on.
    Ask::new("Go on.").after(&ours.id).max(2).send(&web);
    assert_eq!(web.delete(&format!("/v1/responses/{}", ours.id)).status, 200);
    server.finish();
}

#[test]
fn every_route_but_health_needs_a_key() {
    let server = Server::start(Settings::roomy(ModelKind::Tiny).tenant("web", "key-of-web"));
    let stranger = server.client_with_key("key-of-webx");
    let posts = ["/v1/responses", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/nothing"];
    let gets = ["/v1/models", "/v1/models/x", "/v1/responses/resp_0", "/ready", "/metrics", "/", "/v1/nothing"];
    let answers = posts.map(|path| stranger.post(path, &serde_json::json!({})));
    for answer in answers.into_iter().chain(gets.map(|path| stranger.get(path))) {
        assert_eq!((answer.status, answer.refusal().as_str()), (401, "invalid_api_key"), "{}", answer.text);
    }
    assert_eq!(stranger.get("/health").status, 200);
    assert_eq!(server.client.get("/v1/models").status, 200);
    server.finish();
}
