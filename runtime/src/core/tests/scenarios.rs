//! One situation each, with the exact numbers it must give.

use std::time::Duration;

use super::harness::{config, expected_reply, tier, Faults, Harness, CHUNK};
use crate::core::*;

fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 1_000 + i).collect()
}

#[test]
fn a_second_turn_computes_only_its_new_tokens() {
    let mut server = Harness::new(config(), 32, vec![]);
    let mut log = tokens(1, 10);
    let (reply, usage) = server.converse(&log, 0, 7);
    assert_eq!((usage.device, usage.recomputed, usage.new), (0, 0, 10));
    log.extend(reply);
    let num_past = log.len();
    log.extend(tokens(2, 3));
    let (_, usage) = server.converse(&log, num_past, 1);
    // The last sampled token was never fed, so it has no K/V: 16 of 17 past tokens are there, tail included.
    assert_eq!((usage.device, usage.recomputed, usage.new), (16, 1, 3));
}

#[test]
fn a_fully_cached_prompt_computes_its_last_chunk_in_a_private_block() {
    let mut server = Harness::new(config(), 32, vec![]);
    let log = tokens(1, 3 * CHUNK);
    server.converse(&log, 0, 1);
    let (_, usage) = server.converse(&log, 0, 1);
    assert_eq!((usage.device, usage.new), (2 * CHUNK, CHUNK));
}

#[test]
fn a_tail_goes_to_the_first_continuation_and_forks_rebuild_it() {
    let mut server = Harness::new(config(), 64, vec![]);
    let mut log = tokens(1, 6);
    let (reply, _) = server.converse(&log, 0, 4);
    log.extend(reply);
    let fork = |seed| [log.clone(), tokens(seed, 5)].concat();
    let (_, first) = server.converse(&fork(2), log.len(), 2);
    let (_, second) = server.converse(&fork(3), log.len(), 2);
    assert_eq!((first.device, first.recomputed), (9, 1));
    assert_eq!((second.device, second.recomputed), (8, 2), "the tail belongs to the first fork now");
}

#[test]
fn what_the_device_has_no_room_for_comes_back_from_below() {
    let mut server = Harness::new(config(), 8, vec![tier("dram", 64, false)]);
    let log = tokens(1, 5 * CHUNK);
    let (reply, _) = server.converse(&log, 0, 4);
    for seed in 2..6 {
        server.converse(&tokens(seed, 5 * CHUNK), 0, 4);
    }
    let next = [log, reply, tokens(9, 2)].concat();
    let (_, usage) = server.converse(&next, next.len() - 2, 2);
    assert!(usage.loaded[0] > 0, "{usage:?}");
    assert_eq!(usage.device + usage.loaded[0] + usage.recomputed + usage.new, next.len());
}

#[test]
fn without_tiers_a_dropped_chunk_is_recomputed() {
    let mut server = Harness::new(config(), 8, vec![]);
    let log = tokens(1, 5 * CHUNK);
    let (reply, _) = server.converse(&log, 0, 4);
    for seed in 2..4 {
        server.converse(&tokens(seed, 5 * CHUNK), 0, 4);
    }
    let next = [log, reply, tokens(9, 2)].concat();
    let (_, usage) = server.converse(&next, next.len() - 2, 2);
    assert!(usage.recomputed > CHUNK, "{usage:?}");
    assert!(server.core.counters().chunks_dropped > 0);
}

#[test]
fn a_prompt_at_the_limit_is_refused_and_output_is_clipped() {
    let mut server = Harness::new(config(), 4, vec![]);
    let limit = 4 * CHUNK;
    assert_eq!(server.submit(&tokens(1, limit), 0, 1), Err(Rejected::TooLong { limit }));
    let id = server.submit(&tokens(1, limit - 3), 0, 1_000).unwrap();
    server.settle();
    assert_eq!(server.replies[&id].len(), 3);
    assert_eq!(server.finished[&id].0, FinishCause::Length);
}

#[test]
fn a_full_queue_refuses() {
    let mut server = Harness::new(CoreConfig { max_waiting: 2, ..config() }, 16, vec![]);
    assert!(server.submit(&tokens(1, 4), 0, 1).is_ok());
    assert!(server.submit(&tokens(2, 4), 0, 1).is_ok());
    assert_eq!(server.submit(&tokens(3, 4), 0, 1), Err(Rejected::QueueFull));
    server.settle();
    assert!(server.submit(&tokens(3, 4), 0, 1).is_ok());
}

#[test]
fn decoding_out_of_blocks_suspends_the_latest_arrival_and_loses_nothing() {
    let mut server = Harness::new(CoreConfig { reserve: 0.0, ..config() }, 10, vec![tier("dram", 64, false)]);
    let ids: Vec<_> = (1..4).map(|seed| server.submit(&tokens(seed, 10), 0, 20).unwrap()).collect();
    server.settle();
    for (seed, id) in (1..4).zip(ids) {
        assert_eq!(server.replies[&id], expected_reply(&tokens(seed, 10), 20));
    }
    assert!(server.core.counters().num_suspensions > 0);
}

#[test]
fn each_failed_load_is_one_hole() {
    for load_every in [1, 2, 3, 5] {
        let mut server = Harness::new(config(), 12, vec![tier("dram", 64, false), tier("rocks", 64, true)]);
        let log = tokens(1, 6 * CHUNK);
        let (reply, _) = server.converse(&log, 0, 2);
        for seed in 2..8 {
            server.converse(&tokens(seed, 6 * CHUNK), 0, 2);
        }
        server.faults = Faults { load_every, ..Faults::default() };
        let next = [log, reply, tokens(9, 2)].concat();
        let (_, usage) = server.converse(&next, next.len() - 2, 3);
        assert!(server.core.counters().load_failures > 0);
        let loaded: usize = usage.loaded.iter().sum();
        assert_eq!(usage.device + loaded + usage.recomputed + usage.new, next.len());
    }
}

