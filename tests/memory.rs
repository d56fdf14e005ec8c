//! Memory is bounded by the configuration, not by how much was ever said.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use keepsake_tests::{words, Ask, ModelKind, Server, Settings};

/// Turns before anything is compared: caches, pools and session tables fill up first.
const WARM: usize = 3000;
const COUNTED: usize = 6000;
/// More than a response may leave behind for good.
const BYTES_A_RESPONSE: f64 = 1024.0;

/// Thousands of small conversations, each stored and never spoken of again.
#[test]
fn thousands_of_small_responses_leave_nothing_in_memory() {
    let settings = Settings::tiers(ModelKind::Tiny, 256, 256, 400).set("sessions", "idle_after", "\"1s\"");
    let server = Server::start(settings);
    let done = AtomicUsize::new(0);
    let respond = |until: usize| {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| loop {
                    let index = done.fetch_add(1, Ordering::Relaxed);
                    if index >= until {
                        return;
                    }
                    let input = words::plain(&mut words::seeded(index as u64), 3);
                    Ask::new(&input).max(1).send(&server.client);
                });
            }
        });
        done.store(until, Ordering::Relaxed);
    };
    respond(WARM);
    // Least squares over several looks: one look is as noisy as the allocator.
    let mut looks = Vec::new();
    for step in 1..=10 {
        respond(WARM + step * COUNTED / 10);
        looks.push(((step * COUNTED / 10) as f64, server.resident_bytes() as f64));
    }
    let slope = slope(&looks);
    println!("{slope:.0} bytes a response");
    assert!(slope < BYTES_A_RESPONSE, "{slope:.0} bytes a response: {looks:?}");
    let metrics = server.settle();
    assert_eq!(metrics.count("keepsake_turns_stored_total"), (WARM + COUNTED) as u64);
    server.finish();
}

fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / count;
    let (x, y) = (mean(&mut points.iter().map(|p| p.0)), mean(&mut points.iter().map(|p| p.1)));
    let covariance: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    covariance / points.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>()
}
