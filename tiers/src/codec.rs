//! Every byte that Keepsake stores is written and read here.
//!
//! Stored chunk: a header of [`CHUNK_HEADER_BYTES`] (magic, format version, layout id, key, position, token count, last
//! activity, payload length, checksum), then the payload. Reading trusts nothing: lengths are compared with what is
//! there before anything is allocated, and the identity with what was asked for.
//!
//! The checksum is a 64-bit mix in four lanes rather than a cryptographic hash: it guards against damage, not against
//! people who can write the disk. It runs at memory speed, so checking costs a restore next to nothing.
//! bincode stays behind this file.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::{BorrowDecode, Decode, Encode};

use crate::rocks::TurnRecord;
use crate::{ChunkKey, ChunkMeta};

/// Bytes before the payload of a stored chunk.
pub const CHUNK_HEADER_BYTES: usize = 4 + 2 + 16 + 16 + 4 + 4 + 8 + 8 + 8;

const CHUNK_MAGIC: [u8; 4] = *b"KPCK";
const CHUNK_VERSION: u16 = 1;
const META_VERSION: u16 = 1;
const TURN_VERSION: u16 = 1;
/// No turn is larger: request bodies are limited far below.
const MAX_TURN_BYTES: usize = 256 << 20;

/// Why stored bytes cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Damage(pub String);

#[derive(Encode, Decode)]
struct ChunkHeader {
    magic: [u8; 4],
    version: u16,
    layout_id: [u8; 16],
    key: [u8; 16],
    position: u32,
    num_tokens: u32,
    last_activity_unix: u64,
    length: u64,
    checksum: u64,
}

#[derive(Encode, Decode)]
struct StoredMeta {
    version: u16,
    layout_id: [u8; 16],
    position: u32,
    num_tokens: u32,
    last_activity_unix: u64,
    bytes: u64,
}

/// Borrows every part of variable length, so that no length read from a disk is ever allocated.
#[derive(Encode, BorrowDecode)]
struct StoredTurn<'a> {
    version: u16,
    hidden: bool,
    finished: bool,
    created_at: u64,
    parent: Option<[u8; 16]>,
    fingerprints: [[u8; 32]; 3],
    tenant: &'a str,
    tokens: &'a [u8],
    items: &'a [u8],
}

/// Fixed-width little-endian integers: sizes are known ahead. The limit bounds what a reader may claim.
const fn fixed() -> Configuration<LittleEndian, Fixint, Limit<MAX_TURN_BYTES>> {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<MAX_TURN_BYTES>()
}

/// Begins a stored chunk: room for the header, and for a payload that [`seal_chunk`] expects to be filled in.
pub fn new_chunk(payload_bytes: usize) -> Vec<u8> {
    vec![0; CHUNK_HEADER_BYTES + payload_bytes]
}

/// Writes the header of a chunk whose payload is in place.
pub fn seal_chunk(key: &ChunkKey, meta: &ChunkMeta, stored: &mut [u8]) {
    let (head, payload) = stored.split_at_mut(CHUNK_HEADER_BYTES);
    let mut header = ChunkHeader {
        magic: CHUNK_MAGIC,
        version: CHUNK_VERSION,
        layout_id: meta.layout_id,
        key: key.0,
        position: meta.position,
        num_tokens: meta.num_tokens,
        last_activity_unix: meta.last_activity_unix,
        length: payload.len() as u64,
        checksum: 0,
    };
    encode_header(&header, head);
    header.checksum = checksum(head, payload);
    encode_header(&header, head);
}

/// A stored chunk of its own.
pub fn encode_chunk(key: &ChunkKey, meta: &ChunkMeta, payload: &[u8]) -> Vec<u8> {
    let mut stored = new_chunk(payload.len());
    stored[CHUNK_HEADER_BYTES..].copy_from_slice(payload);
    seal_chunk(key, meta, &mut stored);
    stored
}

