//! Too many clients, and clients that go away: the queue is bounded, every block comes back, and each abort counts once.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use keepsake_tests::raw::Connection;
use keepsake_tests::{wait_until, words, Ask, Chat, Client, Complete, ModelKind, Server, Settings};
use rand::seq::SliceRandom;
use rand::Rng;
use serde_json::{json, Value};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn five_hundred_requests_at_once_meet_a_queue_of_eight() {
    const NUM_REQUESTS: usize = 500;
    let settings = Settings::tiers(ModelKind::Tiny, 64, 64, 0).set("server", "max_queued", "8").set(
        "scheduler",
        "max_running",
        "4",
    );
    let server = Server::start(settings);
    Complete::new(&words::tokens(&mut words::seeded(1), 40), 4).send(&server.client);
    let before = server.resident_bytes();

    let start = Arc::new(Barrier::new(NUM_REQUESTS));
    let requests: Vec<_> = (0..NUM_REQUESTS)
        .map(|index| {
            let (start, address) = (Arc::clone(&start), server.address.clone());
            let body = Complete::new(&words::tokens(&mut words::seeded(index as u64), 8), 300).body();
            let request = move || {
                let mut connection = Connection::open(&address);
                start.wait();
                connection.post("/v1/completions", &body);
                connection.answer().expect("an answer, whatever it says")
            };
            thread::Builder::new().stack_size(256 << 10).spawn(request).expect("a thread")
        })
        .collect();
    let answers: Vec<_> = requests.into_iter().map(|request| request.join().expect("an answer")).collect();

    let num_ok = answers.iter().filter(|answer| answer.status == 200).count();
    let refused: Vec<_> = answers.iter().filter(|answer| answer.status != 200).collect();
    for answer in &refused {
        assert_eq!((answer.status, answer.refusal().as_str()), (429, "rate_limit_exceeded"), "{}", answer.text);
        assert!(answer.retry_after.is_some_and(|seconds| (1..=60).contains(&seconds)), "{answer:?}");
    }
    assert!(num_ok >= 8, "{num_ok} of {NUM_REQUESTS} were served");
    assert!(refused.len() >= 100, "only {} of {NUM_REQUESTS} were refused", refused.len());
    let metrics = server.settle();
    assert_eq!(metrics.count("keepsake_queue_rejections_total"), refused.len() as u64);
    assert_eq!(metrics.count("keepsake_request_success_total{finished_reason=\"length\"}"), num_ok as u64 + 1);
    let grown = server.peak_resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more at the peak of {NUM_REQUESTS} requests");
    Complete::new(&words::tokens(&mut words::seeded(1), 40), 4).send(&server.client);
    server.finish();
}

/// A request that ends only when its client leaves: as long as the context allows, in a pool that it fills with others.
fn endless(random: &mut impl Rng, stream: bool) -> Value {
    // Prompts repeat, so that a part of each comes out of the tiers below the device.
    let text = words::plain(&mut words::seeded(random.random_range(0..6)), 25);
    let chat =
        Chat::new(&[("user", &text)]).with("ignore_eos", json!(true)).with("seed", json!(random.random::<u32>()));
    chat.with("temperature", json!(1.0)).with("stream", json!(stream)).body()
}

/// At rest with all blocks free or clean or holding chunks, and all of them to be had by one request.
fn assert_nothing_is_lost(server: &Server) {
    let metrics = server.settle();
    assert_eq!(metrics.count("keepsake_pins"), 0);
    let total = server.settings().device_chunks();
    let prompt = words::tokens(&mut words::seeded(99), total * 32 - 1);
    assert_eq!(Complete::new(&prompt, 1).send(&server.client).usage.output, 1);
}

