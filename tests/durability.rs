//! What was acknowledged survives: SIGKILL in the middle of everything, SIGTERM in the middle of a stream.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use keepsake_tests::{wait_until, words, Ask, Client, ModelKind, Reply, Server, Settings, Stopped};
use rand::Rng;
use serde_json::json;

/// Conversations that talk while a server is killed.
const NUM_TALKS: usize = 5;
/// Turns of one: on a fast machine more would outgrow the context before the kill.
const MAX_TURNS: usize = 14;
/// Streams as long as the context allows, for the kill to break.
const NUM_LONG_STREAMS: usize = 2;

/// What conversation `name` says in its turn `turn`: the same in every run. Even ones are greedy.
fn ask(name: usize, turn: usize) -> Ask {
    let mut random = words::seeded((name * 100 + turn) as u64);
    let ask = Ask::new(&format!("{}, turn {turn}: {}", words::canary(name), words::plain(&mut random, 5))).max(10);
    match name % 2 {
        0 => ask,
        _ => ask.sampled(turn),
    }
}

/// A conversation as far as its client knows it.
struct Known {
    name: usize,
    acknowledged: Vec<Reply>,
    /// A stream that the kill broke after it had told its id.
    broken: Option<String>,
}

/// Takes turns until the server goes away; every other one is streamed.
fn talk_until_killed(client: &Client, name: usize, num_acknowledged: &AtomicUsize) -> Known {
    let mut known = Known { name, acknowledged: Vec::new(), broken: None };
    while known.acknowledged.len() < MAX_TURNS {
        let turn = known.acknowledged.len();
        let ask = match known.acknowledged.last() {
            Some(last) => ask(name, turn).after(&last.id),
            None => ask(name, turn),
        };
        let reply = match turn % 2 {
            0 => ask.try_send(client),
            _ => ask.stream(client).and_then(|stream| {
                known.broken = Some(stream.id.clone());
                Ok(stream.finish()?.0)
            }),
        };
        let Ok(reply) = reply else { return known };
        known.broken = None;
        known.acknowledged.push(reply);
        num_acknowledged.fetch_add(1, Ordering::Relaxed);
    }
    known
}

/// One long stream after the other; gives the id of the one that the kill broke.
fn stream_until_killed(client: &Client, name: usize) -> Option<String> {
    loop {
        let stream = ask(name, 0).max(100_000).with("ignore_eos", json!(true)).stream(client).ok()?;
        let id = stream.id.clone();
        if stream.finish().is_err() {
            return Some(id);
        }
    }
}

/// Kills a server under load, some time after so many turns were acknowledged.
fn kill_under_load(server: Server, first_name: usize, num_turns: usize, delay: Duration) -> (Stopped, Vec<Known>) {
    let num_acknowledged = AtomicUsize::new(0);
    let (client, count) = (server.client.clone(), &num_acknowledged);
    let client = &client;
    thread::scope(|scope| {
        let talk = |name| scope.spawn(move || talk_until_killed(client, name, count));
        let talks: Vec<_> = (first_name..first_name + NUM_TALKS).map(talk).collect();
        let stream = |name| scope.spawn(move || (name, stream_until_killed(client, name)));
        let long: Vec<_> = (first_name + NUM_TALKS..first_name + NUM_TALKS + NUM_LONG_STREAMS).map(stream).collect();
        wait_until("turns are acknowledged", Duration::from_secs(200), || count.load(Ordering::Relaxed) >= num_turns);
        thread::sleep(delay);
        let stopped = server.kill();
        let mut known: Vec<Known> = talks.into_iter().map(|t| t.join().expect("outlives its server")).collect();
        known.extend(long.into_iter().map(|stream| {
            let (name, broken) = stream.join().expect("outlives its server");
            Known { name, acknowledged: Vec::new(), broken }
        }));
        (stopped, known)
    })
}

