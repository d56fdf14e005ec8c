//! Eviction policies at 1,000,000 chunks: nanoseconds a touch, and a victim taken out and put back. None may grow with the number of
//! chunks: the second table has a tenth of them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use keepsake_tiers::eviction::{policy, ChunkUse, Class, CostCurve, ReturnTimes, View, POLICIES};
use keepsake_tiers::ChunkKey;

const ROUNDS: u32 = 20_000;
const CHUNKS_A_CONVERSATION: u64 = 64;

fn key(index: u64) -> ChunkKey {
    let mut key = [0; 16];
    // Spread like a hash, which keys are.
    key[..8].copy_from_slice(&index.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    key[8..].copy_from_slice(&index.to_le_bytes());
    ChunkKey(key)
}

fn chunk(index: u64) -> ChunkUse {
    let conversation = index / CHUNKS_A_CONVERSATION;
    ChunkUse {
        context_tokens: (index % CHUNKS_A_CONVERSATION + 1) as u32 * 32,
        last_activity: Duration::from_millis(conversation),
        class: Class::of(conversation % 3, (conversation % 11) as u32),
    }
}

fn main() {
    let costs = CostCurve::new(vec![(32, 1e-3), (8192, 4e-3)]).expect("ascending and positive");
    let returns = ReturnTimes::default();
    println!("{:>20} {:>10} {:>12} {:>14}", "policy", "chunks", "touch ns", "victim ns");
    for num_chunks in [1_000_000, 100_000] {
        for name in POLICIES {
            let mut policy = policy(name, None).expect("a known name");
            for index in 0..num_chunks {
                policy.on_touch(key(index), chunk(index));
            }
            let now = Duration::from_millis(num_chunks);
            let view = View { now, costs: &costs, returns: &returns };
            let begin = Instant::now();
            for round in 0..u64::from(ROUNDS) {
                let index = round * 7919 % num_chunks;
                policy.on_touch(key(index), ChunkUse { last_activity: now, ..chunk(index) });
            }
            let touch = begin.elapsed() / ROUNDS;
            let begin = Instant::now();
            for _ in 0..ROUNDS {
                let victim = policy.victims(1, &view)[0];
                policy.on_remove(black_box(&victim.key));
            }
            let victim = begin.elapsed() / ROUNDS;
            println!("{name:>20} {num_chunks:>10} {:>12} {:>14}", touch.as_nanos(), victim.as_nanos());
        }
    }
}