#[test]
fn clients_that_leave_at_any_moment_give_everything_back() {
    // Ten requests of 2,000 tokens want ten times this pool.
    let settings = Settings::tiers(ModelKind::Tiny, 60, 40, 300).set("scheduler", "max_running", "12");
    let server = Server::start(settings);
    let mut random = words::seeded(8);
    let aborted = || server.metrics().count("keepsake_aborted_requests_total");
    let in_server = || {
        let metrics = server.metrics();
        metrics.count("keepsake_num_requests_running") + metrics.count("keepsake_num_requests_waiting")
    };

    // Leaving while the server works on it: each abort counts once.
    const NUM_CLIENTS: usize = 10;
    for round in 1..=10 {
        let mut clients: Vec<Connection> = (0..NUM_CLIENTS)
            .map(|index| {
                let mut connection = Connection::open(&server.address);
                connection.post("/v1/chat/completions", &endless(&mut random, index % 2 == 0));
                connection
            })
            .collect();
        wait_until("all requests are in", LIMIT, || in_server() == NUM_CLIENTS as u64);
        clients.shuffle(&mut random);
        for client in clients {
            thread::sleep(Duration::from_millis(random.random_range(0..20)));
            drop(client);
        }
        wait_until("all requests are gone", LIMIT, || in_server() == 0);
        assert_eq!(aborted(), (round * NUM_CLIENTS) as u64, "round {round}");
    }
    assert_nothing_is_lost(&server);

    // Leaving before, while and after the request is read, tokenised and queued: some were never there.
    for index in 0..60 {
        let mut connection = Connection::open(&server.address);
        connection.post("/v1/chat/completions", &endless(&mut random, index % 2 == 0));
        thread::sleep(Duration::from_micros(random.random_range(0..4000)));
    }
    wait_until("all requests are gone", LIMIT, || in_server() == 0);
    server.settle();
    assert!((100..=160).contains(&aborted()), "{} aborts", aborted());
    assert_nothing_is_lost(&server);
    server.finish();
}

/// A client that leaves while its past is on its way up from disk.
#[test]
fn leaving_while_chunks_are_loaded_gives_everything_back() {
    let settings = Settings::tiers(ModelKind::Tiny, 64, 16, 600).set("scheduler", "swap_out_below", "1.0");
    let server = Server::start(settings);
    let texts: Vec<String> = (0..8).map(|seed| words::plain(&mut words::seeded(seed), 80)).collect();
    let first = |text: &String, client: &Client| Ask::new(text).max(8).sampled(1).send(client).id;
    let parents: Vec<String> = texts.iter().map(|text| first(text, &server.client)).collect();
    server.settle();
    let mut random = words::seeded(9);
    for _ in 0..80 {
        let mut connection = Connection::open(&server.address);
        let parent = &parents[random.random_range(0..parents.len())];
        let ask = Ask::new("Go on.").after(parent).with("stream", json!(random.random::<bool>()));
        connection.post("/v1/responses", &ask.body());
        thread::sleep(Duration::from_micros(random.random_range(500..8000)));
    }
    let metrics = server.settle();
    assert!(metrics.sum("keepsake_moves_total", "to=\"device\"") > 0.0, "nothing was loaded");
    assert_nothing_is_lost(&server);
    // What they left is still right.
    let roomy = Server::start(Settings::roomy(ModelKind::Tiny));
    for (text, parent) in texts.iter().zip(&parents) {
        let next = |parent: &str, client: &Client| Ask::new("Go on.").after(parent).max(8).sampled(2).send(client).text;
        assert_eq!(next(parent, &server.client), next(&first(text, &roomy.client), &roomy.client));
    }
    roomy.finish();
    server.finish();
}

#[test]
fn a_streaming_client_that_leaves_stops_its_turn() {
    let server = Server::start(Settings::roomy(ModelKind::Demo));
    let mut connection = Connection::open(&server.address);
    let body = Chat::new(&[("user", "Tell me everything.")])
        .with("ignore_eos", json!(true))
        .with("stream", json!(true))
        .body();
    connection.post("/v1/chat/completions", &body);
    connection.read_until("\"content\":\"");
    drop(connection);
    let metrics = server.settle();
    assert_eq!(metrics.count("keepsake_aborted_requests_total"), 1);
    // Stopped long before its context was full.
    assert_eq!(metrics.count("keepsake_generation_tokens_total"), 0, "an aborted turn is no finished one");
    assert!(metrics.blocks("free") + 20 > metrics.blocks("total"), "{} blocks free", metrics.blocks("free"));
    server.finish();
}
