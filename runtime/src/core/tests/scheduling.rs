//! What waits, what is protected, and what is loaded, computed or brought nearer.

use std::time::Duration;

use keepsake_tiers::eviction::CostCurve;

use super::harness::{config, tier, Faults, Harness, CHUNK};
use crate::core::*;

fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 1_000 + i).collect()
}

/// One sequence at a time, so that the queue decides.
fn one_by_one(queue: QueueOrder) -> CoreConfig {
    CoreConfig { max_running: 1, queue, ..config() }
}

fn order_of_ends(server: &mut Harness, ids: &[SequenceId]) -> Vec<usize> {
    let mut order = Vec::new();
    for _ in 0..10_000 {
        server.turn();
        let ended = (0..ids.len()).filter(|i| server.finished.contains_key(&ids[*i]));
        let new: Vec<usize> = ended.filter(|i| !order.contains(i)).collect();
        order.extend(new);
        if order.len() == ids.len() {
            return order;
        }
    }
    panic!("some never ended: {order:?}");
}

/// A conversation's log after one turn, and its second turn's prompt.
fn second_turn(server: &mut Harness, seed: u32, len: usize) -> (Vec<u32>, usize) {
    let log = tokens(seed, len);
    let (reply, _) = server.converse(&log, 0, 2);
    let past = [log, reply].concat();
    let num_past = past.len();
    ([past, tokens(seed + 50, 3)].concat(), num_past)
}

#[test]
fn a_cached_prompt_overtakes_a_new_one_but_not_in_a_first_come_queue() {
    let cache_aware = QueueOrder::CacheAware { age_bound: Duration::from_secs(60) };
    for (queue, expected) in [(cache_aware, [0, 2, 1]), (QueueOrder::Arrival, [0, 1, 2])] {
        let mut server = Harness::new(one_by_one(queue), 64, vec![]);
        let (cached, num_past) = second_turn(&mut server, 1, 40);
        let busy = server.submit(&tokens(2, 20), 0, 8).unwrap();
        server.turn();
        let new = server.submit(&tokens(3, 40), 0, 2).unwrap();
        let again = server.submit(&cached, num_past, 2).unwrap();
        assert_eq!(order_of_ends(&mut server, &[busy, new, again]), expected);
    }
}

#[test]
fn past_its_age_bound_nobody_overtakes() {
    let age_bound = Duration::from_millis(100);
    let mut server = Harness::new(one_by_one(QueueOrder::CacheAware { age_bound }), 64, vec![]);
    let (cached, num_past) = second_turn(&mut server, 1, 40);
    let busy = server.submit(&tokens(2, 20), 0, 30).unwrap();
    server.turn();
    let new = server.submit(&tokens(3, 40), 0, 2).unwrap();
    // The running one keeps the device beyond the bound; the cached prompt comes after that.
    server.turns(15);
    let again = server.submit(&cached, num_past, 2).unwrap();
    assert_eq!(order_of_ends(&mut server, &[busy, new, again]), [0, 1, 2]);
}

#[test]
fn tenants_share_the_device_by_weight() {
    let queue = QueueOrder::CacheAware { age_bound: Duration::from_secs(3600) };
    // A prompt token costs a quarter of a second: a handful of prompts is more than any lead.
    let chunk = CostCurve::flat(1.0).unwrap();
    let costs = Costs { chunk, ..Costs::unmeasured(0) };
    let mut server = Harness::new(CoreConfig { costs, ..one_by_one(queue) }, 200, vec![]);
    // Tenant 1 has cheap prompts without end, tenant 2 dear ones of twice the weight.
    let cheap: Vec<_> = (0..12).map(|i| server.submit_as(1, 1.0, &tokens(i, 8), 1).unwrap()).collect();
    let dear: Vec<_> = (0..6).map(|i| server.submit_as(2, 2.0, &tokens(20 + i, 16), 1).unwrap()).collect();
    let order = order_of_ends(&mut server, &[cheap, dear].concat());
    // By cost alone all twelve cheap ones went first. By weight, of the first six device seconds tenant 2 gets four.
    let early = order[..8].iter().filter(|i| **i >= 12).count();
    assert!(early >= 3, "{order:?}");
    assert!(order[..8].iter().any(|i| *i < 12), "{order:?}");
}

#[test]
fn without_reuse_every_turn_computes_its_whole_log() {
    let mut server = Harness::new(CoreConfig { reuse: false, ..config() }, 64, vec![tier("dram", 64, false)]);
    let (next, num_past) = second_turn(&mut server, 1, 5 * CHUNK);
    let (_, usage) = server.converse(&next, num_past, 2);
    assert_eq!((usage.device, usage.recomputed, usage.new), (0, num_past, next.len() - num_past));
    assert_eq!(server.core.gauges().free_blocks, 64);
}

