//! Turns and the column families that hold them.
//!
//! `turns`: id -> record · `children`: parent id, child id -> nothing · `expiry`: creation time (big endian), id -> nothing ·
//! `doomed`: chunk key -> nothing.

use std::sync::Arc;

use rocksdb::{ColumnFamily, ColumnFamilyDescriptor, Direction, IteratorMode, Options, ReadOptions, WriteBatch, DB};

use super::TurnStoreConfig;
use crate::rocks::database::{base_options, storage_error, table_options, Database, DatabaseConfig};
use crate::{codec, ChunkKey, Result, TierError};

/// What one request appended to a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnRecord {
    /// Random, given to the client.
    pub id: [u8; 16],
    /// The turn that this one continues.
    pub parent: Option<[u8; 16]>,
    pub tenant: String,
    /// The ids that this turn appended to the token log, the reply's included.
    pub tokens: Vec<u32>,
    /// The request's and the reply's items; opaque here. Dropped when the turn is deleted.
    pub items: Vec<u8>,
    /// Seconds since the Unix epoch.
    pub created_at: u64,
    /// Of the model, the tokenizer and the chat template.
    pub fingerprints: [[u8; 32]; 3],
    /// Whether the reply ended; only such a turn can be continued.
    pub finished: bool,
    /// A tombstone, or a turn that clients were never given: seen by descendants only.
    pub hidden: bool,
}

/// A token log whose last turns are no longer stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedLog {
    pub tenant: String,
    /// From the root on.
    pub tokens: Vec<u32>,
    /// The first so many belong to turns that are stored still.
    pub num_kept: usize,
}

/// What a deletion changed.
#[derive(Debug, Default)]
pub(super) struct Removal {
    /// Clients could see the turn.
    pub(super) was_visible: bool,
    /// What went for good; `None` when the turn is unknown, or when descendants need its tokens.
    pub(super) log: Option<RemovedLog>,
}

/// A chain longer than any context is damage.
const MAX_CHAIN: usize = 1 << 20;

const TURNS: &str = "turns";
const CHILDREN: &str = "children";
const EXPIRY: &str = "expiry";
const DOOMED: &str = "doomed";

const BLOCK_CACHE_BYTES: usize = 8 << 20;

fn write_buffer_bytes(config: &TurnStoreConfig) -> u64 {
    (config.capacity_bytes / 32).clamp(256 << 10, 16 << 20)
}

/// All memory that RocksDB may take.
pub(super) fn memory_bytes(config: &TurnStoreConfig) -> u64 {
    write_buffer_bytes(config) + BLOCK_CACHE_BYTES as u64
}

pub(super) fn open_database(config: &TurnStoreConfig) -> Result<Database> {
    let write_buffer = write_buffer_bytes(config) as usize;
    let mut options = base_options();
    options.set_db_write_buffer_size(write_buffer);
    options.set_max_total_wal_size((config.capacity_bytes / 16).clamp(512 << 10, 64 << 20));
    let families = move || {
        let table = table_options(BLOCK_CACHE_BYTES);
        [TURNS, CHILDREN, EXPIRY, DOOMED].map(|name| {
            let mut options = Options::default();
            options.set_block_based_table_factory(&table);
            options.set_write_buffer_size(write_buffer / 2);
            options.set_target_file_size_base(write_buffer as u64);
            // A deleted conversation's text leaves the disk without waiting for the level to fill up.
            options.add_compact_on_deletion_collector_factory(1_000, 200, 0.2);
            ColumnFamilyDescriptor::new(name, options)
        })
    };
    Database::open(DatabaseConfig {
        name: Arc::from("turns"),
        path: config.path.join("db"),
        capacity_bytes: config.capacity_bytes,
        options,
        families: Box::new(move || families().into()),
        families_to_compact: &[TURNS, CHILDREN, EXPIRY, DOOMED],
        probe_bytes: 2 * write_buffer as u64,
        is_recomputable: false,
    })
}

/// The column families of an open database.
pub(super) struct Tables<'a> {
    db: &'a DB,
    name: &'a Arc<str>,
}

