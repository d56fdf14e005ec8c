//! What the end-to-end tests share: a `keepsake serve` in a child process, and typed clients for what it speaks.
//!
//! Tests drive the release binary over real HTTP, as an operator would start it: a configuration file, a data folder of its own, signals.
//! Nothing here knows the server's insides. [`Settings`] writes the configuration, [`Server`] is a running process and
//! [`Stopped`] its data between two runs, [`Client`] speaks the API, [`Metrics`] reads `/metrics`, [`raw`] is for
//! requests that no well-behaved client sends.
//!
//! Deliberately absent: retries (they would hide a server that fails now and then) and absolute speeds.

mod client;
pub mod hardship;
mod log;
mod metrics;
mod process;
pub mod raw;
mod settings;
mod sse;
mod turns;
pub mod words;

pub use client::{Answer, Client};
pub use log::Log;
pub use metrics::Metrics;
pub use process::{run_to_end, Server, Stopped};
pub use settings::{ModelKind, Settings, CHUNK_TOKENS};
pub use sse::{Event, Events};
pub use turns::{Ask, Chat, Complete, Reply, ReplyStream, Usage};

use std::time::{Duration, Instant};

/// Asks every few milliseconds until `holds`; panics with `what` after `limit`. The machine may be busy: limits are
/// there so that a hang becomes a failure, never to judge speed.
pub fn wait_until(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "waited {limit:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
