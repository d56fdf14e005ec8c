//! A worked example of a backend: chunks as plain files.
//!
//! One file a chunk, in 256 folders by the first byte of the key. A chunk is written to `drafts/`, synced, and renamed into
//! place, so it is there whole or not at all; opening scans the folders and throws drafts away. Names are keys and
//! contents come from [`keepsake_tiers::codec`], so damage is noticed as in every durable tier.
//!
//! To use it in a server: `registry.register("plain_files", plain_files::construct);`, then in the configuration
//! `[[tiers]]` with `kind = "plain_files"`, `capacity`, and optionally `path` and `sync = false`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use keepsake_config::TierConfig;
use keepsake_tiers::codec::{self, CHUNK_HEADER_BYTES};
use keepsake_tiers::{
    Capability, ChunkKey, ChunkMeta, Health, PinReader, Pinned, Place, PlaceWriter, Result, Tier, TierContext,
    TierError, Usage,
};

/// Files are allocated in blocks of this size on common file systems; the cap counts them whole.
const BLOCK_BYTES: u64 = 4096;

/// The backend's own keys.
#[derive(serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Whether a commit waits for the disk. Default `true`.
    sync: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { sync: true }
    }
}

/// For [`keepsake_tiers::Registry::register`].
pub fn construct(config: &TierConfig, context: &TierContext) -> Result<Arc<dyn Tier>> {
    let options: Options = context.options(config)?;
    let tier = PlainFilesTier::open(
        config.name(),
        &config.folder(),
        config.capacity.as_u64(),
        context.layout.chunk_bytes(),
        context.layout_id,
        options.sync,
    )?;
    Ok(Arc::new(tier))
}

/// Chunks in files.
#[derive(Clone)]
pub struct PlainFilesTier {
    shared: Arc<Shared>,
}

struct Shared {
    name: Arc<str>,
    folder: PathBuf,
    capacity_bytes: u64,
    chunk_bytes: usize,
    layout_id: [u8; 16],
    sync: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    chunks: HashMap<ChunkKey, Chunk>,
    num_reserved: u64,
    next_draft: u64,
    closed: bool,
}

struct Chunk {
    meta: ChunkMeta,
    num_pins: u32,
    /// A read found it damaged: it goes with its last pin.
    is_damaged: bool,
}

impl PlainFilesTier {
    pub fn open(
        name: &str,
        folder: &Path,
        capacity_bytes: u64,
        chunk_bytes: usize,
        layout_id: [u8; 16],
        sync: bool,
    ) -> Result<Self> {
        let shared = Shared {
            name: Arc::from(name),
            folder: folder.to_owned(),
            capacity_bytes,
            chunk_bytes,
            layout_id,
            sync,
            state: Mutex::default(),
        };
        shared.prepare_folders().map_err(shared.io("prepare its folders"))?;
        shared.scan().map_err(shared.io("scan its folders"))?;
        let shared = Arc::new(shared);
        Ok(Self { shared })
    }
}

impl Tier for PlainFilesTier {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn capability(&self) -> Capability {
        Capability { durable: true, ..Capability::default() }
    }

    fn usage(&self) -> Usage {
        let state = self.shared.state();
        let file_bytes = self.shared.file_bytes();
        let used_bytes = (state.num_visible() + state.num_reserved) * file_bytes;
        let capacity_bytes = self.shared.capacity_bytes;
        Usage {
            capacity_bytes,
            used_bytes,
            reserved_bytes: state.num_reserved * file_bytes,
            physical_bytes: used_bytes,
            num_chunks: state.num_visible(),
            evict_from_bytes: capacity_bytes / 10 * 9,
            full_at_bytes: capacity_bytes,
        }
    }

