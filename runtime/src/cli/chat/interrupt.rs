//! Ctrl-C while a reply streams. At the prompt the terminal is in raw mode, and Ctrl-C is a key like any other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use anyhow::Context;
use tokio::signal::unix::{signal, SignalKind};

pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From here on SIGINT sets this flag instead of ending the process.
    pub(super) fn watch() -> anyhow::Result<Self> {
        let is_set = Arc::new(AtomicBool::new(false));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        let runtime = runtime.context("cannot watch for Ctrl-C")?;
        let entered = runtime.enter();
        let mut signals = signal(SignalKind::interrupt()).context("cannot watch for Ctrl-C")?;
        drop(entered);
        let flag = Arc::clone(&is_set);
        let watch = move || {
            runtime.block_on(async move {
                while signals.recv().await.is_some() {
                    flag.store(true, Ordering::Relaxed);
                }
            });
        };
        let thread = std::thread::Builder::new().name("chat-interrupt".to_owned());
        thread.spawn(watch).context("cannot watch for Ctrl-C")?;
        Ok(Self(is_set))
    }

    pub(super) fn never() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    pub(super) fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
