//! One RocksDB database that can fail, be closed and come back while its users go on.
//!
//! After a failed write the database is read-only. Once a probe file of useful size can be written and synced again, it
//! is closed and opened anew, because RocksDB itself may stay latched on its old error. Users take the engine for one
//! call at a time; reopening waits for them.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamilyDescriptor, DBCompressionType, ErrorKind, FlushOptions, LogLevel, Options,
    WriteBatch, WriteOptions, DB,
};

use crate::{Health, Result, TierError, Usage};

/// Fraction of the cap from which on chunks should be evicted.
const EVICT_FROM: f64 = 0.80;
/// Fraction of the cap at which nothing more is taken. The rest is for what RocksDB writes on its own account.
const FULL_AT: f64 = 0.95;
/// How long a write or a flush may be held up by RocksDB before that counts as a failure.
const STALL_LIMIT: Duration = Duration::from_secs(30);
/// How long reopening waits for running calls.
const DRAIN: Duration = Duration::from_secs(10);

pub(super) struct DatabaseConfig {
    pub(super) name: Arc<str>,
    pub(super) path: PathBuf,
    pub(super) capacity_bytes: u64,
    pub(super) options: Options,
    pub(super) families: Box<dyn Fn() -> Vec<ColumnFamilyDescriptor> + Send + Sync>,
    pub(super) families_to_compact: &'static [&'static str],
    /// What must fit on the disk before the database is worth reopening.
    pub(super) probe_bytes: u64,
    /// Whether damaged files may be thrown away and begun anew.
    pub(super) is_recomputable: bool,
}

