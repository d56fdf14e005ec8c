use proptest::prelude::*;

use super::*;
use crate::conformance::{key, meta, payload, LAYOUT_ID};

const BYTES: usize = 300;

fn stored() -> Vec<u8> {
    encode_chunk(&key(1), &meta(BYTES), &payload(1, BYTES))
}

fn decode(stored: &[u8]) -> Result<&[u8], Damage> {
    decode_chunk(&key(1), &meta(BYTES), stored)
}

/// Offsets of the header's fields.
const VERSION: usize = 4;
const NUM_TOKENS: usize = 4 + 2 + 16 + 16 + 4;
const LENGTH: usize = NUM_TOKENS + 4 + 8;

#[test]
fn a_chunk_comes_back() {
    let stored = stored();
    assert_eq!(stored.len(), CHUNK_HEADER_BYTES + BYTES);
    assert_eq!(decode(&stored).unwrap(), payload(1, BYTES));
    let (found_key, found_meta) = decode_chunk_header(&stored[..CHUNK_HEADER_BYTES], stored.len() as u64).unwrap();
    assert_eq!((found_key, found_meta), (key(1), meta(BYTES)));
}

#[test]
fn every_single_bit_flip_is_noticed() {
    let good = stored();
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(&bad).is_err(), "bit {bit}");
    }
}

#[test]
fn every_truncation_and_extension_is_noticed() {
    let good = stored();
    for len in 0..good.len() {
        assert!(decode(&good[..len]).is_err(), "{len} bytes");
    }
    let mut long = good;
    long.push(0);
    assert!(decode(&long).is_err());
}

#[test]
fn swapped_blocks_are_noticed() {
    let mut bad = stored();
    let (one, two) = (CHUNK_HEADER_BYTES, CHUNK_HEADER_BYTES + 64);
    for index in 0..32 {
        bad.swap(one + index, two + index);
    }
    assert!(decode(&bad).is_err());
}

#[test]
fn foreign_chunks_are_damage() {
    let stored = stored();
    assert!(decode_chunk(&key(2), &meta(BYTES), &stored).is_err());
    let mut foreign = meta(BYTES);
    foreign.layout_id[0] ^= 1;
    assert!(decode_chunk(&key(1), &foreign, &stored).is_err());
    let fewer = ChunkMeta { num_tokens: 3, ..meta(BYTES) };
    assert!(decode_chunk(&key(1), &fewer, &stored).is_err());
    // A chunk of a model with more layers: right in itself, of the wrong size.
    let larger = encode_chunk(&key(1), &meta(2 * BYTES), &payload(1, 2 * BYTES));
    assert!(decode(&larger).is_err());
}

#[test]
fn hostile_lengths_are_refused_without_allocating() {
    for length in [0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, BYTES as u64 + 1] {
        let mut bad = stored();
        bad[LENGTH..LENGTH + 8].copy_from_slice(&length.to_le_bytes());
        assert!(decode(&bad).is_err(), "length {length}");
        assert!(decode_chunk_header(&bad, bad.len() as u64).is_err(), "length {length}");
    }
    let mut bad = stored();
    bad[NUM_TOKENS..NUM_TOKENS + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(decode(&bad).is_err());
    let mut newer = stored();
    newer[VERSION] += 1;
    assert!(decode(&newer).unwrap_err().0.contains("version 2"));
}

#[test]
fn a_meta_comes_back_and_foreign_ones_do_not() {
    let stored = encode_meta(&meta(BYTES));
    assert_eq!(decode_meta(&stored).unwrap(), meta(BYTES));
    for len in 0..stored.len() {
        assert!(decode_meta(&stored[..len]).is_err());
    }
    let mut newer = stored.clone();
    newer[0] += 1;
    assert!(decode_meta(&newer).is_err());
    assert!(decode_meta(&[stored, vec![0]].concat()).is_err());
}

fn turn() -> TurnRecord {
    TurnRecord {
        id: [1; 16],
        parent: Some([2; 16]),
        tenant: "tenant".to_owned(),
        tokens: vec![0, 1, 32_000, u32::MAX],
        items: b"[{}]".to_vec(),
        created_at: 1_750_000_000,
        fingerprints: [[3; 32], [4; 32], LAYOUT_ID.repeat(2).try_into().unwrap()],
        finished: true,
        hidden: false,
    }
}

#[test]
fn a_turn_comes_back() {
    let stored = encode_turn(&turn()).unwrap();
    assert_eq!(decode_turn([1; 16], &stored).unwrap(), turn());
    let root = TurnRecord { parent: None, tokens: Vec::new(), items: Vec::new(), ..turn() };
    let stored = encode_turn(&root).unwrap();
    assert_eq!(decode_turn([1; 16], &stored).unwrap(), root);
}

#[test]
fn damaged_turns_are_errors() {
    let stored = encode_turn(&turn()).unwrap();
    for len in 0..stored.len() {
        assert!(decode_turn([1; 16], &stored[..len]).is_err(), "{len} bytes");
    }
    // Each length in turn as large as can be: the borrowed form never allocates what it claims.
    for offset in 0..stored.len() - 8 {
        for length in [u64::MAX, 1 << 63, 1 << 27] {
            let mut bad = stored.clone();
            bad[offset..offset + 8].copy_from_slice(&length.to_le_bytes());
            let _ = decode_turn([1; 16], &bad);
        }
    }
    let mut newer = stored;
    newer[0] += 1;
    assert!(decode_turn([1; 16], &newer).is_err());
}

proptest! {
    #[test]
    fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..600)) {
        prop_assert!(decode(&noise).is_err());
        prop_assert!(decode_chunk_header(&noise, noise.len() as u64).is_err());
        let _ = decode_meta(&noise);
        let _ = decode_turn([0; 16], &noise);
    }

    #[test]
    fn several_changes_are_noticed(
        changes in prop::collection::vec((0..CHUNK_HEADER_BYTES + BYTES, 1u8..), 1..20),
    ) {
        let good = stored();
        let mut bad = good.clone();
        for (at, change) in changes {
            bad[at] ^= change;
        }
        prop_assume!(bad != good);
        prop_assert!(decode(&bad).is_err());
    }
}