/// Every acknowledged turn goes on, and with the words of a server that nothing happened to.
fn assert_goes_on(known: &Known, client: &Client, undisturbed: &Client) {
    let Some(last) = known.acknowledged.last() else { return };
    let mut parent: Option<String> = None;
    for (turn, reply) in known.acknowledged.iter().enumerate() {
        let ask = match &parent {
            Some(parent) => ask(known.name, turn).after(parent),
            None => ask(known.name, turn),
        };
        let expected = ask.send(undisturbed);
        assert_eq!(reply.text, expected.text, "conversation {}, turn {turn}, before the kill", known.name);
        let stored = client.get(&format!("/v1/responses/{}", reply.id)).ok();
        let stored = Reply::of_response(&stored).expect("a whole response");
        assert_eq!(stored, *reply, "conversation {}, turn {turn}, read back", known.name);
        parent = Some(expected.id);
    }
    let next = known.acknowledged.len();
    let expected = ask(known.name, next).after(&parent.expect("at least one turn")).send(undisturbed);
    let actual = ask(known.name, next).after(&last.id).send(client);
    assert_eq!(
        (actual.text, actual.usage.input, actual.usage.output),
        (expected.text, expected.usage.input, expected.usage.output),
        "conversation {}, turn {next}, after the kill",
        known.name
    );
}

/// A broken stream's turn does not exist, unless its end was on disk and only the last event was lost. Gives whether it is gone.
fn assert_gone_or_whole(id: &str, client: &Client) -> bool {
    let answer = client.get(&format!("/v1/responses/{id}"));
    let next = client.post("/v1/responses", &Ask::new("Go on.").after(id).max(2).body());
    if answer.status == 200 {
        Reply::of_response(&answer.json()).expect("a whole response");
        next.ok();
        return false;
    }
    assert_eq!((answer.status, answer.refusal().as_str()), (404, "response_not_found"));
    assert_eq!((next.status, next.refusal().as_str()), (404, "response_not_found"));
    true
}

/// Several kills of one data folder, at different moments of the load.
fn kill_again_and_again(model: ModelKind, tiers: [usize; 3], num_kills: usize, num_turns: usize) {
    let undisturbed = Server::start(Settings::roomy(model));
    let mut random = words::seeded(7);
    let [device, dram, rocks] = tiers;
    let mut server = Server::start(Settings::tiers(model, device, dram, rocks));
    let mut all: Vec<Known> = Vec::new();
    for kill in 0..num_kills {
        let delay = Duration::from_millis(random.random_range(0..150));
        let (stopped, known) = kill_under_load(server, kill * 10, num_turns, delay);
        assert!(known.iter().map(|k| k.acknowledged.len()).sum::<usize>() >= num_turns);
        server = stopped.start();
        all.extend(known);
        // Also what earlier lives acknowledged.
        all.iter().for_each(|known| assert_goes_on(known, &server.client, &undisturbed.client));
    }
    let broken: Vec<&String> = all.iter().filter_map(|known| known.broken.as_ref()).collect();
    let num_gone = broken.iter().filter(|id| assert_gone_or_whole(id, &server.client)).count();
    assert!(num_gone > 0, "the kills broke no stream");
    server.finish();
    undisturbed.finish();
}

#[test]
fn acknowledged_turns_survive_kill_9() {
    kill_again_and_again(ModelKind::Demo, [60, 40, 60], 1, 15);
}

#[test]
fn acknowledged_turns_survive_many_kills_at_random_moments() {
    kill_again_and_again(ModelKind::Tiny, [160, 60, 400], 5, 60);
}

