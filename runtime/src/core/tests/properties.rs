//! Random traffic on small pools: every reply right, every invariant after every round, everything given back at the end.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;

use super::harness::{config, expected_reply, tier, Faults, Harness};
use crate::core::*;

#[derive(Clone, Debug)]
enum Op {
    /// Starts or continues a conversation, with so many new tokens and so long a reply.
    Turn {
        conversation: usize,
        new: usize,
        reply: usize,
    },
    /// Stops one of the sequences under way.
    Stop(Index),
    Rounds(usize),
    /// A conversation's log is deleted, all of it or its end, whatever runs; the conversation may go on all the same.
    Forget {
        conversation: usize,
        keep: Index,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0usize..8, 1usize..14, 1usize..14).prop_map(|(conversation, new, reply)| Op::Turn { conversation, new, reply }),
        1 => any::<Index>().prop_map(Op::Stop),
        4 => (1usize..12).prop_map(Op::Rounds),
        1 => (0usize..8, any::<Index>()).prop_map(|(conversation, keep)| Op::Forget { conversation, keep }),
    ]
}

#[derive(Default)]
struct Conversation {
    log: Vec<u32>,
    running: Option<(SequenceId, usize)>,
    stopped: bool,
}

fn take_reply(server: &Harness, conversation: &mut Conversation) {
    let Some((id, len)) = conversation.running else { return };
    if !server.finished.contains_key(&id) {
        return;
    }
    let reply = &server.replies[&id];
    let expected = expected_reply(&conversation.log, len);
    assert_eq!(reply[..], expected[..reply.len()]);
    if !std::mem::take(&mut conversation.stopped) {
        assert_eq!(reply.len(), len);
    }
    conversation.log.extend_from_slice(reply);
    conversation.running = None;
}

fn run(mut server: Harness, ops: &[Op]) -> Harness {
    let mut conversations: Vec<Conversation> = (0..8).map(|_| Conversation::default()).collect();
    for op in ops {
        match op {
            Op::Turn { conversation, new, reply } => {
                let state = &mut conversations[*conversation];
                take_reply(&server, state);
                if state.running.is_some() || state.log.len() + new + reply >= server.core.limit() {
                    continue;
                }
                let num_past = state.log.len();
                // Conversations 0 to 3 begin alike, so they share their first chunks.
                let first = if *conversation < 4 { 5 } else { *conversation as u32 * 100 };
                state.log.extend((0..*new).map(|i| first + (num_past + i) as u32));
                let id = server.submit(&state.log, num_past, *reply).expect("the queue is long enough");
                state.running = Some((id, *reply));
            }
            Op::Stop(index) => {
                let under_way: Vec<_> = (0..8).filter(|c| conversations[*c].running.is_some()).collect();
                if !under_way.is_empty() {
                    let state = &mut conversations[under_way[index.index(under_way.len())]];
                    let (id, _) = state.running.expect("filtered above");
                    let now = server.now;
                    state.stopped = true;
                    server.core.stop(id, usize::MAX, now);
                }
            }
            Op::Rounds(n) => server.turns(*n),
            Op::Forget { conversation, keep } => {
                let log = &conversations[*conversation].log;
                if !log.is_empty() {
                    server.forget(log, keep.index(log.len()));
                }
            }
        }
    }
    server.settle();
    for conversation in &mut conversations {
        take_reply(&server, conversation);
        assert!(conversation.running.is_none());
    }
    let snapshot = server.core.snapshot();
    assert_eq!(snapshot.num_pins, 0);
    assert_eq!(snapshot.private_blocks + snapshot.loading_blocks + snapshot.orphaned_blocks, 0);
    assert_eq!(snapshot.gauges.free_blocks + snapshot.resident_blocks, snapshot.gauges.total_blocks);
    for conversation in &conversations {
        server.forget(&conversation.log, 0);
    }
    server.settle();
    server.assert_empty();
    server
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn replies_do_not_depend_on_room(
        ops in prop::collection::vec(op(), 1..120),
        num_blocks in 12usize..40,
        dram in 1usize..24,
        rocks in 1usize..40,
        steps_in_flight in 1usize..3,
        load_every in prop_oneof![Just(0u64), 1u64..9],
        write_every in prop_oneof![Just(0u64), 2u64..9],
        delay in 0u64..120,
    ) {
        let quick = CoreConfig { steps_in_flight, load_timeout: Duration::from_millis(60), ..config() };
        let tiers = vec![tier("dram", dram, false), tier("rocks", rocks, true)];
        let mut server = Harness::new(quick, num_blocks, tiers);
        server.faults = Faults { load_every, write_every, delay: Duration::from_millis(delay) };
        run(server, &ops);
    }

    #[test]
    fn also_with_the_device_alone(ops in prop::collection::vec(op(), 1..80), num_blocks in 12usize..24) {
        run(Harness::new(config(), num_blocks, vec![]), &ops);
    }
}