impl<'a> Tables<'a> {
    pub(super) fn new(db: &'a DB, name: &'a Arc<str>) -> Self {
        Self { db, name }
    }

    pub(super) fn turn(&self, id: &[u8; 16]) -> Result<Option<TurnRecord>> {
        let stored = self.db.get_pinned_cf(self.family(TURNS), id);
        let Some(stored) = stored.map_err(|e| storage_error(self.name, "read a turn", e))? else {
            return Ok(None);
        };
        let turn = codec::decode_turn(*id, &stored);
        turn.map(Some).map_err(|damage| self.damaged(id, &damage.0))
    }

    pub(super) fn has_turn(&self, id: &[u8; 16]) -> Result<bool> {
        let stored = self.db.get_pinned_cf(self.family(TURNS), id);
        let stored = stored.map_err(|e| storage_error(self.name, "read a turn", e))?;
        Ok(stored.is_some())
    }

    /// Counts children up to `limit`.
    pub(super) fn num_children(&self, id: &[u8; 16], limit: usize) -> Result<usize> {
        let mut options = ReadOptions::default();
        options.set_iterate_range(rocksdb::PrefixRange(id.as_slice()));
        let children = self.db.iterator_cf_opt(self.family(CHILDREN), options, IteratorMode::Start);
        let mut count = 0;
        for child in children.take(limit) {
            child.map_err(|e| storage_error(self.name, "read a turn's children", e))?;
            count += 1;
        }
        Ok(count)
    }

    pub(super) fn doomed(&self) -> Result<Vec<ChunkKey>> {
        let keys = self.db.iterator_cf(self.family(DOOMED), IteratorMode::Start);
        let mut doomed = Vec::new();
        for entry in keys {
            let (key, _) = entry.map_err(|e| storage_error(self.name, "read doomed chunks", e))?;
            doomed.extend(<[u8; 16]>::try_from(&key[..]).map(ChunkKey));
        }
        Ok(doomed)
    }

    /// Turns made before `before`, the youngest first, so that descendants mostly come before their ancestors.
    pub(super) fn expired(&self, before: u64, limit: usize) -> Result<Vec<(u64, [u8; 16])>> {
        let from = expiry_key(before, &[0; 16]);
        let mode = IteratorMode::From(&from, Direction::Reverse);
        let mut expired = Vec::new();
        for entry in self.db.iterator_cf(self.family(EXPIRY), mode) {
            let (key, _) = entry.map_err(|e| storage_error(self.name, "read expiry times", e))?;
            let (Some(time), Ok(id)) = (key.first_chunk(), <[u8; 16]>::try_from(&key[8..])) else {
                continue;
            };
            let time = u64::from_be_bytes(*time);
            if time < before {
                expired.push((time, id));
            }
            if expired.len() >= limit {
                break;
            }
        }
        Ok(expired)
    }

    pub(super) fn add(&self, batch: &mut WriteBatch, turn: &TurnRecord) -> Result<u64> {
        let stored = codec::encode_turn(turn);
        let stored = stored.map_err(|damage| TierError::invalid(self.name, damage.0))?;
        batch.put_cf(self.family(TURNS), turn.id, &stored);
        batch.put_cf(self.family(EXPIRY), expiry_key(turn.created_at, &turn.id), []);
        if let Some(parent) = turn.parent {
            batch.put_cf(self.family(CHILDREN), child_key(&parent, &turn.id), []);
        }
        Ok(stored.len() as u64)
    }

    pub(super) fn doom(&self, batch: &mut WriteBatch, key: &ChunkKey) {
        batch.put_cf(self.family(DOOMED), key.0, []);
    }

    pub(super) fn forget_doomed(&self, batch: &mut WriteBatch, key: &ChunkKey) {
        batch.delete_cf(self.family(DOOMED), key.0);
    }

