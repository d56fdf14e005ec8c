//! Memory moves, answers do not: conversations that fit nowhere together, interleaved at random, must say what they would say on a
//! server with room for everything; and when it is over, every block and every pin is accounted for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::thread;

use keepsake_tests::{words, Ask, Client, Complete, Metrics, ModelKind, Reply, Server, Settings};
use rand::seq::SliceRandom;

/// Allowed on top of what is configured: code, stacks, allocator, connections, and the model file while it is read.
const SLACK_BYTES: u64 = 300_000_000;

/// What the conversations say, turn by turn; a pure function of the numbers in it.
struct Script {
    /// One turn of so many is greedy; the others are drawn at random, the same in every run.
    greedy_every: usize,
    num_conversations: usize,
    num_turns: usize,
    max_tokens: usize,
    words_per_turn: usize,
}

impl Script {
    /// The first turn plants the conversation's own word, the others ask for it amid small talk.
    fn input(&self, conversation: usize, turn: usize) -> String {
        let mut random = words::seeded((conversation * 1000 + turn) as u64);
        let chatter = words::plain(&mut random, self.words_per_turn);
        match turn {
            0 => format!("{chatter}. The password is {}. Repeat only the password.", words::canary(conversation)),
            _ => format!("{chatter}. Repeat only the password."),
        }
    }

    fn ask(&self, conversation: usize, turn: usize) -> Ask {
        let ask = Ask::new(&self.input(conversation, turn)).max(self.max_tokens);
        match turn % self.greedy_every {
            0 => ask,
            _ => ask.sampled(conversation),
        }
    }

    /// Every conversation once for each of its turns, shuffled.
    fn order(&self, seed: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.num_conversations).flat_map(|c| vec![c; self.num_turns]).collect();
        order.shuffle(&mut words::seeded(seed));
        order
    }

    /// Plays all turns in a shuffled order from several clients at once; a conversation's own turns stay in sequence.
    fn play(&self, client: &Client, num_clients: usize, seed: u64) -> Vec<Vec<Reply>> {
        let order = self.order(seed);
        let next = AtomicUsize::new(0);
        let conversations: Vec<Mutex<Vec<Reply>>> = (0..self.num_conversations).map(|_| Mutex::default()).collect();
        thread::scope(|scope| {
            for _ in 0..num_clients {
                scope.spawn(|| {
                    while let Some(&conversation) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let mut replies = conversations[conversation].lock().expect("no turn has failed");
                        let ask = self.ask(conversation, replies.len());
                        let ask = match replies.last() {
                            Some(last) => ask.after(&last.id),
                            None => ask,
                        };
                        replies.push(ask.send(client));
                    }
                });
            }
        });
        conversations.into_iter().map(|replies| replies.into_inner().expect("no turn has failed")).collect()
    }
}

/// The same replies, token counts and endings; only where the past came from may differ.
fn assert_same_replies(expected: &[Vec<Reply>], actual: &[Vec<Reply>]) {
    for (conversation, (expected, actual)) in expected.iter().zip(actual).enumerate() {
        for (turn, (expected, actual)) in expected.iter().zip(actual).enumerate() {
            let said = |reply: &Reply| (reply.text.clone(), reply.stopped, reply.usage.input, reply.usage.output);
            assert_eq!(said(actual), said(expected), "conversation {conversation}, turn {turn}");
        }
        assert_eq!(actual.len(), expected.len(), "conversation {conversation}");
    }
}

/// No reply holds another conversation's word. Gives how many hold their own.
fn check_canaries(replies: &[Vec<Reply>]) -> usize {
    let canaries: Vec<String> = (0..replies.len()).map(words::canary).collect();
    let mut num_own = 0;
    for (conversation, replies) in replies.iter().enumerate() {
        for (turn, reply) in replies.iter().enumerate() {
            let text = reply.text.to_lowercase();
            for (owner, canary) in canaries.iter().enumerate().filter(|(_, canary)| text.contains(canary.as_str())) {
                assert_eq!(owner, conversation, "conversation {conversation} said {canary} in turn {turn}: {text}");
                num_own += 1;
            }
        }
    }
    num_own
}

