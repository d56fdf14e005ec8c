//! GGUF files: what is read back, and what damaged or hostile files answer.

use std::io::Write;

use keepsake_kernels::DType;
use keepsake_model::gguf::GgufFile;
use keepsake_model::ModelError;
use proptest::prelude::*;
use tempfile::NamedTempFile;

use crate::support::gguf_writer::{GgufWriter, Item};

fn open(bytes: &[u8]) -> Result<GgufFile, ModelError> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    GgufFile::open(file.path())
}

fn refusal(bytes: &[u8]) -> String {
    let message = match open(bytes) {
        Ok(_) => panic!("the file was accepted"),
        Err(error) => error.to_string(),
    };
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

fn small() -> GgufWriter {
    let mut writer = GgufWriter::default();
    writer
        .text("general.architecture", "llama")
        .number("a.number", 7)
        .item("a.float", Item::F32(0.5))
        .item("some.texts", Item::Texts(vec!["x".to_owned(), "äö".to_owned()]))
        .item("some.numbers", Item::I32s(vec![1, -2, 3]))
        .tensor("one", DType::F32, &[2, 3], (0..24).collect())
        .tensor("two", DType::Q8_0, &[2, 32], (0..68).collect());
    writer
}

#[test]
fn values_and_tensors_are_read_back() {
    let file = open(&small().bytes()).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.string("general.architecture"), Some("llama"));
    assert_eq!(metadata.u32("a.number"), Some(7));
    assert_eq!(metadata.f32("a.float"), Some(0.5));
    assert_eq!(metadata.strings("some.texts").unwrap(), ["x", "äö"]);
    assert_eq!(metadata.i32s("some.numbers").unwrap(), [1, -2, 3]);
    assert_eq!(metadata.u32("absent"), None);
    assert_eq!(metadata.try_u32("absent"), Ok(None));
    let message = metadata.try_u32("a.float").unwrap_err().to_string();
    assert_eq!(message, "metadata key `a.float` is a float, not a 32-bit unsigned integer");

    let one = file.tensor("one").unwrap();
    assert_eq!((one.dtype, one.shape), (DType::F32, vec![2, 3]));
    assert_eq!(one.bytes.as_ref(), (0..24).collect::<Vec<u8>>());
    let two = file.tensor("two").unwrap();
    assert_eq!((two.dtype, two.shape), (DType::Q8_0, vec![2, 32]));
    assert_eq!(two.bytes.as_ref(), (0..68).collect::<Vec<u8>>());
    assert!(file.tensor("three").is_none());
}

#[test]
fn every_truncation_is_refused() {
    let whole = small().bytes();
    for len in 0..whole.len() {
        let message = refusal(&whole[..len]);
        assert!(message.contains("truncated") || message.contains("not a GGUF"), "{len}: {message}");
    }
}

#[test]
fn foreign_files_are_named_as_such() {
    assert!(refusal(b"PK\x03\x04 and so on").contains("not a GGUF file"));
    assert!(refusal(b"").contains("truncated"));
    let mut bytes = small().bytes();
    bytes[4] = 1;
    assert!(refusal(&bytes).contains("GGUF version 1 is not supported"));
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(refusal(&bytes).contains("big-endian"));
}

#[test]
fn hostile_counts_are_refused_before_allocation() {
    for (offset, what) in [(8, "tensors"), (16, "metadata entries")] {
        for count in [u64::MAX, 1 << 63, 1 << 40, 70_000] {
            let mut bytes = small().bytes();
            bytes[offset..offset + 8].copy_from_slice(&count.to_le_bytes());
            let message = refusal(&bytes);
            assert!(message.contains(&format!("{count} {what}")), "{message}");
        }
    }
    // The first key's length.
    let mut bytes = small().bytes();
    bytes[24..32].copy_from_slice(&(u64::MAX - 3).to_le_bytes());
    assert!(refusal(&bytes).contains("string bytes"));
}

#[test]
fn duplicates_overlaps_and_odd_offsets_are_refused() {
    let mut writer = small();
    writer.number("a.number", 8);
    assert!(refusal(&writer.bytes()).contains("`a.number`"));

    let mut writer = small();
    writer.tensor("one", DType::F32, &[1], vec![0; 4]);
    assert!(refusal(&writer.bytes()).contains("tensor `one`: the name appears twice"));

    // The last field of the directory is the second tensor's offset, 32 in a sound file.
    let sound = small().bytes();
    let field = find(&sound, b"two") + 3 + 4 + 16 + 4;
    assert_eq!(sound[field..field + 8], 32u64.to_le_bytes());
    for (offset, reason) in
        [(0u64, "overlap"), (8, "alignment"), (1 << 20, "leave the file"), (u64::MAX - 31, "leave the file")]
    {
        let mut bytes = sound.clone();
        bytes[field..field + 8].copy_from_slice(&offset.to_le_bytes());
        let message = refusal(&bytes);
        assert!(message.contains(reason), "{offset}: {message}");
    }
}

#[test]
fn impossible_tensors_are_refused() {
    let sound = small().bytes();
    let dims = find(&sound, b"two") + 3;
    let cases: [(usize, &[u8], &str); 6] = [
        (dims, &0u32.to_le_bytes(), "0 dimensions"),
        (dims, &5u32.to_le_bytes(), "5 dimensions"),
        (dims + 4, &0u64.to_le_bytes(), "zero"),
        (dims + 4, &u64::MAX.to_le_bytes(), "overflows"),
        (dims + 4, &33u64.to_le_bytes(), "whole Q8_0 blocks"),
        (dims + 20, &99u32.to_le_bytes(), "ggml type 99 is not supported"),
    ];
    for (at, field, reason) in cases {
        let mut bytes = sound.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        let message = refusal(&bytes);
        assert!(message.contains("tensor `two`") && message.contains(reason), "{message}");
    }
}

#[test]
fn bad_alignment_is_refused() {
    for alignment in [0, 3, 1 << 30] {
        let mut writer = small();
        writer.number("general.alignment", alignment);
        assert!(refusal(&writer.bytes()).contains("`general.alignment`"));
    }
}

fn find(bytes: &[u8], word: &[u8]) -> usize {
    bytes.windows(word.len()).position(|window| window == word).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever is flipped: an answer, or tensors that can be read to their end.
    #[test]
    fn flipped_bytes_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = small().bytes();
        for (index, value) in flips {
            let at = index.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(file) = open(&bytes) {
            for name in file.tensor_names() {
                let tensor = file.tensor(name).unwrap();
                prop_assert!(tensor.bytes.len() <= bytes.len());
                std::hint::black_box(tensor.bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>());
            }
        }
    }
}
