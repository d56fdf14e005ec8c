//! The kv store's own thread: flushes, measures the folder, gives back the space of removed chunks, and brings a failed
//! database back.
//!
//! RocksDB drops a blob file when nothing in it is alive any more, which it learns by compacting the (small) keys. Files
//! hold one chunk each in stores of up to 65,536 chunks, so that is usually all. In larger stores a file with some life
//! in it needs its chunks copied elsewhere first: the oldest files, as many as fit into the space set aside for it, so that
//! the folder stays under its cap meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rocksdb::{BottommostLevelCompaction, CompactOptions, DB};

use super::kv::{KvStore, BLOB, INDEX};
use crate::{Result, TierError};

const TICK: Duration = Duration::from_millis(200);
const RECOVER_EVERY: Duration = Duration::from_secs(1);
/// A collection that gained nothing is not repeated sooner.
const COLLECT_EVERY: Duration = Duration::from_secs(5);
/// Garbage among living chunks that is left alone, as a part of the capacity.
const SCATTERED_PART: u64 = 32;
/// Measuring a folder of many files takes a while: at most this part of the time.
const MEASURE_REST: u32 = 20;
/// RocksDB's own files (log, manifest, options) are no garbage.
const OWN_BYTES: u64 = 1 << 20;

pub(super) struct Maintenance {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    is_awake: Mutex<bool>,
    signal: Condvar,
    stops: AtomicBool,
}

impl Maintenance {
    pub(super) fn start(store: &Arc<KvStore>) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let worker = Worker {
            store: Arc::clone(store),
            shared: Arc::clone(&shared),
            last_flush: Instant::now(),
            last_recovery: Instant::now(),
            last_fruitless: None,
            next_measure: Instant::now(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("{}-upkeep", store.database.name()))
            .spawn(move || worker.run())
            .map_err(|e| TierError::io(store.database.name(), "start a thread", e))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Lets the thread look now instead of at its next tick.
    pub(super) fn wake(&self) {
        *self.shared.is_awake.lock() = true;
        self.shared.signal.notify_one();
    }

    /// Lets the thread end after what it is doing.
    pub(super) fn begin_stop(&self) {
        self.shared.stops.store(true, Ordering::Release);
        self.wake();
    }

    /// Ends the thread and waits for it.
    pub(super) fn stop(&self) {
        self.begin_stop();
        if let Some(thread) = self.thread.lock().take() {
            if thread.join().is_err() {
                tracing::error!("the maintenance thread of the kv store panicked");
            }
        }
    }
}

struct Worker {
    store: Arc<KvStore>,
    shared: Arc<Shared>,
    last_flush: Instant,
    last_recovery: Instant,
    last_fruitless: Option<Instant>,
    next_measure: Instant,
}

impl Worker {
    fn run(mut self) {
        while !self.shared.stops.load(Ordering::Acquire) {
            let mut is_awake = self.shared.is_awake.lock();
            if !*is_awake {
                self.shared.signal.wait_for(&mut is_awake, TICK);
            }
            *is_awake = false;
            drop(is_awake);
            if !self.store.database.health().is_ok() {
                self.recover();
                continue;
            }
            let Ok(engine) = self.store.database.get_writable() else {
                continue;
            };
            // A failure has set the health; the next round recovers.
            let cared = self.care_for(&engine);
            if let Some(error) = cared.err().filter(|_| !self.stops()) {
                tracing::warn!(tier = %self.store.database.name(), %error, "upkeep failed");
            }
        }
    }

    fn recover(&mut self) {
        if self.last_recovery.elapsed() < RECOVER_EVERY {
            return;
        }
        self.last_recovery = Instant::now();
        let store = &self.store;
        store.database.try_recover(|engine| store.take_stock(engine));
        store.database.measure(0);
    }

    fn care_for(&mut self, engine: &DB) -> Result<()> {
        self.store.database.check_background(engine)?;
        if self.last_flush.elapsed() >= self.store.config.flush_interval {
            self.last_flush = Instant::now();
            self.store.flush(engine)?;
        }
        if Instant::now() >= self.next_measure {
            self.measure(engine);
        }
        if self.should_collect() {
            self.collect_garbage(engine)?;
        }
        Ok(())
    }