/// The server's totals are the sum of what it told its clients.
fn assert_honest_totals(metrics: &Metrics, replies: &[Vec<Reply>]) {
    let usages = || replies.iter().flatten().map(|reply| &reply.usage);
    for tier in ["device", "dram", "rocks"] {
        assert_eq!(metrics.tokens(tier), usages().map(|usage| usage.tier(tier)).sum::<u64>(), "{tier}");
    }
    assert_eq!(metrics.tokens("recomputed"), usages().map(|usage| usage.recomputed).sum::<u64>());
    let all = ["device", "dram", "rocks", "recomputed", "new"].map(|source| metrics.tokens(source));
    assert_eq!(all.iter().sum::<u64>(), metrics.count("keepsake_prompt_tokens_total"));
    assert_eq!(metrics.count("keepsake_prompt_tokens_total"), usages().map(|usage| usage.input).sum::<u64>());
    assert_eq!(metrics.count("keepsake_generation_tokens_total"), usages().map(|usage| usage.output).sum::<u64>());
    assert_eq!(
        metrics.count("keepsake_request_success_total{finished_reason=\"stop\"}")
            + metrics.count("keepsake_request_success_total{finished_reason=\"length\"}"),
        usages().count() as u64
    );
}

/// At rest: no pin, no running work, blocks add up, tiers within their sizes; and every block can still be had.
fn assert_nothing_is_lost(server: &Server, chunks_below: &[(&str, usize)]) {
    let settings = server.settings();
    let total = settings.device_chunks() as u64;
    let metrics = server.settle();
    assert_eq!(metrics.count("keepsake_pins"), 0);
    assert_eq!(metrics.blocks("total"), total);
    assert_eq!(metrics.blocks("free") + metrics.blocks("clean") + metrics.blocks("used"), total);
    for &(tier, chunks) in chunks_below {
        let (used, capacity) = (metrics.tier("used_bytes", tier), metrics.tier("capacity_bytes", tier));
        assert_eq!(capacity, settings.tier_bytes(chunks), "{tier}");
        assert!(used <= capacity, "{tier}: {used} of {capacity}");
        let held = metrics.tier("chunks", tier) * settings.model().chunk_bytes();
        assert!(held <= used, "{tier}: {held} bytes of chunks in {used} bytes");
    }
    // A prompt that takes the whole pool is only possible if no block was lost.
    let prompt = words::tokens(&mut words::seeded(99), total as usize * 32 - 1);
    assert_eq!(Complete::new(&prompt, 1).send(&server.client).usage.input, prompt.len() as u64);
    server.settle();
}

fn assert_within_memory(server: &Server) {
    let allowed = server.settings().memory_bytes() + server.weight_bytes() + SLACK_BYTES;
    let peak = server.peak_resident_bytes();
    assert!(peak < allowed, "resident memory peaked at {peak}, allowed are {allowed}");
}

/// The issue's own case: the device holds two conversations, DRAM four, RocksDB ten, and fifty talk.
#[test]
fn fifty_conversations_say_what_they_would_say_with_room_for_everything() {
    let script = Script { greedy_every: 2, num_conversations: 50, num_turns: 5, max_tokens: 10, words_per_turn: 6 };
    let roomy = Server::start(Settings::roomy(ModelKind::Demo));
    let expected = script.play(&roomy.client, 8, 1);
    // Of a reply's last token there is no K/V before the next turn feeds it; everything else is there.
    let num_later_turns = (50 * 4) as u64;
    let recomputed = roomy.settle().tokens("recomputed");
    assert!(recomputed <= num_later_turns, "{recomputed} tokens recomputed where there was room for everything");
    roomy.finish();
    let longest =
        expected.iter().filter_map(|replies| replies.last()).map(|last| last.usage.input + last.usage.output).max();
    let chunks = longest.expect("fifty conversations").div_ceil(32) as usize;

    let server = Server::start(Settings::tiers(ModelKind::Demo, 2 * chunks, 4 * chunks, 10 * chunks));
    let actual = script.play(&server.client, 4, 2);
    assert_same_replies(&expected, &actual);
    let num_own = check_canaries(&actual);
    // The check is worth something only if the model does say such words.
    assert!(num_own > 20, "only {num_own} replies hold their conversation's word");

    let metrics = server.settle();
    for source in ["device", "dram", "rocks", "recomputed"] {
        assert!(metrics.tokens(source) > 0, "no token came from {source}");
    }
    assert_eq!(metrics.count("keepsake_kv_load_failures_total"), 0);
    assert!(!server.log.contains("writes fail"), "the disk is fine: {}", server.log.tail(20));
    assert_honest_totals(&metrics, &actual);
    assert_within_memory(&server);
    assert_nothing_is_lost(&server, &[("dram", 4 * chunks), ("rocks", 10 * chunks)]);
    server.finish();
}

