//! Sizes and options of the kv store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use keepsake_config::{RocksOptions, TierConfig};
use keepsake_kernels::KvLayout;
use rocksdb::{ColumnFamilyDescriptor, Options};

use crate::codec::CHUNK_HEADER_BYTES;
use crate::registry::{under, TierContext};
use crate::rocks::database::{base_options, table_options, DatabaseConfig};
use crate::Result;

pub(crate) const INDEX: &str = "index";
pub(crate) const BLOB: &str = "blob";
/// What a chunk costs on disk beside its bytes: entries in both column families, headers of record and file.
const ENTRY_BYTES: u64 = 256;
/// Files are allocated in blocks.
const BLOCK_BYTES: u64 = 4096;
/// A blob file is dropped once nothing in it is alive, so at best it holds one chunk. Not too many files, though, and not
/// smaller ones than are worth their block.
const MAX_BLOB_FILES: u64 = 65_536;
const MIN_BLOB_FILE_BYTES: u64 = 64 << 10;
/// Holds the index's hottest blocks; blobs are not cached.
const BLOCK_CACHE_BYTES: usize = 8 << 20;

/// Where, how large and for which chunks.
#[derive(Clone, Debug)]
pub struct KvStoreConfig {
    pub name: String,
    /// The folder `kv`.
    pub path: PathBuf,
    /// Cap on every byte in the folder.
    pub capacity_bytes: u64,
    /// Memory of RocksDB's write buffers; a 64th of the capacity (2 to 128 MiB) when absent.
    pub write_buffer_bytes: Option<u64>,
    /// How long a committed chunk may wait for a flush; a kill loses at most that much.
    pub flush_interval: Duration,
    pub layout: KvLayout,
    pub layout_id: [u8; 16],
}

impl KvStoreConfig {
    pub const FLUSH_INTERVAL: Duration = Duration::from_secs(5);

    pub fn from_tier(config: &TierConfig, context: &TierContext) -> Result<Self> {
        let options = RocksOptions::of(config).map_err(|error| under(&context.toml_path, error))?;
        let kv = Self {
            name: config.name().to_owned(),
            path: config.folder().join("kv"),
            capacity_bytes: config.capacity.as_u64(),
            write_buffer_bytes: options.write_buffer.map(|size| size.as_u64()),
            flush_interval: Self::FLUSH_INTERVAL,
            layout: context.layout,
            layout_id: context.layout_id,
        };
        let least = 4 * kv.stored_bytes();
        if kv.capacity_bytes < least {
            let reason = format!("less than four chunks ({least} bytes)");
            return Err(context.refuse("capacity", config.capacity.to_string(), reason));
        }
        Ok(kv)
    }

    fn write_buffers(&self) -> u64 {
        let scaled = (self.capacity_bytes / 64).clamp(2 << 20, 128 << 20);
        self.write_buffer_bytes.unwrap_or(scaled)
    }

    /// All memory that RocksDB may take, for the sum of configured memory.
    pub fn memory_bytes(&self) -> u64 {
        self.write_buffers() + BLOCK_CACHE_BYTES as u64
    }

    /// One chunk on disk.
    pub(super) fn stored_bytes(&self) -> u64 {
        let bytes = self.layout.chunk_bytes() as u64 + CHUNK_HEADER_BYTES as u64 + ENTRY_BYTES;
        bytes.next_multiple_of(BLOCK_BYTES)
    }
}

pub(super) fn database_config(config: &KvStoreConfig) -> DatabaseConfig {
    let write_buffers = config.write_buffers();
    let blob_file_bytes = (config.capacity_bytes / MAX_BLOB_FILES).max(MIN_BLOB_FILE_BYTES);
    let mut options = base_options();
    options.set_atomic_flush(true);
    options.set_db_write_buffer_size(write_buffers as usize);
    let families = move || {
        let table = table_options(BLOCK_CACHE_BYTES);
        let mut index = Options::default();
        index.set_block_based_table_factory(&table);
        index.set_write_buffer_size((write_buffers / 2) as usize);
        let mut blob = Options::default();
        blob.set_block_based_table_factory(&table);
        blob.set_write_buffer_size((write_buffers / 2) as usize);
        blob.set_max_write_buffer_number(2);
        blob.set_enable_blob_files(true);
        blob.set_min_blob_size(0);
        blob.set_blob_file_size(blob_file_bytes);
        blob.set_enable_blob_gc(true);
        // Only the maintenance thread relocates, within the space that it has set aside.
        blob.set_blob_gc_age_cutoff(0.0);
        vec![ColumnFamilyDescriptor::new(INDEX, index), ColumnFamilyDescriptor::new(BLOB, blob)]
    };
    DatabaseConfig {
        name: Arc::from(config.name.as_str()),
        path: config.path.clone(),
        capacity_bytes: config.capacity_bytes,
        options,
        families: Box::new(families),
        families_to_compact: &[INDEX, BLOB],
        probe_bytes: 2 * write_buffers + (1 << 20),
        is_recomputable: true,
    }
}