    fn measure(&mut self, engine: &DB) {
        let started = Instant::now();
        let buffered_bytes = property(&self.store, engine, "rocksdb.cur-size-all-mem-tables");
        self.store.database.measure(buffered_bytes);
        self.next_measure = Instant::now() + MEASURE_REST * started.elapsed();
    }

    fn should_collect(&self) -> bool {
        let rests = self.last_fruitless.is_some_and(|at| at.elapsed() < COLLECT_EVERY);
        if rests {
            return false;
        }
        let capacity_bytes = self.store.config.capacity_bytes;
        let garbage_bytes = self.store.garbage_bytes();
        let is_asked = self.store.wants_space.swap(false, Ordering::AcqRel);
        let threshold = if is_asked { capacity_bytes / 64 } else { capacity_bytes / 16 };
        garbage_bytes > threshold.max(OWN_BYTES)
    }

    fn collect_garbage(&mut self, engine: &DB) -> Result<()> {
        let store = Arc::clone(&self.store);
        let before = store.garbage_bytes();
        // Removals count only once they are in a file.
        store.flush(engine)?;
        compact(&store, engine, 0.0);
        self.measure(engine);
        while self.scattered_bytes(engine) > store.config.capacity_bytes / SCATTERED_PART && !self.stops() {
            self.relocate(engine);
        }
        let gained = before.saturating_sub(store.garbage_bytes());
        self.last_fruitless = (gained < before / 8).then(Instant::now);
        tracing::debug!(tier = %store.database.name(), before, gained, "garbage collected");
        Ok(())
    }

    /// Copies living chunks out of the oldest files; a few rounds of it go through all files.
    fn relocate(&mut self, engine: &DB) {
        let store = Arc::clone(&self.store);
        let capacity_bytes = store.config.capacity_bytes;
        let physical_bytes = store.database.physical_bytes().max(1);
        let room = capacity_bytes.saturating_sub(physical_bytes).min(capacity_bytes / 8);
        store.collecting_bytes.store(room, Ordering::Release);
        // However little room there is, one file more than none must move.
        let num_files = property(&store, engine, "rocksdb.num-blob-files").max(1);
        let age_cutoff = (room as f64 / physical_bytes as f64).max(1.01 / num_files as f64);
        compact(&store, engine, age_cutoff);
        self.measure(engine);
        store.collecting_bytes.store(0, Ordering::Release);
    }

    /// Removed chunks in files that also hold living ones.
    fn scattered_bytes(&self, engine: &DB) -> u64 {
        property(&self.store, engine, "rocksdb.live-blob-file-garbage-size")
    }

    fn stops(&self) -> bool {
        self.shared.stops.load(Ordering::Acquire) || !self.store.database.health().is_ok()
    }
}

fn property(store: &KvStore, engine: &DB, name: &str) -> u64 {
    let value = engine.property_int_value_cf(store.family(engine, BLOB), name);
    value.ok().flatten().unwrap_or(0)
}

/// Compacts the keys, and copies living chunks out of the oldest `age_cutoff` of blob files.
fn compact(store: &KvStore, engine: &DB, age_cutoff: f64) {
    let blob = store.family(engine, BLOB);
    let set_cutoff = |cutoff: f64| {
        let value = format!("{:.4}", cutoff.clamp(0.0, 1.0));
        engine.set_options_cf(blob, &[("blob_garbage_collection_age_cutoff", &value)])
    };
    if let Err(error) = set_cutoff(age_cutoff) {
        tracing::warn!(tier = %store.database.name(), %error, "cannot set what to collect");
    }
    let mut options = CompactOptions::default();
    options.set_exclusive_manual_compaction(true);
    options.set_bottommost_level_compaction(BottommostLevelCompaction::Force);
    for family in [store.family(engine, INDEX), blob] {
        engine.compact_range_cf_opt(family, None::<&[u8]>, None::<&[u8]>, &options);
    }
    if let Err(error) = set_cutoff(0.0) {
        tracing::warn!(tier = %store.database.name(), %error, "cannot end collecting");
    }
}
