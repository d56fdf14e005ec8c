//! Copies between the device and each tier, through tiers and movers like the server's own.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context};
use keepsake_config::{ByteSize, RocksOptions, TierConfig};
use keepsake_kernels::{BlockId, KvPool};
use keepsake_tiers::{
    BlockPool, ChunkKey, ChunkMeta, DeviceTier, Move, Mover, MoverConfig, MoverPool, Registry, Tier, TierContext,
};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::disks::{self, DiskSpeed};
use super::samples::median;
use super::Subject;
use crate::core::RouteCost;

/// Chunks of the larger batch.
const BATCH: usize = 16;
const REPETITIONS: usize = 3;
/// Chunks that one tier is given in all: single ones and batches, each with keys of its own.
const CHUNKS: usize = (REPETITIONS + 1) * (BATCH + 1);
/// Nothing here takes longer on a machine that could serve.
const MOVE_LIMIT: Duration = Duration::from_secs(60);
/// A route never costs nothing: one that was too quick to measure.
const LEAST: f64 = 1e-9;

/// One direction of copies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteSpeed {
    pub from: String,
    pub to: String,
    pub latency_seconds: f64,
    /// Of one chunk more in a batch.
    pub chunk_seconds: f64,
    pub bytes_per_second: f64,
}

pub(super) struct TierRoutes {
    pub(super) load: RouteCost,
    pub(super) store: RouteCost,
}

pub(super) struct CopyCosts {
    pub(super) tiers: Vec<TierRoutes>,
    pub(super) routes: Vec<RouteSpeed>,
    pub(super) disks: Vec<DiskSpeed>,
}

/// Does this tier keep files in a folder?
pub(super) fn has_folder(tier: &TierConfig) -> bool {
    tier.kind == RocksOptions::KIND || tier.path.is_some()
}

pub(super) fn measure(subject: &Subject) -> anyhow::Result<CopyCosts> {
    let layout = subject.layout;
    let pool = Arc::new(KvPool::new(&subject.device, layout, BATCH)?);
    let blocks = Arc::new(BlockPool::new(BATCH));
    let payload: Vec<u8> =
        (0..layout.chunk_bytes()).map(|i| (i as u32).wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
    for block in 0..BATCH {
        pool.write_chunk(BlockId(block as u32), &payload)?;
    }
    let device = DeviceTier::new(subject.tiers[0].name(), Arc::clone(&pool), Arc::clone(&blocks))?;
    let mover = MoverPool::new(layout, MoverConfig::default())?;
    let mut costs = CopyCosts { tiers: Vec::new(), routes: Vec::new(), disks: Vec::new() };
    for config in &subject.tiers[1..] {
        let scratch = Scratch::new(config, layout.chunk_bytes())?;
        let context = TierContext {
            toml_path: format!("tier {}", config.name()),
            layout,
            layout_id: subject.layout_id,
            device: Some((Arc::clone(&pool), Arc::clone(&blocks))),
        };
        let tier = Registry::default().open_quietly(&scratch.config, &context)?;
        let bench = Bench { device: &device, tier: tier.as_ref(), mover: &mover, subject, folder: scratch.folder() };
        let measured = bench.run().with_context(|| format!("tier {}", config.name()));
        tier.close(Instant::now() + MOVE_LIMIT)?;
        let routes = measured?;
        let speed = |from: &str, to: &str, cost: RouteCost| RouteSpeed {
            from: from.to_owned(),
            to: to.to_owned(),
            latency_seconds: cost.latency,
            chunk_seconds: cost.chunk,
            bytes_per_second: layout.chunk_bytes() as f64 / cost.chunk,
        };
        costs.routes.push(speed(config.name(), device.name(), routes.load));
        costs.routes.push(speed(device.name(), config.name(), routes.store));
        costs.tiers.push(routes);
        if let Some(folder) = scratch.folder() {
            costs.disks.push(disks::measure(config.name(), &folder).context("cannot measure the disk")?);
        }
    }
    Ok(costs)
}

/// A tier like the configured one, but small, and with its files in a folder of its own on the same file system.
struct Scratch {
    config: TierConfig,
    folder: Option<TempDir>,
}

impl Scratch {
    fn new(config: &TierConfig, chunk_bytes: usize) -> anyhow::Result<Self> {
        // As much again for what files cost beside chunks, and for what removals give back late.
        let enough = ByteSize(2 * CHUNKS as u64 * chunk_bytes as u64 + (32 << 20));
        let mut config = config.clone();
        let mut folder = None;
        if has_folder(&config) {
            let parent = config.folder();
            let cannot_write = || format!("cannot write to {}", parent.display());
            std::fs::create_dir_all(&parent).with_context(cannot_write)?;
            let made =
                tempfile::Builder::new().prefix("calibration-").tempdir_in(&parent).with_context(cannot_write)?;
            config.path = Some(made.path().join("tier"));
            folder = Some(made);
            // What it needs, also where the configured one is smaller.
            config.capacity = enough;
        } else {
            config.capacity = config.capacity.min(enough);
        }
        Ok(Self { config, folder })
    }

    fn folder(&self) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.path().to_owned())
    }
}