/// The same with generated weights, where turns cost nothing: more conversations, more clients, longer replies, several shapes of
/// the tiers, two steps in flight.
#[test]
fn a_storm_of_conversations_with_tiers_of_every_shape() {
    let script = Script { greedy_every: 5, num_conversations: 50, num_turns: 5, max_tokens: 40, words_per_turn: 6 };
    let roomy = Server::start(Settings::roomy(ModelKind::Tiny));
    let expected = script.play(&roomy.client, 8, 1);
    roomy.finish();

    let shapes = [(48, 60, 200), (64, 20, 400), (48, 300, 0), (48, 0, 300), (64, 0, 0)];
    for (seed, (device, dram, rocks)) in shapes.into_iter().enumerate() {
        let settings = Settings::tiers(ModelKind::Tiny, device, dram, rocks)
            .set("scheduler", "max_running", "8")
            .set("scheduler", "step_tokens", "96")
            .set("scheduler", "steps_in_flight", if seed % 2 == 0 { "2" } else { "1" });
        let server = Server::start(settings);
        let actual = script.play(&server.client, 8, 10 + seed as u64);
        assert_same_replies(&expected, &actual);
        check_canaries(&actual);
        let metrics = server.settle();
        assert!(metrics.tokens("recomputed") > 0, "{device} + {dram} + {rocks} chunks held everything");
        assert_honest_totals(&metrics, &actual);
        let below: Vec<(&str, usize)> =
            [("dram", dram), ("rocks", rocks)].into_iter().filter(|(_, n)| *n > 0).collect();
        for (tier, _) in &below {
            assert!(metrics.tokens(tier) > 0, "no token came from {tier}");
        }
        assert_nothing_is_lost(&server, &below);
        server.finish();
    }
}

/// Two conversations, each more than half of the device: they displace each other at every turn, and DRAM serves them.
#[test]
fn two_long_conversations_in_turn_are_served_by_dram() {
    let server = Server::start(Settings::tiers(ModelKind::Tiny, 40, 200, 0));
    let roomy = Server::start(Settings::roomy(ModelKind::Tiny));
    let mut last: [Option<(Reply, Reply)>; 2] = [None, None];
    for turn in 0..6 {
        for (conversation, last) in last.iter_mut().enumerate() {
            let num_words = if turn == 0 { 100 } else { 3 };
            let input = words::plain(&mut words::seeded((10 * turn + conversation) as u64), num_words);
            let ask = Ask::new(&input).max(12).sampled(turn);
            let (here, there) = match &*last {
                Some((here, there)) => (ask.clone().after(&here.id), ask.after(&there.id)),
                None => (ask.clone(), ask),
            };
            let (reply, expected) = (here.send(&server.client), there.send(&roomy.client));
            assert_eq!((&reply.text, reply.usage.input), (&expected.text, expected.usage.input), "turn {turn}");
            if let Some((before, _)) = last {
                let whole_chunks = (before.usage.input + before.usage.output - 1) / 32 * 32;
                assert!(whole_chunks >= 20 * 32, "the conversation fits the device twice");
                assert!(reply.usage.cached >= whole_chunks, "turn {turn}: {:?}", reply.usage);
            }
            *last = Some((reply, expected));
        }
    }
    assert!(server.metrics().tokens("dram") > 0);
    assert_nothing_is_lost(&server, &[("dram", 200)]);
    server.finish();
    roomy.finish();
}