/// The payload of a stored chunk, if it is the one that was asked for and undamaged.
pub fn decode_chunk<'a>(key: &ChunkKey, meta: &ChunkMeta, stored: &'a [u8]) -> Result<&'a [u8], Damage> {
    let (found, payload) = split_chunk(stored)?;
    if found.key != key.0 {
        let found = ChunkKey(found.key);
        return Err(Damage(format!("it holds the bytes of chunk {found}")));
    }
    if found.layout_id != meta.layout_id {
        return Err(Damage("it belongs to another model or layout".to_owned()));
    }
    if found.length != meta.bytes || found.num_tokens != meta.num_tokens {
        return Err(Damage(format!(
            "it holds {} bytes of {} tokens instead of {} of {}",
            found.length, found.num_tokens, meta.bytes, meta.num_tokens
        )));
    }
    verify_checksum(found, stored)?;
    Ok(payload)
}

/// Key and meta of a stored chunk, from its header alone: for backends that recover by a scan. Checks everything but
/// the checksum; `stored_bytes` is the size of the whole.
pub fn decode_chunk_header(head: &[u8], stored_bytes: u64) -> Result<(ChunkKey, ChunkMeta), Damage> {
    let header = decode_header(head)?;
    let expected = header.length.checked_add(CHUNK_HEADER_BYTES as u64);
    if expected != Some(stored_bytes) {
        return Err(Damage(format!("{stored_bytes} bytes stored for a payload of {}", header.length)));
    }
    let meta = ChunkMeta {
        position: header.position,
        num_tokens: header.num_tokens,
        layout_id: header.layout_id,
        bytes: header.length,
        last_activity_unix: header.last_activity_unix,
    };
    Ok((ChunkKey(header.key), meta))
}

/// An index entry.
pub fn encode_meta(meta: &ChunkMeta) -> Vec<u8> {
    let stored = StoredMeta {
        version: META_VERSION,
        layout_id: meta.layout_id,
        position: meta.position,
        num_tokens: meta.num_tokens,
        last_activity_unix: meta.last_activity_unix,
        bytes: meta.bytes,
    };
    bincode::encode_to_vec(stored, fixed()).expect("a meta is far below the limit")
}

pub fn decode_meta(stored: &[u8]) -> Result<ChunkMeta, Damage> {
    let (meta, used) = bincode::decode_from_slice::<StoredMeta, _>(stored, fixed())
        .map_err(|e| Damage(format!("index entry: {e}")))?;
    if meta.version != META_VERSION || used != stored.len() {
        return Err(Damage(format!("index entry of version {}", meta.version)));
    }
    Ok(ChunkMeta {
        position: meta.position,
        num_tokens: meta.num_tokens,
        layout_id: meta.layout_id,
        bytes: meta.bytes,
        last_activity_unix: meta.last_activity_unix,
    })
}

pub fn encode_turn(turn: &TurnRecord) -> Result<Vec<u8>, Damage> {
    let mut tokens = Vec::with_capacity(turn.tokens.len() * 4);
    for token in &turn.tokens {
        tokens.extend_from_slice(&token.to_le_bytes());
    }
    let size = tokens.len() + turn.items.len() + turn.tenant.len();
    if size > MAX_TURN_BYTES / 2 {
        return Err(Damage(format!("a turn of {size} bytes is too large")));
    }
    let stored = StoredTurn {
        version: TURN_VERSION,
        hidden: turn.hidden,
        finished: turn.finished,
        created_at: turn.created_at,
        parent: turn.parent,
        fingerprints: turn.fingerprints,
        tenant: &turn.tenant,
        tokens: &tokens,
        items: &turn.items,
    };
    bincode::encode_to_vec(stored, fixed()).map_err(|e| Damage(e.to_string()))
}