    fn reserve(&self, key: &ChunkKey, meta: &ChunkMeta) -> Result<Option<Place>> {
        let shared = &self.shared;
        if meta.bytes != shared.chunk_bytes as u64 || meta.layout_id != shared.layout_id {
            let reason = format!("chunk {key} is of another size or layout");
            return Err(TierError::invalid(&shared.name, reason));
        }
        let mut state = shared.state();
        let used_bytes = (state.chunks.len() as u64 + state.num_reserved) * shared.file_bytes();
        if state.closed || used_bytes + shared.file_bytes() > shared.capacity_bytes {
            return Ok(None);
        }
        state.num_reserved += 1;
        state.next_draft += 1;
        let writer = FileWriter {
            draft: shared.folder.join("drafts").join(state.next_draft.to_string()),
            shared: Arc::clone(shared),
            key: *key,
            meta: *meta,
            stored: Vec::new(),
            is_reserved: true,
        };
        let name = Arc::clone(&shared.name);
        Ok(Some(Place::new(name, self.capability(), *key, *meta, Box::new(writer))))
    }

    fn pin(&self, key: &ChunkKey) -> Result<Option<Pinned>> {
        let mut state = self.shared.state();
        if state.closed {
            return Ok(None);
        }
        let Some(chunk) = state.chunks.get_mut(key).filter(|chunk| !chunk.is_damaged) else {
            return Ok(None);
        };
        chunk.num_pins += 1;
        let meta = chunk.meta;
        let reader = FileReader { shared: Arc::clone(&self.shared), key: *key, meta };
        let name = Arc::clone(&self.shared.name);
        Ok(Some(Pinned::new(name, self.capability(), *key, meta, Box::new(reader))))
    }

    fn remove(&self, key: &ChunkKey) -> Result<bool> {
        let mut state = self.shared.state();
        match state.chunks.get(key) {
            Some(chunk) if chunk.num_pins == 0 => {}
            _ => return Ok(false),
        }
        // The file goes under the lock: a commit of the same key waits and finds a clean place.
        self.shared.delete(key)?;
        Ok(state.chunks.remove(key).is_some())
    }

    fn recover(&self) -> Result<Vec<(ChunkKey, ChunkMeta)>> {
        let state = self.shared.state();
        let chunks = state.chunks.iter().filter(|(_, chunk)| !chunk.is_damaged);
        Ok(chunks.map(|(key, chunk)| (*key, chunk.meta)).collect())
    }

    fn health(&self) -> Health {
        Health::Ok
    }

    fn close(&self, _deadline: Instant) -> Result<()> {
        self.shared.state().closed = true;
        Ok(())
    }

