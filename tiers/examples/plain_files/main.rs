//! Registers the plain-files backend, stores a chunk through it and finds it again after reopening.
//! Run with `cargo run --release --example plain_files`.

mod tier;

use std::time::{Duration, Instant};

use keepsake_config::{ByteSize, TierConfig};
use keepsake_kernels::KvLayout;
use keepsake_tiers::{ChunkMeta, KeyChain, Registry, Result, TierContext};

fn main() -> Result<()> {
    let mut registry = Registry::default();
    registry.register("plain_files", tier::construct);

    let layout = KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 8, chunk_tokens: 32 };
    let context = TierContext { toml_path: "tiers[2]".to_owned(), layout, layout_id: [7; 16], device: None };
    let folder = std::env::temp_dir().join(format!("keepsake-plain-files-{}", std::process::id()));
    let mut config = TierConfig::new("plain_files", ByteSize::mib(16));
    config.path = Some(folder.clone());

    let tokens: Vec<u32> = (0..32).collect();
    let key = KeyChain::root(&[0; 32], &[0; 32]).child(&tokens);
    let meta = ChunkMeta {
        position: 0,
        num_tokens: 32,
        layout_id: context.layout_id,
        bytes: layout.chunk_bytes() as u64,
        last_activity_unix: 0,
    };
    let tier = registry.open(&config, &context)?;
    let mut place = tier.reserve(&key, &meta)?.expect("an empty tier has room");
    place.write(0, &vec![42; layout.chunk_bytes()])?;
    tier.commit(place)?;
    tier.close(Instant::now() + Duration::from_secs(1))?;
    drop(tier);

    let tier = registry.open(&config, &context)?;
    for (key, meta) in tier.recover()? {
        println!("found chunk {key}: {} tokens, {} bytes", meta.num_tokens, meta.bytes);
    }
    println!("{:?}", tier.usage());
    drop(tier);
    // The folder was this example's own.
    if let Err(error) = std::fs::remove_dir_all(&folder) {
        eprintln!("{} stays: {error}", folder.display());
    }
    Ok(())
}
