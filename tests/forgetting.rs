//! Turns that are deleted or expire, at rest and in mid-flight: their chunks go from every tier, everyone else's stay.

use std::thread;
use std::time::Duration;

use keepsake_tests::{wait_until, words, Ask, Client, ModelKind, Reply, Server, Settings};
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(60);

/// A long question, so that the conversation has chunks to lose.
fn long_ask(seed: u64) -> Ask {
    Ask::new(&format!("Remember: {}.", words::plain(&mut words::seeded(seed), 90))).max(16)
}

/// Tokens of the whole chunks whose K/V is there after a reply: of its last token there is none yet.
fn whole_chunks(reply: &Reply) -> u64 {
    (reply.usage.input + reply.usage.output - 1) / 32 * 32
}

fn path_of(id: &str) -> String {
    format!("/v1/responses/{id}")
}

fn assert_gone(client: &Client, id: &str) {
    let next = client.post("/v1/responses", &Ask::new("More.").after(id).max(2).body());
    for answer in [client.get(&path_of(id)), client.delete(&path_of(id)), next] {
        assert_eq!((answer.status, answer.refusal().as_str()), (404, "response_not_found"));
    }
}

/// Waits until nothing is kept in the device or in any of these tiers.
fn wait_until_empty(server: &Server, tiers: &[&str]) {
    wait_until("every tier is empty", LIMIT, || {
        let metrics = server.metrics();
        let is_free = metrics.blocks("free") == metrics.blocks("total");
        is_free && tiers.iter().all(|tier| metrics.tier("chunks", tier) == 0)
    });
    assert_eq!(server.settle().count("keepsake_pins"), 0);
}

fn wait_until_copied(server: &Server, reply: &Reply, tier: &str) {
    let num_chunks = whole_chunks(reply) / 32;
    wait_until("the chunks are copied", LIMIT, || server.metrics().tier("chunks", tier) >= num_chunks);
}

/// Everything unused is copied down at once.
fn eager(device: usize, dram: usize, rocks: usize) -> Settings {
    Settings::tiers(ModelKind::Tiny, device, dram, rocks).set("scheduler", "swap_out_below", "1.0")
}

#[test]
fn deleting_the_only_turn_empties_every_tier() {
    for (dram, rocks, tier) in [(100, 16, "dram"), (0, 400, "rocks")] {
        let server = Server::start(eager(64, dram, rocks));
        let reply = long_ask(1).send(&server.client);
        wait_until_copied(&server, &reply, tier);
        server.client.delete(&path_of(&reply.id)).ok();
        wait_until_empty(&server, &[tier]);
        assert!(server.metrics().count("keepsake_chunks_forgotten_total") >= whole_chunks(&reply) / 32);
        assert_gone(&server.client, &reply.id);
        assert_eq!(long_ask(1).send(&server.client).usage.cached, 0);
        server.finish();
    }
}

/// Removals on disk have no log: without the turn store's help, a kill would bring the chunks back.
#[test]
fn what_was_deleted_stays_deleted_after_a_kill() {
    let server = Server::start(eager(64, 0, 400));
    let deleted = long_ask(1).send(&server.client);
    let kept = long_ask(2).send(&server.client);
    // After an orderly end both are on disk for certain.
    let server = server.finish().start();
    assert!(server.metrics().tier("chunks", "rocks") >= (whole_chunks(&deleted) + whole_chunks(&kept)) / 32);
    server.client.delete(&path_of(&deleted.id)).ok();
    let server = server.kill().start();
    assert_gone(&server.client, &deleted.id);
    assert_eq!(long_ask(1).with("store", json!(false)).send(&server.client).usage.cached, 0);
    let next = Ask::new("Go on.").after(&kept.id).max(4).send(&server.client);
    assert_eq!(next.usage.cached, whole_chunks(&kept), "{:?}", next.usage);
    server.finish();
}

#[test]
fn a_session_idle_past_its_ttl_is_forgotten_with_its_chunks() {
    let server = Server::start(eager(64, 100, 16).turn_ttl("3s"));
    let first = long_ask(1).send(&server.client);
    let second = Ask::new("Go on.").after(&first.id).max(8).send(&server.client);
    wait_until("the turns are forgotten", LIMIT, || {
        [&first, &second].iter().all(|turn| server.client.get(&path_of(&turn.id)).status == 404)
    });
    wait_until_empty(&server, &["dram"]);
    assert_gone(&server.client, &first.id);
    assert_gone(&server.client, &second.id);
    server.finish();
}

