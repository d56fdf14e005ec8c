//! Conversations through `/v1/responses`, and chat completions beside them: usage that tells the truth, forks, endings, deletion.

use std::thread;
use std::time::Duration;

use keepsake_tests::{words, Ask, Chat, Client, ModelKind, Reply, Server, Settings};
use serde_json::json;

fn server() -> Server {
    Server::start(Settings::roomy(ModelKind::Demo))
}

/// Tokens of the log after a reply; its last token has no K/V yet.
fn log_len(reply: &Reply) -> u64 {
    reply.usage.input + reply.usage.output
}

/// Tokens of the whole chunks whose K/V is there after a reply.
fn whole_chunks(reply: &Reply) -> u64 {
    (log_len(reply) - 1) / 32 * 32
}

fn streamed(ask: Ask, client: &Client) -> Reply {
    let stream = ask.stream(client).expect("the stream opens");
    stream.finish().expect("a whole stream").0
}

#[test]
fn three_streamed_turns_count_and_cache_what_came_before() {
    let server = server();
    let client = &server.client;
    let story = words::plain(&mut words::seeded(3), 60);
    let first = streamed(Ask::new(&format!("Remember these words: {story}.")).max(24), client);
    assert_eq!(first.usage.cached, 0, "nothing came before");
    let second = streamed(Ask::new("How many were they?").after(&first.id).max(24), client);
    let third = streamed(Ask::new("Which one was the first?").after(&second.id).max(24), client);

    for (before, after) in [(&first, &second), (&second, &third)] {
        assert!(after.usage.input > log_len(before), "the whole log and the new turn are input");
        assert!(after.usage.cached >= whole_chunks(before), "{:?} after {:?}", after.usage, before.usage);
        assert!(after.usage.cached <= log_len(before), "{:?} after {:?}", after.usage, before.usage);
        assert_eq!(after.usage.tier("device"), after.usage.cached);
        // Of the last token there is no K/V yet; the partial last chunk belongs to the first turn that continues.
        assert!(after.usage.recomputed <= 1, "{:?} after {:?}", after.usage, before.usage);
    }
    // The input is the template's rendering of all three turns, wherever replies survive being tokenised again.
    let messages = json!([
        {"role": "user", "content": format!("Remember these words: {story}.")},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "How many were they?"},
        {"role": "assistant", "content": second.text},
        {"role": "user", "content": "Which one was the first?"},
    ]);
    let rendered = client.post("/tokenize", &json!({ "messages": messages })).ok();
    let difference = third.usage.input.abs_diff(rendered["count"].as_u64().expect("a count"));
    assert!(difference <= 2, "{} tokens, rendered at once {}", third.usage.input, rendered["count"]);
    server.finish();
}

#[test]
fn two_continuations_at_once_are_what_one_after_the_other_gives() {
    let server = server();
    let client = &server.client;
    let parent = Ask::new("Name a colour and an animal.").max(16).send(client);
    let questions = ["Why that colour?", "Why that animal?", "Why that colour?"];
    let at_once: Vec<Reply> = thread::scope(|scope| {
        let fork = |question: &'static str| {
            let ask = Ask::new(question).after(&parent.id).max(16);
            scope.spawn(move || ask.send(client))
        };
        let forks: Vec<_> = questions.into_iter().map(fork).collect();
        forks.into_iter().map(|fork| fork.join().expect("a fork succeeds")).collect()
    });
    assert_eq!(at_once[0].text, at_once[2].text);

    let again = Ask::new("Name a colour and an animal.").max(16).send(client);
    assert_eq!(again.text, parent.text);
    for (question, fork) in questions.iter().zip(&at_once) {
        let alone = Ask::new(question).after(&again.id).max(16).send(client);
        assert_eq!((&alone.text, alone.usage.input), (&fork.text, fork.usage.input), "{question}");
        // Each branch goes on by itself.
        let next = Ask::new("Say it again.").after(&fork.id).max(8).send(client);
        assert_eq!(next.text, Ask::new("Say it again.").after(&alone.id).max(8).send(client).text, "{question}");
    }
    server.finish();
}