    /// The turns from the root to `id`, tombstones too. `None`: `id` is unknown.
    pub(super) fn path(&self, id: &[u8; 16]) -> Result<Option<Vec<TurnRecord>>> {
        let mut turns: Vec<TurnRecord> = Vec::new();
        let mut next = Some(*id);
        while let Some(id) = next {
            match self.turn(&id)? {
                Some(turn) if turns.len() < MAX_CHAIN => {
                    next = turn.parent;
                    turns.push(turn);
                }
                None if turns.is_empty() => return Ok(None),
                _ => return Err(self.damaged(&id, "its chain of parents is broken")),
            }
        }
        turns.reverse();
        Ok(Some(turns))
    }

    /// Hides a turn that has descendants, or removes it together with the tombstones that only waited for it.
    pub(super) fn remove(&self, batch: &mut WriteBatch, id: &[u8; 16]) -> Result<Removal> {
        let Some(turn) = self.turn(id)? else {
            return Ok(Removal::default());
        };
        batch.delete_cf(self.family(EXPIRY), expiry_key(turn.created_at, id));
        if self.num_children(id, 1)? > 0 {
            if turn.hidden {
                return Ok(Removal::default());
            }
            let tombstone = TurnRecord { items: Vec::new(), hidden: true, ..turn };
            let stored = codec::encode_turn(&tombstone);
            let stored = stored.map_err(|damage| TierError::invalid(self.name, damage.0))?;
            batch.put_cf(self.family(TURNS), id, stored);
            return Ok(Removal { was_visible: true, log: None });
        }
        let was_visible = !turn.hidden;
        let log = self.remove_with_tombstones_above(batch, turn)?;
        Ok(Removal { was_visible, log: Some(log) })
    }

    /// Drops an expiry entry that belongs to no record of that time.
    pub(super) fn drop_expiry(&self, batch: &mut WriteBatch, created_at: u64, id: &[u8; 16]) {
        batch.delete_cf(self.family(EXPIRY), expiry_key(created_at, id));
    }

    pub(super) fn damaged(&self, id: &[u8; 16], reason: &str) -> TierError {
        TierError::Corrupt { tier: Arc::clone(self.name), key: ChunkKey(*id), reason: reason.to_owned() }
    }

    fn remove_with_tombstones_above(&self, batch: &mut WriteBatch, leaf: TurnRecord) -> Result<RemovedLog> {
        let tenant = leaf.tenant.clone();
        let mut removed = Vec::new();
        let mut turn = leaf;
        let survivor = loop {
            batch.delete_cf(self.family(TURNS), turn.id);
            batch.delete_cf(self.family(EXPIRY), expiry_key(turn.created_at, &turn.id));
            let (id, parent_id) = (turn.id, turn.parent);
            removed.push(turn.tokens);
            let Some(parent_id) = parent_id else { break None };
            batch.delete_cf(self.family(CHILDREN), child_key(&parent_id, &id));
            // The batch is not applied yet, so the parent still counts this child.
            let Some(parent) = self.turn(&parent_id)? else { break None };
            if !parent.hidden || self.num_children(&parent_id, 2)? > 1 {
                break Some(parent_id);
            }
            turn = parent;
        };
        // A damaged chain above must not keep what is below it alive; its chunks then wait for eviction.
        let kept = survivor.and_then(|id| self.path(&id).ok().flatten()).unwrap_or_default();
        let mut tokens: Vec<u32> = kept.into_iter().flat_map(|turn| turn.tokens).collect();
        let num_kept = tokens.len();
        tokens.extend(removed.into_iter().rev().flatten());
        Ok(RemovedLog { tenant, tokens, num_kept })
    }

    fn family(&self, name: &str) -> &'a ColumnFamily {
        let family = self.db.cf_handle(name);
        family.expect("the database was opened with all its column families")
    }
}

fn expiry_key(created_at: u64, id: &[u8; 16]) -> [u8; 24] {
    let mut key = [0; 24];
    key[..8].copy_from_slice(&created_at.to_be_bytes());
    key[8..].copy_from_slice(id);
    key
}

fn child_key(parent: &[u8; 16], child: &[u8; 16]) -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].copy_from_slice(parent);
    key[16..].copy_from_slice(child);
    key
}