/// SIGTERM: what runs ends well, what comes is refused with a reason, and the next start finds K/V on disk.
#[test]
fn sigterm_finishes_streams_and_keeps_state() {
    // Everything unused is copied down at once, so that it is on disk when the signal comes.
    let settings = Settings::tiers(ModelKind::Demo, 40, 0, 60).set("scheduler", "swap_out_below", "1.0");
    let server = Server::start(settings);
    let long = words::plain(&mut words::seeded(1), 90);
    let first = Ask::new(&format!("Here is a list: {long}. Which is the first word?")).max(8).send(&server.client);
    let second = Ask::new("And the second?").after(&first.id).max(8).send(&server.client);
    let whole_chunks = (second.usage.input + second.usage.output - 1) / 32;
    wait_until("the conversation's chunks are copied to disk", Duration::from_secs(60), || {
        server.metrics().tier("chunks", "rocks") >= whole_chunks
    });

    let ask = Ask::new("Tell me a story about it.").after(&second.id).max(120).with("ignore_eos", json!(true));
    let mut stream = ask.stream(&server.client).expect("the stream opens");
    stream.next_delta().expect("the stream goes on");
    server.send_sigterm();
    // The signal is seen a moment later. A server that is done already refuses connections instead.
    let refused = Ask::new("Anyone there?").max(2).with("store", json!(false)).body();
    let probe = || match server.client.try_post("/v1/responses", &refused) {
        Ok(answer) if answer.status == 200 => false,
        Ok(answer) => {
            assert_eq!((answer.status, answer.refusal().as_str()), (503, "shutting_down"));
            assert!(answer.retry_after.is_some_and(|seconds| seconds >= 1));
            assert_eq!(server.client.get("/ready").status, 503);
            true
        }
        Err(error) => panic!("the stream still runs, but nobody answers: {error:#}"),
    };
    wait_until("new turns are refused", Duration::from_secs(20), probe);
    let (story, deltas) = stream.finish().expect("a stream in flight at SIGTERM ends well");
    assert_eq!((story.usage.output, story.stopped), (120, false));
    assert!(deltas.len() > 20, "{deltas:?}");
    let (status, stopped) = server.wait();
    assert_eq!(status.code(), Some(0));

    let server = stopped.start();
    let after = Ask::new("And the third word?").after(&second.id).max(8);
    let reply = after.send(&server.client);
    assert_eq!((reply.usage.cached, reply.usage.tier("rocks")), (32 * whole_chunks, 32 * whole_chunks));
    let of_story = Ask::new("Go on.").after(&story.id).max(8).send(&server.client);
    assert!(of_story.usage.cached >= 32 * whole_chunks, "{:?}", of_story.usage);

    let undisturbed = Server::start(Settings::roomy(ModelKind::Demo));
    let one = Ask::new(&format!("Here is a list: {long}. Which is the first word?")).max(8).send(&undisturbed.client);
    let two = Ask::new("And the second?").after(&one.id).max(8).send(&undisturbed.client);
    assert_eq!(Ask::new("And the third word?").after(&two.id).max(8).send(&undisturbed.client).text, reply.text);
    undisturbed.finish();
    server.finish();
}

/// K/V and turns belong to the weights that made them, not to a name or a folder.
#[test]
fn another_models_state_is_refused_and_its_cache_unused() {
    let spilling = |dummy: &str| {
        let settings = Settings::tiers(ModelKind::Tiny, 64, 0, 400).set("scheduler", "swap_out_below", "1.0");
        settings.set("model", "name", "\"the-same-name\"").set("model", "dummy", dummy)
    };
    let server = Server::start(spilling("\"tiny\""));
    let first = ask(1, 0).send(&server.client);
    wait_until("chunks are on disk", Duration::from_secs(30), || server.metrics().tier("chunks", "rocks") > 0);
    let mut stopped = server.finish();

    stopped.settings = spilling("\"tiny:bf16\"");
    let server = stopped.start();
    let answer = server.client.post("/v1/responses", &ask(1, 1).after(&first.id).body());
    assert_eq!((answer.status, answer.refusal().as_str()), (409, "conflict"));
    let other = ask(1, 0).send(&server.client);
    assert_eq!(other.usage.cached, 0, "the same prompt, but other weights");
    assert_ne!(other.text, first.text);
    let mut stopped = server.finish();

    stopped.settings = spilling("\"tiny\"");
    let server = stopped.start();
    let again = ask(1, 0).send(&server.client);
    assert_eq!(again.text, first.text);
    ask(1, 1).after(&first.id).send(&server.client);
    server.finish();
}