#[test]
fn responses_are_read_back_and_deleted() {
    let server = server();
    let client = &server.client;
    let ask = Ask::new("Name a fruit.").max(12).with("metadata", json!({"shelf": "7"}));
    let first = ask.send(client);
    let path = format!("/v1/responses/{}", first.id);
    let stored = client.get(&path).ok();
    assert_eq!(Reply::of_response(&stored).expect("a whole response"), first);
    assert_eq!(stored["metadata"], json!({"shelf": "7"}));
    let items = client.get(&format!("{path}/input_items")).ok();
    assert_eq!(items["data"][0]["content"][0]["text"], "Name a fruit.");

    let second = Ask::new("Another.").after(&first.id).max(12).send(client);
    let deleted = client.delete(&path).ok();
    assert_eq!((&deleted["id"], &deleted["deleted"]), (&json!(first.id), &json!(true)));
    for answer in [client.get(&path), client.delete(&path), client.get(&format!("{path}/input_items"))] {
        assert_eq!((answer.status, answer.refusal().as_str()), (404, "response_not_found"));
    }
    let answer = client.post("/v1/responses", &Ask::new("More.").after(&first.id).max(2).body());
    assert_eq!((answer.status, answer.refusal().as_str()), (404, "response_not_found"));
    // What continued it lives on, with its words.
    let third = Ask::new("One more.").after(&second.id).max(12).send(client);
    assert!(third.usage.input > log_len(&second));
    let stopped = server.finish();
    let server = stopped.start();
    assert_eq!(server.client.get(&path).status, 404, "deleted for good");
    let again = Ask::new("One more.").after(&second.id).max(12).send(&server.client);
    assert_eq!(again.text, third.text);
    server.finish();
}

#[test]
fn an_unfinished_parent_is_a_conflict() {
    let server = server();
    let ask = Ask::new("Tell me a long story.").max(400).with("ignore_eos", json!(true));
    let mut stream = ask.stream(&server.client).expect("the stream opens");
    stream.next_delta().expect("the stream goes on");
    let answer = server.client.post("/v1/responses", &Ask::new("And then?").after(&stream.id).max(2).body());
    assert_eq!((answer.status, answer.refusal().as_str()), (409, "conflict"));
    drop(stream);
    server.settle();
    server.finish();
}

#[test]
fn what_is_not_stored_leaves_nothing() {
    let server = server();
    let reply = Ask::new("Name a tree.").max(8).with("store", json!(false)).send(&server.client);
    let metrics = server.settle();
    assert_eq!(metrics.count("keepsake_turns_stored_total"), 0);
    assert_gone(&server.client, &reply.id);
    let server = server.finish().start();
    assert_gone(&server.client, &reply.id);
    // From a stored parent, too.
    let parent = Ask::new("Name a tree.").max(8).send(&server.client);
    let child = Ask::new("Another.").after(&parent.id).max(8).with("store", json!(false)).send(&server.client);
    assert_gone(&server.client, &child.id);
    assert_eq!(Ask::new("Another.").after(&parent.id).max(8).send(&server.client).text, child.text);
    server.finish();
}

fn assert_gone(client: &Client, id: &str) {
    for answer in [
        client.get(&format!("/v1/responses/{id}")),
        client.delete(&format!("/v1/responses/{id}")),
        client.post("/v1/responses", &Ask::new("Go on.").after(id).max(2).body()),
    ] {
        assert_eq!((answer.status, answer.refusal().as_str()), (404, "response_not_found"));
    }
}