struct Bench<'a> {
    device: &'a DeviceTier,
    tier: &'a dyn Tier,
    mover: &'a MoverPool,
    subject: &'a Subject,
    /// Where a durable tier's files are.
    folder: Option<PathBuf>,
}

impl Bench<'_> {
    fn run(&self) -> anyhow::Result<TierRoutes> {
        let capacity = self.tier.usage().capacity_bytes as usize / self.subject.layout.chunk_bytes();
        let batch = BATCH.min(capacity / 2).max(1);
        let (mut stores, mut loads) = (Times::default(), Times::default());
        // The first round touches memory and starts threads.
        for round in 0..=REPETITIONS {
            let keys: Vec<ChunkKey> = (0..=batch).map(|index| key(round, index)).collect();
            let (single, many) = keys.split_at(1);
            let mut one = self.store(single)?;
            let mut all = self.store(many)?;
            if self.tier.capability().durable {
                // What a tier took into memory still has to reach its disk: a batch is not over before that.
                let begin = Instant::now();
                self.tier.flush()?;
                let flush = begin.elapsed().as_secs_f64() / keys.len() as f64;
                one += flush;
                all += flush * batch as f64;
            }
            if round > 0 {
                stores.push(one, all);
            }
            if let Some(folder) = &self.folder {
                disks::forget_pages(folder);
            }
            let (one, all) = (self.load(single)?, self.load(many)?);
            if round > 0 {
                loads.push(one, all);
            }
            for key in &keys {
                self.tier.remove(key)?;
            }
        }
        Ok(TierRoutes { load: loads.cost(batch), store: stores.cost(batch) })
    }

    fn store(&self, keys: &[ChunkKey]) -> anyhow::Result<f64> {
        self.move_all(keys, |index, key| {
            let Some(to) = self.tier.reserve(&key, &self.meta())? else { bail!("the tier has no room for a chunk") };
            Ok(Move { from: self.device.lend(BlockId(index as u32), key, self.meta()), to })
        })
    }

    fn load(&self, keys: &[ChunkKey]) -> anyhow::Result<f64> {
        self.move_all(keys, |index, key| {
            let Some(from) = self.tier.pin(&key)? else { bail!("the tier lost a chunk") };
            Ok(Move { from, to: self.device.adopt(BlockId(index as u32), key, self.meta()) })
        })
    }

    /// Seconds from asking the tier for the first chunk to the end of the last copy.
    fn move_all(
        &self,
        keys: &[ChunkKey],
        prepare: impl Fn(usize, ChunkKey) -> anyhow::Result<Move>,
    ) -> anyhow::Result<f64> {
        let begin = Instant::now();
        let moves = keys.iter().enumerate().map(|(index, key)| prepare(index, *key)).collect::<anyhow::Result<_>>()?;
        let outcomes = self.mover.submit_all(moves).wait(begin + MOVE_LIMIT);
        let seconds = begin.elapsed().as_secs_f64();
        for outcome in outcomes {
            outcome.result.with_context(|| format!("a copy from {} to {}", outcome.from, outcome.to))?;
        }
        ensure!(seconds > 0.0, "the clock stands still");
        Ok(seconds)
    }

    fn meta(&self) -> ChunkMeta {
        ChunkMeta {
            position: 0,
            num_tokens: self.subject.layout.chunk_tokens as u32,
            layout_id: self.subject.layout_id,
            bytes: self.subject.layout.chunk_bytes() as u64,
            last_activity_unix: 0,
        }
    }
}

#[derive(Default)]
struct Times {
    one: Vec<f64>,
    many: Vec<f64>,
}

impl Times {
    fn push(&mut self, one: f64, many: f64) {
        self.one.push(one);
        self.many.push(many);
    }

    fn cost(self, batch: usize) -> RouteCost {
        let (one, many) = (median(self.one), median(self.many));
        // `one` is latency and a chunk, `many` latency and a batch of chunks.
        let chunk = match batch {
            1 => many,
            batch => ((many - one) / (batch - 1) as f64).max(many / batch as f64 / 2.0),
        };
        RouteCost { latency: (one - chunk).max(LEAST), chunk: chunk.max(LEAST) }
    }
}

fn key(round: usize, index: usize) -> ChunkKey {
    let mut key = *b"calibration\0\0\0\0\0";
    key[14] = round as u8;
    key[15] = index as u8;
    ChunkKey(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_and_chunk_are_told_apart() {
        let mut times = Times::default();
        for _ in 0..3 {
            times.push(3e-3, 1e-3 + 16.0 * 2e-3);
        }
        let cost = times.cost(16);
        assert!((cost.latency - 1e-3).abs() < 1e-9 && (cost.chunk - 2e-3).abs() < 1e-9, "{cost:?}");
        // Slower alone than sixteen together: noise, which must not make a chunk free.
        let mut noisy = Times::default();
        noisy.push(5e-3, 4e-3);
        let cost = noisy.cost(16);
        assert!(cost.chunk > 1e-4 && cost.latency > 0.0, "{cost:?}");
    }
}