pub fn decode_turn(id: [u8; 16], stored: &[u8]) -> Result<TurnRecord, Damage> {
    // The version decides about the rest, so it is looked at before the rest is.
    let version = stored.first_chunk().map(|bytes| u16::from_le_bytes(*bytes));
    if version != Some(TURN_VERSION) {
        return Err(Damage(format!("turn of format version {version:?}")));
    }
    let (turn, used) = bincode::borrow_decode_from_slice::<StoredTurn<'_>, _>(stored, fixed())
        .map_err(|e| Damage(format!("turn: {e}")))?;
    if used != stored.len() || !turn.tokens.len().is_multiple_of(4) {
        return Err(Damage("turn: wrong length".to_owned()));
    }
    let tokens = turn.tokens.chunks_exact(4);
    let token = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    Ok(TurnRecord {
        id,
        parent: turn.parent,
        tenant: turn.tenant.to_owned(),
        tokens: tokens.map(token).collect(),
        items: turn.items.to_vec(),
        created_at: turn.created_at,
        fingerprints: turn.fingerprints,
        finished: turn.finished,
        hidden: turn.hidden,
    })
}

fn encode_header(header: &ChunkHeader, head: &mut [u8]) {
    let written = bincode::encode_into_slice(header, head, fixed()).expect("the header fits its room");
    debug_assert_eq!(written, CHUNK_HEADER_BYTES);
}

fn decode_header(stored: &[u8]) -> Result<ChunkHeader, Damage> {
    let (header, _) = bincode::decode_from_slice::<ChunkHeader, _>(stored, fixed())
        .map_err(|e| Damage(format!("chunk header: {e}")))?;
    if header.magic != CHUNK_MAGIC {
        return Err(Damage("not a chunk".to_owned()));
    }
    if header.version != CHUNK_VERSION {
        return Err(Damage(format!("chunk of format version {}", header.version)));
    }
    Ok(header)
}

fn split_chunk(stored: &[u8]) -> Result<(ChunkHeader, &[u8]), Damage> {
    let header = decode_header(stored)?;
    let payload = &stored[CHUNK_HEADER_BYTES..];
    if header.length != payload.len() as u64 {
        return Err(Damage(format!("{} bytes stored of a payload of {}", payload.len(), header.length)));
    }
    Ok((header, payload))
}

fn verify_checksum(header: ChunkHeader, stored: &[u8]) -> Result<(), Damage> {
    let (expected, payload) = (header.checksum, &stored[CHUNK_HEADER_BYTES..]);
    let mut head = [0; CHUNK_HEADER_BYTES];
    let unsigned = ChunkHeader { checksum: 0, ..header };
    encode_header(&unsigned, &mut head);
    if checksum(&head, payload) != expected {
        return Err(Damage("its checksum is wrong".to_owned()));
    }
    Ok(())
}

/// Each step is a bijection of a lane's state for a given word, and of the word for a given state: a change within one
/// word always changes the result.
fn checksum(head: &[u8], payload: &[u8]) -> u64 {
    let mut lanes = [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x27d4_eb2f_1656_67c5];
    mix_all(&mut lanes, head);
    mix_all(&mut lanes, payload);
    let mut hash = (head.len() as u64) ^ (payload.len() as u64).rotate_left(32);
    for lane in lanes {
        hash = mix(hash, lane);
    }
    hash ^ (hash >> 29)
}

fn mix_all(lanes: &mut [u64; 4], bytes: &[u8]) {
    let (blocks, rest) = bytes.as_chunks::<32>();
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = mix(*lane, u64::from_le_bytes(*word));
        }
    }
    let mut last = [0; 32];
    last[..rest.len()].copy_from_slice(rest);
    let (words, _) = last.as_chunks::<8>();
    for (lane, word) in lanes.iter_mut().zip(words) {
        *lane = mix(*lane, u64::from_le_bytes(*word));
    }
}

fn mix(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25).rotate_left(29)
}

#[cfg(test)]
mod tests;