#[test]
fn what_the_queue_will_use_stays_until_everything_else_has_gone() {
    let arrival = one_by_one(QueueOrder::Arrival);
    let mut server = Harness::new(CoreConfig { reserve: 0.0, ..arrival }, 24, vec![]);
    let (waiting, num_past) = second_turn(&mut server, 1, 8 * CHUNK);
    let _thinking = second_turn(&mut server, 2, 8 * CHUNK);
    // It runs for long and takes block after block while the other waits: the thinking user's chunks go, though used later.
    let busy = server.submit(&tokens(3, 4 * CHUNK), 0, 9 * CHUNK).unwrap();
    server.turn();
    let id = server.submit(&waiting, num_past, 2).unwrap();
    assert_eq!(order_of_ends(&mut server, &[busy, id]), [0, 1]);
    let usage = &server.finished[&id].1;
    assert!(usage.recomputed <= CHUNK, "{usage:?}");
    assert!(server.core.counters().chunks_dropped > 0);
}

/// A server whose DRAM holds a conversation that others pushed off the device, and that conversation's second turn. A chunk costs
/// 10 ms to compute and `load_seconds` to load.
fn with_a_conversation_in_dram(load_seconds: f64) -> (Harness, Vec<u32>, usize) {
    let route = RouteCost { latency: 0.0, chunk: load_seconds };
    let costs = Costs {
        chunk: CostCurve::flat(0.010).unwrap(),
        tiers: vec![TierCosts { load: route, store: route }],
        ..Costs::unmeasured(1)
    };
    let mut server = Harness::new(CoreConfig { costs, ..config() }, 12, vec![tier("dram", 64, false)]);
    let (next, num_past) = second_turn(&mut server, 1, 8 * CHUNK);
    for seed in 2..6 {
        server.converse(&tokens(seed, 8 * CHUNK), 0, 2);
    }
    (server, next, num_past)
}

/// A tier so slow that computing wins, one so fast that loading does, and one between: both at once.
#[test]
fn load_or_recompute_follows_the_measured_costs() {
    let run = |load_seconds: f64| {
        let (mut server, next, num_past) = with_a_conversation_in_dram(load_seconds);
        let (_, usage) = server.converse(&next, num_past, 2);
        let counters = server.core.counters();
        assert_eq!(usage.loaded[0], counters.chunks_load_chosen[0] as usize * CHUNK);
        (counters.chunks_load_chosen[0], counters.chunks_compute_chosen[0])
    };
    let (fast, slow, between) = (run(1e-6), run(10.0), run(0.010));
    assert_eq!((fast.1, slow.0), (0, 0));
    assert_eq!(fast.0, slow.1);
    // As dear to load as to compute: half of them each way, at the same time.
    assert_eq!((between.0, between.1), (fast.0 / 2, fast.0 - fast.0 / 2));
}

#[test]
fn the_front_is_computed_while_the_back_is_loaded() {
    let (mut server, next, num_past) = with_a_conversation_in_dram(0.010);
    server.faults = Faults { delay: Duration::from_millis(200), ..Faults::default() };
    let steps = server.core.counters().num_steps;
    let id = server.submit(&next, num_past, 1).unwrap();
    while server.core.gauges().num_running == 0 {
        server.turn();
    }
    server.turns(3);
    assert!(!server.finished.contains_key(&id) && server.core.gauges().moves_in_flight > 0);
    assert!(server.core.counters().num_steps > steps, "nothing was computed while loads were under way");
    server.settle();
    assert!(server.finished[&id].1.loaded[0] > 0);
}

#[test]
fn a_queued_conversation_comes_up_from_disk_before_its_turn() {
    let quick = one_by_one(QueueOrder::Arrival);
    let mut server = Harness::new(quick, 14, vec![tier("dram", 12, false), tier("rocks", 200, true)]);
    let (next, num_past) = second_turn(&mut server, 1, 8 * CHUNK);
    for seed in 2..9 {
        server.converse(&tokens(seed, 8 * CHUNK), 0, 2);
    }
    let busy = server.submit(&tokens(99, CHUNK), 0, 4 * CHUNK).unwrap();
    server.turn();
    let id = server.submit(&next, num_past, 2).unwrap();
    order_of_ends(&mut server, &[busy, id]);
    let usage = &server.finished[&id].1;
    assert!(server.core.counters().chunks_prefetched > 0);
    assert!(usage.loaded[0] > 0, "{usage:?}");
    server.settle();
}
