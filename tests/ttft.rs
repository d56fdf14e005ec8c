//! A turn costs what is new in it, whatever came before. The only test that compares times: ratios of medians, on one
//! server that does nothing else. It is alone in its file, so no other test of this crate runs beside it.

use std::time::Duration;

use keepsake_tests::{words, Complete, ModelKind, Server, Settings};

const HISTORY_TOKENS: usize = 1500;
const NEW_TOKENS: usize = 20;
const NUM_ROUNDS: usize = 5;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn twenty_new_tokens_after_fifteen_hundred_cached_ones_start_at_once() {
    let server = Server::start(Settings::roomy(ModelKind::Demo));
    let client = &server.client;
    let mut random = words::seeded(6);
    let (mut on_empty, mut on_cached, mut from_nothing) = (Vec::new(), Vec::new(), Vec::new());
    Complete::new(&words::tokens(&mut random, NEW_TOKENS), 1).time_first_token(client);
    for _ in 0..NUM_ROUNDS {
        // Several of the short ones a round: they are the noisy ones.
        for _ in 0..3 {
            let prompt = words::tokens(&mut random, NEW_TOKENS);
            let (time, usage) = Complete::new(&prompt, 1).time_first_token(client);
            assert_eq!(usage.cached, 0);
            on_empty.push(time);
        }
        let history = words::tokens(&mut random, HISTORY_TOKENS);
        let (_, usage) = Complete::new(&history, 1).time_first_token(client);
        assert_eq!(usage.cached, 0);
        let turn = [history, words::tokens(&mut random, NEW_TOKENS)].concat();
        let (time, usage) = Complete::new(&turn, 1).time_first_token(client);
        // All of the history is there, its partial last chunk too: only the new tokens are computed.
        assert_eq!(usage.cached, HISTORY_TOKENS as u64, "{usage:?}");
        on_cached.push(time);
        // The same length, of which nothing is known.
        let other = words::tokens(&mut random, HISTORY_TOKENS + NEW_TOKENS);
        let (time, usage) = Complete::new(&other, 1).time_first_token(client);
        assert_eq!(usage.cached, 0);
        from_nothing.push(time);
    }
    let (on_empty, on_cached, from_nothing) = (median(on_empty), median(on_cached), median(from_nothing));
    let report = format!("empty {on_empty:?}, cached {on_cached:?}, from nothing {from_nothing:?}");
    println!("{report}");
    assert!(on_cached * 10 < from_nothing, "{report}");
    server.finish();
}
