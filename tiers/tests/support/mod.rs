//! Fixtures that several test programs share.
#![allow(dead_code, reason = "each test program uses a part")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keepsake_kernels::{Device, DeviceKind, KvLayout, KvPool};
use keepsake_tiers::conformance::{layout, Fixture, LAYOUT_ID};
use keepsake_tiers::rocks::KvStoreConfig;
use keepsake_tiers::{BlockPool, DeviceTier, DramTier, MemoryTier, RocksTier, Tier};

/// 64 KiB a chunk: large beside what a disk tier adds.
pub fn large_layout() -> KvLayout {
    KvLayout { num_layers: 4, num_kv_heads: 4, head_dim: 32, chunk_tokens: 32 }
}

pub fn memory() -> Fixture {
    let chunk_bytes = layout().chunk_bytes();
    in_memory(Arc::new(MemoryTier::new("memory", 24 * chunk_bytes as u64, chunk_bytes)))
}

pub fn dram() -> Fixture {
    let capacity_bytes = 24 * layout().chunk_bytes() as u64 + 17;
    in_memory(Arc::new(DramTier::new("dram", capacity_bytes, layout()).unwrap()))
}

pub fn device() -> Fixture {
    let (tier, _) = device_tier(layout(), 24);
    in_memory(Arc::new(tier))
}

pub fn device_tier(layout: KvLayout, num_blocks: usize) -> (DeviceTier, Arc<BlockPool>) {
    let device = Device::open(DeviceKind::Cpu, 1).unwrap();
    let pool = Arc::new(KvPool::new(&device, layout, num_blocks).unwrap());
    let blocks = Arc::new(BlockPool::new(num_blocks));
    let tier = DeviceTier::new("device", pool, Arc::clone(&blocks)).unwrap();
    (tier, blocks)
}

pub fn rocks() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let reopen = move || Arc::new(open_rocks(&path, 16 << 20)) as Arc<dyn Tier>;
    Fixture {
        tier: reopen(),
        chunk_bytes: large_layout().chunk_bytes(),
        reopen: Some(Box::new(reopen)),
        keep: Box::new(folder),
    }
}

pub fn kv_config(folder: &Path, capacity_bytes: u64) -> KvStoreConfig {
    KvStoreConfig {
        name: "rocks".to_owned(),
        path: folder.join("kv"),
        capacity_bytes,
        write_buffer_bytes: None,
        flush_interval: Duration::from_millis(100),
        layout: large_layout(),
        layout_id: LAYOUT_ID,
    }
}

pub fn open_rocks(folder: &Path, capacity_bytes: u64) -> RocksTier {
    RocksTier::open(kv_config(folder, capacity_bytes)).unwrap()
}

/// The same fixture seen through a decorator.
pub fn wrapped<T: Tier>(inner: Fixture, wrap: fn(Arc<dyn Tier>) -> T) -> Fixture {
    let Fixture { tier, chunk_bytes, reopen, keep } = inner;
    let rewrap = |reopen: Box<dyn Fn() -> Arc<dyn Tier>>| {
        Box::new(move || Arc::new(wrap(reopen())) as Arc<dyn Tier>) as Box<dyn Fn() -> Arc<dyn Tier>>
    };
    Fixture { tier: Arc::new(wrap(tier)), chunk_bytes, reopen: reopen.map(rewrap), keep }
}

fn in_memory(tier: Arc<dyn Tier>) -> Fixture {
    Fixture { tier, chunk_bytes: layout().chunk_bytes(), reopen: None, keep: Box::new(()) }
}