#[test]
fn a_late_load_becomes_a_hole_and_its_block_waits_for_the_copy() {
    let quick = CoreConfig { load_timeout: Duration::from_millis(50), swap_out_below: 1.0, ..config() };
    let mut server = Harness::new(quick, 12, vec![tier("dram", 64, false)]);
    let log = tokens(1, 4 * CHUNK);
    let (reply, _) = server.converse(&log, 0, 2);
    for seed in 2..6 {
        server.converse(&tokens(seed, 6 * CHUNK), 0, 2);
    }
    server.faults.delay = Duration::from_millis(500);
    let next = [log, reply, tokens(9, 2)].concat();
    let id = server.submit(&next, next.len() - 2, 3).unwrap();
    server.turns(20);
    assert_eq!(server.replies[&id], expected_reply(&next, 3), "it did not wait for the copy");
    assert!(server.core.snapshot().orphaned_blocks > 0);
    server.settle();
    assert_eq!(server.core.snapshot().orphaned_blocks, 0);
}

#[test]
fn stopping_at_any_moment_gives_every_block_back() {
    for stop_after in 0..12 {
        let mut server = Harness::new(config(), 16, vec![tier("dram", 64, false)]);
        let log = tokens(1, 3 * CHUNK + 1);
        server.converse(&log, 0, 2);
        for seed in 2..6 {
            server.converse(&tokens(seed, 6 * CHUNK), 0, 2);
        }
        server.faults.delay = Duration::from_millis(40);
        let id = server.submit(&log, 0, 30).unwrap();
        server.turns(stop_after);
        let now = server.now;
        server.core.stop(id, usize::MAX, now);
        server.settle();
        let snapshot = server.core.snapshot();
        assert_eq!(snapshot.num_pins, 0);
        assert_eq!(snapshot.private_blocks, 0);
        assert!(server.finished.contains_key(&id));
    }
}

#[test]
fn a_stop_that_cuts_the_log_leaves_a_tail_that_fits() {
    let mut server = Harness::new(config(), 32, vec![]);
    let log = tokens(1, 6);
    let id = server.submit(&log, 0, 30).unwrap();
    while server.replies[&id].len() < 5 {
        server.turn();
    }
    let kept = [log.clone(), server.replies[&id][..4].to_vec()].concat();
    let now = server.now;
    server.core.stop(id, kept.len(), now);
    server.settle();
    let next = [kept.clone(), tokens(3, 2)].concat();
    let (_, usage) = server.converse(&next, kept.len(), 2);
    assert_eq!((usage.device, usage.recomputed, usage.new), (kept.len(), 0, 2));
}

#[test]
fn two_steps_in_flight_give_the_same_tokens() {
    let mut server = Harness::new(CoreConfig { steps_in_flight: 2, ..config() }, 24, vec![tier("dram", 32, false)]);
    let ids: Vec<_> = (1..7).map(|seed| server.submit(&tokens(seed, 5 + seed as usize), 0, 15).unwrap()).collect();
    server.settle();
    for (seed, id) in (1..7).zip(ids) {
        assert_eq!(server.replies[&id], expected_reply(&tokens(seed, 5 + seed as usize), 15));
    }
}

#[test]
fn chunks_of_unstored_turns_never_reach_a_durable_tier() {
    let mut server = Harness::new(config(), 8, vec![tier("rocks", 64, true)]);
    for seed in 1..6 {
        server.submit_with(&tokens(seed, 5 * CHUNK), 0, 2, false).unwrap();
        server.settle();
    }
    assert_eq!(server.core.gauges().tiers[0].num_chunks, 0);
}

#[test]
fn full_tiers_hold_different_chunks() {
    let mut server = Harness::new(config(), 10, vec![tier("dram", 10, false)]);
    for round in 0..6 {
        for seed in 1..4 {
            let log = tokens(seed, 5 * CHUNK);
            server.converse(&log, if round == 0 { 0 } else { log.len() }, 2);
        }
    }
    let (held, mirrored) = server.held_and_mirrored();
    assert!(held >= 14, "20 places hold {held} different chunks, {mirrored} of them twice");
}

#[test]
fn a_shutdown_saves_what_only_memory_holds() {
    let mut server = Harness::new(config(), 16, vec![tier("dram", 16, false), tier("rocks", 64, true)]);
    for seed in 1..6 {
        server.converse(&tokens(seed, 5 * CHUNK), 0, 2);
    }
    server.submit_with(&tokens(9, 2 * CHUNK), 0, 2, false).unwrap();
    server.settle();
    let before = server.core.gauges().tiers[1].num_chunks;
    while server.core.save_chunks() {
        server.turn();
    }
    server.settle();
    let saved = server.core.gauges().tiers[1].num_chunks;
    assert!(saved > before);
    let unstored = 2;
    assert_eq!(saved, server.num_full_chunks() - unstored);
}

#[test]
fn a_tier_that_takes_nothing_holds_nobody_up() {
    let mut server = Harness::new(config(), 8, vec![tier("dram", 64, false)]);
    server.faults.write_every = 1;
    for seed in 1..6 {
        server.converse(&tokens(seed, 5 * CHUNK), 0, 4);
    }
    assert!(server.core.counters().chunks_dropped > 0);
    assert_eq!(server.core.gauges().tiers[0].num_chunks, 0);
}