#[test]
fn forks_at_once_share_their_parents_chunks_and_outlive_each_other() {
    let server = Server::start(Settings::roomy(ModelKind::Demo));
    let undisturbed = Server::start(Settings::roomy(ModelKind::Demo));
    let client = &server.client;
    let parent = long_ask(3).send(client);
    let questions = ["Which word was the first?", "Which word was the last?"];
    let forks: Vec<Reply> = thread::scope(|scope| {
        let fork = |question: &'static str| {
            let ask = Ask::new(question).after(&parent.id).max(40);
            scope.spawn(move || ask.send(client))
        };
        let forks = questions.map(fork);
        forks.into_iter().map(|fork| fork.join().expect("a fork succeeds")).collect()
    });
    for fork in &forks {
        assert!(fork.usage.cached >= whole_chunks(&parent), "{:?} after {:?}", fork.usage, parent.usage);
    }

    // One goes, then the parent: the other one keeps its past and its words.
    client.delete(&path_of(&forks[0].id)).ok();
    client.delete(&path_of(&parent.id)).ok();
    assert_gone(client, &forks[0].id);
    assert_gone(client, &parent.id);
    server.settle();
    let next = Ask::new("Say it again.").after(&forks[1].id).max(12).send(client);
    assert!(next.usage.cached >= whole_chunks(&forks[1]), "{:?} after {:?}", next.usage, forks[1].usage);

    let first = long_ask(3).send(&undisturbed.client);
    assert_eq!(first.text, parent.text);
    let alone: Vec<Reply> =
        questions.iter().map(|q| Ask::new(q).after(&first.id).max(40).send(&undisturbed.client)).collect();
    for (fork, alone) in forks.iter().zip(&alone) {
        assert_eq!((&fork.text, fork.usage.input), (&alone.text, alone.usage.input));
    }
    let same = Ask::new("Say it again.").after(&alone[1].id).max(12).send(&undisturbed.client);
    assert_eq!(next.text, same.text);
    undisturbed.finish();

    for id in [&next.id, &forks[1].id] {
        client.delete(&path_of(id)).ok();
    }
    wait_until_empty(&server, &["rocks"]);
    server.finish();
}

#[test]
fn a_turn_deleted_while_its_continuation_decodes() {
    let server = Server::start(eager(100, 100, 16));
    let client = &server.client;
    let parent = long_ask(1).sampled(1).send(client);
    let next = |id: &str| Ask::new("Go on.").after(id).max(200).sampled(2);
    let mut stream = next(&parent.id).stream(client).expect("the stream opens");
    stream.next_delta().expect("the stream goes on");
    client.delete(&path_of(&parent.id)).ok();
    assert_gone(client, &parent.id);
    let (child, _) = stream.finish().expect("the continuation ends well");
    server.settle();
    let last = Ask::new("And then?").after(&child.id).max(8).sampled(3).send(client);
    assert!(last.usage.cached >= whole_chunks(&child), "{:?} after {:?}", last.usage, child.usage);

    let undisturbed = Server::start(Settings::roomy(ModelKind::Tiny));
    let first = long_ask(1).sampled(1).send(&undisturbed.client);
    let second = next(&first.id).send(&undisturbed.client);
    assert_eq!((&child.text, child.usage.output), (&second.text, 200));
    let third = Ask::new("And then?").after(&second.id).max(8).sampled(3).send(&undisturbed.client);
    assert_eq!(last.text, third.text);
    undisturbed.finish();

    for id in [&child.id, &last.id] {
        client.delete(&path_of(id)).ok();
    }
    wait_until_empty(&server, &["dram"]);
    server.finish();
}

/// A turn exists once it is durable: before that a deletion finds nothing, and the stream goes on; after it the turn is gone, whether
/// or not its client has read the end.
#[test]
fn a_turn_deleted_while_it_is_generated() {
    let server = Server::start(eager(100, 100, 16));
    let client = &server.client;
    for round in 0..8 {
        let mut stream = long_ask(round).max(60).sampled(1).stream(client).expect("the stream opens");
        let id = stream.id.clone();
        stream.next_delta().expect("the stream goes on");
        let answer = client.delete(&path_of(&id));
        assert_eq!((answer.status, answer.refusal().as_str()), (404, "response_not_found"));
        // From here on as often as it takes, so that some deletion comes close to the end.
        let deleting = {
            let (client, path) = (client.clone(), path_of(&id));
            thread::spawn(move || wait_until("the turn is deleted", LIMIT, || client.delete(&path).status == 200))
        };
        let (reply, _) = stream.finish().expect("the stream ends well");
        assert_eq!((&reply.id, reply.usage.output), (&id, 60));
        deleting.join().expect("the turn could be deleted once it was there");
        assert_gone(client, &id);
    }
    wait_until_empty(&server, &["dram"]);
    server.finish();
}