#[test]
fn changed_instructions_begin_a_new_root() {
    let server = server();
    let client = &server.client;
    let brief = json!("You answer in one word.");
    let pirate = json!("You are a pirate.");
    let first = Ask::new("Name a ship.").max(12).with("instructions", brief.clone()).send(client);
    let second = Ask::new("Another.").after(&first.id).max(12).with("instructions", brief).send(client);
    assert!(second.usage.cached >= whole_chunks(&first));
    let before = server.settle();
    assert_eq!(before.count("keepsake_rebased_conversations_total"), 0);

    let third = Ask::new("And now?").after(&second.id).max(12).with("instructions", pirate.clone()).send(client);
    assert_eq!(server.settle().count("keepsake_rebased_conversations_total"), 1);
    let whole = Chat::new(&[
        ("system", "You are a pirate."),
        ("user", "Name a ship."),
        ("assistant", &first.text),
        ("user", "Another."),
        ("assistant", &second.text),
        ("user", "And now?"),
    ]);
    let whole = whole.max(12).send(client);
    // Replies that were cut at a length differ from their text tokenised anew; whole ones do not.
    if first.stopped && second.stopped {
        assert_eq!((&third.text, third.usage.input), (&whole.text, whole.usage.input));
    }
    let fourth = Ask::new("Why?").after(&third.id).max(12).with("instructions", pirate).send(client);
    assert!(fourth.usage.cached >= whole_chunks(&third), "the new root is cached: {:?}", fourth.usage);
    assert_eq!(server.settle().count("keepsake_rebased_conversations_total"), 1);
    server.finish();
}

#[test]
fn stop_strings_end_the_text_wherever_tokens_end() {
    let server = server();
    let client = &server.client;
    let ask = Ask::new("Write one sentence about the sea.").max(32);
    let (whole, deltas) = ask.stream(client).expect("the stream opens").finish().expect("a whole stream");
    assert!(deltas.len() > 8, "{deltas:?}");
    let mut num_checked = 0;
    for border in 2..deltas.len() - 2 {
        // The last character before a token's end and the first ones after it.
        let before = deltas[..border].concat();
        let (Some(last), after) = (before.chars().last(), &deltas[border]) else { continue };
        let stop: String = std::iter::once(last).chain(after.chars().take(2)).collect();
        let expected = &whole.text[..whole.text.find(&stop).expect("it was taken from there")];
        let (reply, pieces) = ask
            .clone()
            .with("stop", json!([stop, "never said"]))
            .stream(client)
            .expect("the stream opens")
            .finish()
            .expect("a whole stream");
        assert_eq!(reply.text, expected, "stop {stop:?}");
        assert!(reply.stopped && !pieces.concat().contains(&stop), "stop {stop:?}: {pieces:?}");
        let direct = ask.clone().with("stop", json!(stop)).send(client);
        assert_eq!(direct.text, expected, "stop {stop:?}, not streamed");
        // What the client saw is what the conversation goes on from, each time.
        let next = Ask::new("Go on.").after(&reply.id).max(8).send(client);
        assert_eq!(next.text, Ask::new("Go on.").after(&direct.id).max(8).send(client).text, "stop {stop:?}");
        let whole_again =
            Chat::new(&[("user", "Write one sentence about the sea."), ("assistant", expected), ("user", "Go on.")]);
        let again = whole_again.max(8).send(client);
        assert!(next.usage.input.abs_diff(again.usage.input) <= 2, "{:?} and {:?}", next.usage, again.usage);
        num_checked += 1;
        if num_checked == 6 {
            break;
        }
    }
    assert!(num_checked >= 4, "too few borders in {deltas:?}");
    server.finish();
}

