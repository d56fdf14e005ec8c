//! Logs that are deleted: what goes, what stays, and when.

use std::time::Duration;

use super::harness::{config, expected_reply, tier, Faults, Harness, CHUNK};
use crate::core::*;

fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 1_000 + i).collect()
}

fn tiers() -> Vec<TierSpec> {
    vec![tier("dram", 64, false), tier("rocks", 64, true)]
}

/// Everything unused is copied down at once.
fn eager() -> CoreConfig {
    CoreConfig { swap_out_below: 1.0, ..config() }
}

#[test]
fn the_only_log_goes_from_every_tier_with_its_tail() {
    for len in [3, 2 * CHUNK - 1, 5 * CHUNK, 5 * CHUNK + 2] {
        let mut server = Harness::new(eager(), 16, tiers());
        let log = tokens(1, len);
        let (reply, _) = server.converse(&log, 0, 6);
        assert!(server.core.gauges().num_chunks > 0);
        server.forget(&[log, reply].concat(), 0);
        server.settle();
        server.assert_empty();
    }
}

#[test]
fn a_sibling_keeps_what_both_share() {
    let mut server = Harness::new(eager(), 64, tiers());
    let past = tokens(1, 4 * CHUNK);
    let fork = |seed| [past.clone(), tokens(seed, 3 * CHUNK)].concat();
    let (one, two) = (fork(2), fork(3));
    let (reply, _) = server.converse(&one, 0, 2);
    server.converse(&two, past.len(), 2);
    let before = server.num_full_chunks();
    // Not even told what is shared: the walk sees that another chunk follows.
    server.forget(&[one, reply].concat(), 0);
    server.settle();
    assert_eq!(before - server.num_full_chunks(), 3);
    let next = [two.clone(), expected_reply(&two, 2), tokens(4, 2)].concat();
    let (_, usage) = server.converse(&next, two.len() + 2, 2);
    assert!(usage.recomputed <= CHUNK, "{usage:?}");
    assert_eq!(server.core.counters().chunks_forgotten, 3);
}

#[test]
fn what_a_living_turn_owns_stays_also_without_a_follower() {
    let mut server = Harness::new(eager(), 64, tiers());
    let log = tokens(1, 6 * CHUNK);
    server.converse(&log, 0, 1);
    server.forget(&log, 3 * CHUNK + 1);
    server.settle();
    assert_eq!(server.num_full_chunks(), 3);
    let (_, usage) = server.converse(&log[..4 * CHUNK], 4 * CHUNK, 1);
    assert_eq!((usage.device + usage.loaded.iter().sum::<usize>(), usage.recomputed), (3 * CHUNK, CHUNK));
}

#[test]
fn a_running_continuation_keeps_its_chunks() {
    let mut server = Harness::new(config(), 64, tiers());
    let log = tokens(1, 3 * CHUNK);
    let (reply, _) = server.converse(&log, 0, 2);
    let parent = [log, reply].concat();
    let next = [parent.clone(), tokens(2, 2)].concat();
    let id = server.submit(&next, parent.len(), 12).unwrap();
    server.turns(3);
    assert!(!server.finished.contains_key(&id), "it is to be forgotten while the next turn runs");
    server.forget(&parent, 0);
    server.settle();
    assert_eq!(server.replies[&id], expected_reply(&next, 12));
    let last = [next.clone(), expected_reply(&next, 12), tokens(3, 2)].concat();
    let (_, usage) = server.converse(&last, last.len() - 2, 1);
    assert!(usage.recomputed <= 1, "{usage:?}");
}

#[test]
fn a_chunk_in_use_goes_when_it_is_released() {
    let mut server = Harness::new(config(), 64, tiers());
    let log = tokens(1, 4 * CHUNK);
    server.converse(&log, 0, 1);
    // The same prompt again: it uses the first three chunks, and is stopped before it has anything of its own.
    let id = server.submit(&log, 0, 1).unwrap();
    server.plan_only();
    let now = server.now;
    server.core.stop(id, 0, now);
    server.forget(&log, 0);
    server.core.drain_commands();
    server.core.check().unwrap();
    assert_eq!(server.num_full_chunks(), 3, "in use by a step in flight");
    server.settle();
    server.assert_empty();
}

#[test]
fn a_chunk_being_copied_goes_when_the_copy_has_ended() {
    let mut server = Harness::new(eager(), 16, tiers());
    server.faults = Faults { delay: Duration::from_millis(200), ..Faults::default() };
    let log = tokens(1, 5 * CHUNK);
    let id = server.submit(&log, 0, 1).unwrap();
    while !server.finished.contains_key(&id) {
        server.turn();
    }
    server.turns(3);
    assert!(server.core.gauges().moves_in_flight > 0);
    server.forget(&log, 0);
    server.turns(3);
    assert!(server.core.gauges().num_chunks > 0, "still being copied");
    server.settle();
    server.assert_empty();
}

#[test]
fn more_removals_than_credits_wait_for_them() {
    let mut server = Harness::new(CoreConfig { moves_in_flight: 2, ..eager() }, 64, tiers());
    let log = tokens(1, 40 * CHUNK);
    server.converse(&log, 0, 1);
    server.faults = Faults { delay: Duration::from_millis(30), ..Faults::default() };
    server.forget(&log, 0);
    let mut most = 0;
    while !server.core.is_idle() {
        server.turn();
        most = most.max(server.core.gauges().moves_in_flight);
    }
    assert!(most <= 4, "{most} moves at once with two tiers and two credits each");
    server.assert_empty();
}

#[test]
fn chunks_of_an_earlier_run_are_forgotten_too() {
    let mut server = Harness::new(eager(), 16, vec![tier("rocks", 64, true)]);
    let log = tokens(1, 5 * CHUNK);
    let (reply, _) = server.converse(&log, 0, 2);
    let log = [log, reply].concat();
    let mut server = server.restart(eager(), 16, vec![tier("rocks", 64, true)]);
    assert_eq!(server.num_full_chunks(), 5);
    let fork = [log[..3 * CHUNK].to_vec(), tokens(2, 2 * CHUNK)].concat();
    server.converse(&fork, 3 * CHUNK, 1);
    server.forget(&log, 0);
    server.settle();
    assert_eq!(server.num_full_chunks(), 5, "three that both share, two of the fork");
    server.forget(&fork, 0);
    server.settle();
    server.assert_empty();
}