pub(super) struct Database {
    config: DatabaseConfig,
    engine: RwLock<Option<Arc<DB>>>,
    health: Mutex<Health>,
    is_closed: std::sync::atomic::AtomicBool,
    /// The folder's size when it was last measured, and what was written since.
    measured_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Database {
    /// On a full disk a recomputable database begins as down and comes up by itself, any other one begins read-only.
    pub(super) fn open(config: DatabaseConfig) -> Result<Self> {
        fs::create_dir_all(&config.path).map_err(|e| TierError::io(&config.name, "create its folder", e))?;
        let (engine, health) = match open_engine(&config) {
            Ok(engine) => (Some(engine), Health::Ok),
            Err(error) if is_no_space(&error) && config.is_recomputable => (None, Health::Down(error.to_string())),
            Err(error) if is_no_space(&error) => {
                let read_only =
                    DB::open_cf_descriptors_read_only(&config.options, &config.path, (config.families)(), false);
                let engine = read_only.map_err(|e| storage_error(&config.name, "open", e))?;
                (Some(engine), Health::ReadOnly(error.to_string()))
            }
            Err(error) => return Err(storage_error(&config.name, "open", error)),
        };
        let database = Self {
            engine: RwLock::new(engine.map(Arc::new)),
            health: Mutex::new(health),
            is_closed: false.into(),
            measured_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            config,
        };
        database.measure(0);
        Ok(database)
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.config.name
    }

    /// The engine for one call. Do not keep it: reopening waits for it.
    pub(super) fn get(&self) -> Result<Arc<DB>> {
        let engine = self.engine.read().clone();
        engine.ok_or_else(|| self.unavailable())
    }

    /// As [`Database::get`], refused while writes are known to fail.
    pub(super) fn get_writable(&self) -> Result<Arc<DB>> {
        match self.health() {
            Health::Ok => self.get(),
            _ => Err(self.unavailable()),
        }
    }

    pub(super) fn health(&self) -> Health {
        self.health.lock().clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// A write failed: nothing is written until [`Database::try_recover`] succeeds.
    pub(super) fn set_read_only(&self, reason: &str) {
        let mut health = self.health.lock();
        if health.is_ok() && !self.is_closed() {
            tracing::warn!(database = %self.config.name, reason, "writes fail; read-only until they work again");
            *health = Health::ReadOnly(reason.to_owned());
        }
    }

    /// Writes what `make` makes. RocksDB stalls writers while its buffers are full, and on a full disk for ever; so it is
    /// told not to, and the waiting is done here, where a failed flush ends it.
    pub(super) fn write(&self, engine: &DB, log: bool, make: &dyn Fn() -> WriteBatch) -> Result<()> {
        let mut options = WriteOptions::default();
        options.disable_wal(!log);
        options.set_no_slowdown(true);
        let deadline = Instant::now() + STALL_LIMIT;
        loop {
            let batch = make();
            let num_bytes = batch.size_in_bytes() as u64;
            let error = match engine.write_opt(batch, &options) {
                Ok(()) => {
                    self.add_written(num_bytes);
                    return Ok(());
                }
                Err(error) => error,
            };
            if error.kind() != ErrorKind::Incomplete {
                self.set_read_only(error.as_ref());
                return Err(storage_error(&self.config.name, "write", error));
            }
            self.check_background(engine)?;
            if Instant::now() >= deadline {
                self.set_read_only("flushing does not keep up");
                return Err(self.unavailable());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Starts a flush of column families and waits for it, as long as it can succeed.
    pub(super) fn flush(&self, engine: &DB, families: &[&str]) -> Result<()> {
        let family = |name: &&str| engine.cf_handle(name).expect("opened with all its column families");
        let handles: Vec<_> = families.iter().map(family).collect();
        self.check_background(engine)?;
        let mut options = FlushOptions::default();
        options.set_wait(false);
        let deadline = Instant::now() + STALL_LIMIT;
        while let Err(error) = engine.flush_cfs_opt(&handles, &options) {
            // "Writes have been stopped": an earlier flush is on its way and will let this one start.
            if error.kind() != ErrorKind::TryAgain || Instant::now() >= deadline {
                self.set_read_only(error.as_ref());
                return Err(storage_error(&self.config.name, "flush", error));
            }
            self.check_background(engine)?;
            std::thread::sleep(Duration::from_millis(1));
        }
        let waits = |family| {
            let property = engine.property_int_value_cf(family, "rocksdb.num-immutable-mem-table");
            property.ok().flatten().unwrap_or(0) > 0
        };
        while handles.iter().any(|family| waits(*family)) {
            self.check_background(engine)?;
            if Instant::now() >= deadline || self.is_closed() {
                let tier = Arc::clone(&self.config.name);
                return Err(TierError::Busy { tier });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// An error if a flush or compaction has failed since the database was opened.
    pub(super) fn check_background(&self, engine: &DB) -> Result<()> {
        let errors = engine.property_int_value("rocksdb.background-errors");
        if errors.ok().flatten().unwrap_or(0) == 0 {
            return Ok(());
        }
        // RocksDB does not say what it was; the disk will.
        let reason = match self.probe() {
            Err(error) => error.to_string(),
            Ok(()) => "a flush or compaction failed".to_owned(),
        };
        self.set_read_only(&reason);
        Err(self.unavailable())
    }

    /// Everything in the folder, counted as it lies there.
    pub(super) fn physical_bytes(&self) -> u64 {
        self.measured_bytes.load(Ordering::Acquire) + self.written_bytes.load(Ordering::Acquire)
    }

    pub(super) fn add_written(&self, bytes: u64) -> u64 {
        self.written_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes
    }

    /// Measures the folder. `buffered_bytes` are accepted but not in any file yet.
    pub(super) fn measure(&self, buffered_bytes: u64) {
        // First the counter, then the folder: what is written meanwhile counts twice rather than never.
        self.written_bytes.store(0, Ordering::Release);
        let on_disk = folder_bytes(&self.config.path);
        self.measured_bytes.store(on_disk + buffered_bytes, Ordering::Release);
    }

    pub(super) fn usage(&self) -> Usage {
        let physical_bytes = self.physical_bytes();
        let capacity_bytes = self.config.capacity_bytes;
        Usage {
            capacity_bytes,
            used_bytes: physical_bytes,
            reserved_bytes: 0,
            physical_bytes,
            num_chunks: 0,
            evict_from_bytes: (capacity_bytes as f64 * EVICT_FROM) as u64,
            full_at_bytes: (capacity_bytes as f64 * FULL_AT) as u64,
        }
    }

    /// Presses the space of removed records out of the files. Takes as long as it takes.
    pub(super) fn compact(&self) {
        let Ok(engine) = self.get_writable() else {
            return;
        };
        for family in self.config.families_to_compact {
            if let Some(family) = engine.cf_handle(family) {
                engine.compact_range_cf(family, None::<&[u8]>, None::<&[u8]>);
            }
        }
    }

    /// If the database failed and its disk takes writes again, opens it anew. `prepare` sees it before anyone else.
    /// Gives whether it works again.
    pub(super) fn try_recover(&self, prepare: impl FnOnce(&DB) -> Result<()>) -> bool {
        if self.health().is_ok() || self.is_closed() || self.probe().is_err() {
            return false;
        }
        match self.reopen(prepare) {
            Ok(()) => {
                tracing::info!(database = %self.config.name, "writes work again");
                true
            }
            Err(error) => {
                tracing::warn!(database = %self.config.name, %error, "cannot reopen yet");
                false
            }
        }
    }

    /// Ends background work, closes. Flushing what has no log is the caller's business, before this.
    pub(super) fn close(&self, deadline: Instant) -> Result<()> {
        self.is_closed.store(true, Ordering::Release);
        let Some(engine) = self.engine.write().take() else {
            return Ok(());
        };
        engine.cancel_all_background_work(false);
        match wait_for_sole_owner(engine, deadline) {
            Ok(engine) => drop(engine),
            // The last call drops it when it ends.
            Err(engine) => drop(engine),
        }
        *self.health.lock() = Health::Down("closed".to_owned());
        Ok(())
    }

    fn reopen(&self, prepare: impl FnOnce(&DB) -> Result<()>) -> Result<()> {
        let taken = self.engine.write().take();
        if let Some(engine) = taken {
            match wait_for_sole_owner(engine, Instant::now() + DRAIN) {
                Ok(engine) => drop(engine),
                Err(engine) => {
                    *self.engine.write() = Some(engine);
                    let tier = Arc::clone(&self.config.name);
                    return Err(TierError::Busy { tier });
                }
            }
        }
        let opened = open_engine(&self.config).map_err(|e| storage_error(&self.config.name, "reopen", e));
        let prepared = opened.and_then(|engine| prepare(&engine).map(|()| engine));
        let mut slot = self.engine.write();
        if self.is_closed() {
            let tier = Arc::clone(&self.config.name);
            return Err(TierError::Closed { tier });
        }
        match prepared {
            Ok(engine) => {
                *slot = Some(Arc::new(engine));
                *self.health.lock() = Health::Ok;
                Ok(())
            }
            Err(error) => {
                *self.health.lock() = Health::Down(error.to_string());
                Err(error)
            }
        }
    }

    /// Tries whether the disk takes a file of useful size.
    fn probe(&self) -> std::io::Result<()> {
        let path = self.config.path.join("probe.tmp");
        let write = || {
            let mut file = fs::File::create(&path)?;
            let block = vec![0xa5; 64 << 10];
            for _ in 0..self.config.probe_bytes.div_ceil(block.len() as u64) {
                file.write_all(&block)?;
            }
            file.sync_all()
        };
        let written = write();
        let removed = fs::remove_file(&path);
        written.and(removed)
    }

    fn unavailable(&self) -> TierError {
        let tier = Arc::clone(&self.config.name);
        if self.is_closed() {
            return TierError::Closed { tier };
        }
        let reason = match self.health() {
            Health::Ok => "it is being reopened".to_owned(),
            Health::ReadOnly(reason) | Health::Down(reason) => reason,
        };
        TierError::ReadOnly { tier, reason }
    }
}

/// Options that both databases share.
pub(super) fn base_options() -> Options {
    // Closing a database whose flushes fail must not wait for one more. There is no setter for it.
    let base = Options::default().get_options_from_string("avoid_flush_during_shutdown=true");
    let mut options = base.expect("RocksDB knows its own option");
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_compression_type(DBCompressionType::None);
    // RocksDB's own files count against the cap too: keep them small.
    options.set_log_level(LogLevel::Warn);
    options.set_keep_log_file_num(2);
    options.set_max_log_file_size(256 << 10);
    options.set_max_manifest_file_size(1 << 20);
    options.set_manifest_preallocation_size(64 << 10);
    options.set_max_open_files(512);
    options.set_max_background_jobs(2);
    options
}

/// Tables with a cache of their own: RocksDB's default is 32 MiB a column family.
pub(super) fn table_options(cache_bytes: usize) -> BlockBasedOptions {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(&Cache::new_lru_cache(cache_bytes));
    table.set_bloom_filter(10.0, false);
    table
}

pub(super) fn storage_error(name: &Arc<str>, action: &'static str, error: rocksdb::Error) -> TierError {
    TierError::Storage { tier: Arc::clone(name), action, source: Box::new(error) }
}

fn open_engine(config: &DatabaseConfig) -> Result<DB, rocksdb::Error> {
    let open = || DB::open_cf_descriptors(&config.options, &config.path, (config.families)());
    let error = match open() {
        Ok(engine) => return Ok(engine),
        Err(error) => error,
    };
    let is_damaged = matches!(error.kind(), ErrorKind::Corruption | ErrorKind::InvalidArgument)
        || error.as_ref().contains("No such file");
    if !config.is_recomputable || !is_damaged {
        return Err(error);
    }
    tracing::error!(database = %config.name, %error, "damaged; begun anew, its chunks will be recomputed");
    if fs::remove_dir_all(&config.path).is_err() {
        return Err(error);
    }
    open()
}

fn is_no_space(error: &rocksdb::Error) -> bool {
    let message = error.as_ref();
    message.contains("No space left") || message.contains("Disk quota exceeded")
}

fn wait_for_sole_owner(mut engine: Arc<DB>, deadline: Instant) -> Result<DB, Arc<DB>> {
    loop {
        match Arc::try_unwrap(engine) {
            Ok(engine) => return Ok(engine),
            Err(shared) if Instant::now() >= deadline => return Err(shared),
            Err(shared) => engine = shared,
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Disk space of all files under a folder. Files that vanish meanwhile are gone.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => folder_bytes(&entry.path()),
        Ok(metadata) => metadata.blocks() * 512,
        Err(_) => 0,
    });
    sizes.sum()
}