    fn tamper(&self, key: &ChunkKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> Result<bool> {
        let path = self.shared.path(key);
        let mut stored = match fs::read(&path) {
            Ok(stored) => stored,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(TierError::io(&self.shared.name, "read a chunk", e)),
        };
        change(&mut stored);
        fs::write(&path, stored).map_err(self.shared.io("write a chunk"))?;
        Ok(true)
    }
}

impl State {
    fn num_visible(&self) -> u64 {
        self.chunks.values().filter(|chunk| !chunk.is_damaged).count() as u64
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn io(&self, action: &'static str) -> impl FnOnce(std::io::Error) -> TierError + '_ {
        move |source| TierError::io(&self.name, action, source)
    }

    fn path(&self, key: &ChunkKey) -> PathBuf {
        let name = key.to_string();
        self.folder.join(&name[..2]).join(&name)
    }

    fn file_bytes(&self) -> u64 {
        let bytes = (CHUNK_HEADER_BYTES + self.chunk_bytes) as u64;
        bytes.next_multiple_of(BLOCK_BYTES)
    }

    fn prepare_folders(&self) -> std::io::Result<()> {
        let drafts = self.folder.join("drafts");
        if drafts.exists() {
            fs::remove_dir_all(&drafts)?;
        }
        fs::create_dir_all(&drafts)?;
        (0..=255_u8).try_for_each(|first| fs::create_dir_all(self.folder.join(format!("{first:02x}"))))
    }

    /// Finds what earlier runs stored. Files that do not look like chunks of this layout are removed.
    fn scan(&self) -> std::io::Result<()> {
        let mut state = self.state();
        for first in 0..=255_u8 {
            for entry in fs::read_dir(self.folder.join(format!("{first:02x}")))? {
                let path = entry?.path();
                match self.read_header(&path)? {
                    Some((key, meta)) if path == self.path(&key) => {
                        let chunk = Chunk { meta, num_pins: 0, is_damaged: false };
                        state.chunks.insert(key, chunk);
                    }
                    _ => fs::remove_file(&path)?,
                }
            }
        }
        Ok(())
    }

    fn read_header(&self, path: &Path) -> std::io::Result<Option<(ChunkKey, ChunkMeta)>> {
        let file = File::open(path)?;
        let stored_bytes = file.metadata()?.len();
        let mut head = Vec::new();
        file.take(CHUNK_HEADER_BYTES as u64).read_to_end(&mut head)?;
        let header = codec::decode_chunk_header(&head, stored_bytes).ok();
        Ok(header.filter(|(_, meta)| meta.layout_id == self.layout_id && meta.bytes == self.chunk_bytes as u64))
    }

    fn delete(&self, key: &ChunkKey) -> Result<()> {
        match fs::remove_file(self.path(key)) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(TierError::io(&self.name, "remove a chunk", e)),
            _ => Ok(()),
        }
    }
}

struct FileWriter {
    shared: Arc<Shared>,
    draft: PathBuf,
    key: ChunkKey,
    meta: ChunkMeta,
    stored: Vec<u8>,
    is_reserved: bool,
}

impl FileWriter {
    fn write_draft(&mut self) -> std::io::Result<()> {
        codec::seal_chunk(&self.key, &self.meta, &mut self.stored);
        let mut file = File::create(&self.draft)?;
        file.write_all(&self.stored)?;
        if self.shared.sync {
            file.sync_all()?;
        }
        Ok(())
    }
}

impl PlaceWriter for FileWriter {
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        if self.stored.is_empty() {
            self.stored = codec::new_chunk(self.shared.chunk_bytes);
        }
        let start = CHUNK_HEADER_BYTES + offset;
        self.stored[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        self.write_draft().map_err(shared.io("write a chunk"))?;
        let mut state = shared.state();
        if state.closed {
            let tier = Arc::clone(&shared.name);
            drop(state);
            return Err(TierError::Closed { tier });
        }
        let is_there = state.chunks.get(&self.key).is_some_and(|chunk| !chunk.is_damaged);
        if !is_there {
            if let Err(e) = fs::rename(&self.draft, shared.path(&self.key)) {
                drop(state);
                return Err(TierError::io(&shared.name, "move a chunk into place", e));
            }
            // Over a damaged one that is still pinned, the pins stay and find good bytes from now on.
            let chunk =
                state.chunks.entry(self.key).or_insert(Chunk { meta: self.meta, num_pins: 0, is_damaged: false });
            chunk.is_damaged = false;
            state.num_reserved -= 1;
            self.is_reserved = false;
        }
        drop(state);
        Ok(())
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if self.is_reserved {
            // Most aborted places never made a draft, and the next start removes what stays.
            let _ = fs::remove_file(&self.draft);
            self.shared.state().num_reserved -= 1;
        }
    }
}

struct FileReader {
    shared: Arc<Shared>,
    key: ChunkKey,
    meta: ChunkMeta,
}

impl FileReader {
    fn read_checked(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let tier = &self.shared.name;
        let stored = match fs::read(self.shared.path(&self.key)) {
            Ok(stored) => stored,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let (tier, key) = (Arc::clone(tier), self.key);
                return Err(TierError::Gone { tier, key });
            }
            Err(e) => return Err(TierError::io(tier, "read a chunk", e)),
        };
        let payload = codec::decode_chunk(&self.key, &self.meta, &stored);
        let payload =
            payload.map_err(|damage| TierError::Corrupt { tier: Arc::clone(tier), key: self.key, reason: damage.0 })?;
        out.copy_from_slice(&payload[offset..offset + out.len()]);
        Ok(())
    }
}

impl PinReader for FileReader {
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let read = self.read_checked(offset, out);
        if read.is_err() {
            let mut state = self.shared.state();
            let chunk = state.chunks.get_mut(&self.key);
            chunk.expect("a pinned chunk is not removed").is_damaged = true;
        }
        read
    }
}

impl Drop for FileReader {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let chunk = state.chunks.get_mut(&self.key).expect("a pinned chunk is not removed");
        chunk.num_pins -= 1;
        if chunk.num_pins == 0 && chunk.is_damaged && self.shared.delete(&self.key).is_ok() {
            state.chunks.remove(&self.key);
        }
    }
}