#[test]
fn a_reply_cut_at_its_length_goes_on() {
    let server = server();
    let client = &server.client;
    let ask = Ask::new("Count from one to twenty in words.");
    let whole = ask.clone().max(24).send(client);
    // Cut on a chunk's border, before and behind it.
    for max in (1..20).step_by(3) {
        let cut = ask.clone().max(max).send(client);
        assert!(!cut.stopped);
        assert_eq!(cut.usage.output, max as u64);
        assert!(whole.text.starts_with(&cut.text), "{:?} is no beginning of {:?}", cut.text, whole.text);
        let object = client.get(&format!("/v1/responses/{}", cut.id)).ok();
        assert_eq!(object["status"], "incomplete");
        let next = Ask::new("Go on.").after(&cut.id).max(6).send(client);
        assert!(next.usage.input > log_len(&cut));
        assert!(next.usage.cached >= whole_chunks(&cut), "{:?} after {:?}", next.usage, cut.usage);
        let again = ask.clone().max(max).send(client);
        let other = Ask::new("Go on.").after(&again.id).max(6).send(client);
        assert_eq!((other.text, other.usage.input), (next.text, next.usage.input), "cut at {max}");
    }
    server.finish();
}

#[test]
fn one_chat_prompt_three_times_is_one_reply_and_two_cached_prompts() {
    let server = server();
    let text = words::plain(&mut words::seeded(4), 70);
    let chat = Chat::new(&[("system", "You are brief."), ("user", &text)]).max(20);
    let first = chat.send(&server.client);
    assert_eq!(first.usage.cached, 0);
    let whole = (first.usage.input - 1) / 32 * 32;
    for _ in 0..2 {
        let again = chat.send(&server.client);
        assert_eq!(again.text, first.text);
        assert!(again.usage.cached >= whole, "{:?}", again.usage);
        assert_eq!(again.usage.input, first.usage.input);
    }
    // A longer conversation that begins the same shares the beginning; one that differs at its start shares nothing.
    let longer =
        Chat::new(&[("system", "You are brief."), ("user", &text), ("assistant", &first.text), ("user", "Why?")]);
    assert!(longer.max(4).send(&server.client).usage.cached >= whole);
    let other = Chat::new(&[("system", "Be a poet."), ("user", &text)]).max(4).send(&server.client);
    assert_eq!(other.usage.cached, 0);
    server.finish();
}

/// A session leaves memory when it is idle, not when it is silent: a long reply outlives the limit.
#[test]
fn sessions_that_left_memory_come_back_and_running_ones_stay() {
    let server = Server::start(Settings::roomy(ModelKind::Demo).set("sessions", "idle_after", "\"1s\""));
    let client = &server.client;
    let parent = Ask::new("Name a city.").max(8).send(client);
    let long = Ask::new("Describe it.").after(&parent.id).max(150).with("ignore_eos", json!(true));
    let stream = long.stream(client).expect("the stream opens");
    // Deleting the turn that a running one continues must not disturb it.
    assert_eq!(client.delete(&format!("/v1/responses/{}", parent.id)).status, 200);
    let (story, _) = stream.finish().expect("a whole stream");
    assert_eq!(story.usage.output, 150);
    thread::sleep(Duration::from_millis(2500));
    let next = Ask::new("In one word?").after(&story.id).max(8).send(client);
    assert!(next.usage.input > log_len(&story));
    assert!(next.usage.cached >= whole_chunks(&story), "{:?}", next.usage);
    server.finish();
}

/// What comes in pieces is what comes at once, and no piece ends inside a character.
#[test]
fn characters_of_many_bytes_arrive_whole() {
    let server = server();
    let client = &server.client;
    for text in [
        "Repeat: \u{1f600}\u{1f680}\u{1f9e1}",
        "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}",
        "\u{e2a}\u{e27}\u{e31}\u{e2a}\u{e14}\u{e35}",
        "na\u{ef}ve caf\u{e9} \u{1d11e}",
    ] {
        let ask = Ask::new(text).max(40).with("logit_bias", json!({})).with("top_k", json!(1));
        let whole = ask.send(client);
        let (streamed, deltas) = ask.stream(client).expect("the stream opens").finish().expect("a whole stream");
        assert_eq!(streamed.text, whole.text, "{text}");
        // A reply that is cut at its length may end inside a character; nothing else may.
        let last = deltas.len() - usize::from(!streamed.stopped);
        assert!(deltas[..last].iter().all(|delta| !delta.contains('\u{fffd}')), "{deltas:?}");
    }
    server.finish();
}
