//! What the text tests share.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use keepsake_model::gguf::GgufFile;
use keepsake_model::tokenizer::{GgufVocab, Tokenizer};

/// The demo model's vocabulary, read once per test binary.
pub fn demo_vocab() -> &'static GgufVocab {
    static VOCAB: OnceLock<GgufVocab> = OnceLock::new();
    VOCAB.get_or_init(|| {
        let file = GgufFile::open(&demo_path()).expect("the demo model is a GGUF file");
        GgufVocab::from_metadata(file.metadata()).expect("the demo model has a vocabulary")
    })
}

pub fn demo_tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let build = || Arc::new(Tokenizer::from_vocab(demo_vocab()).expect("the demo vocabulary is valid"));
    Arc::clone(TOKENIZER.get_or_init(build))
}

/// A small SentencePiece vocabulary: byte fallback, a space prefix, one user-defined token.
#[allow(dead_code, reason = "not every test binary uses it")]
pub fn sentence_piece_vocab() -> GgufVocab {
    let mut vocab =
        GgufVocab { model: "llama".into(), bos: Some(1), eos: Some(2), unknown: Some(0), ..GgufVocab::default() };
    let mut push = |text: &str, kind: i32, score: f32| {
        vocab.tokens.push(text.to_owned());
        vocab.token_types.push(kind);
        vocab.scores.push(score);
    };
    push("<unk>", 2, 0.0);
    push("<s>", 3, 0.0);
    push("</s>", 3, 0.0);
    (0..=255).for_each(|byte| push(&format!("<0x{byte:02X}>"), 6, 0.0));
    push("<tool>", 4, 0.0);
    let merged = ["▁t", "he", "▁the", "in", "ll", "lo", "hello", "aa", "aaa", "▁▁", "hel", "llo", "▁hello"];
    for (rank, text) in merged.iter().enumerate() {
        push(text, 1, -(rank as f32));
    }
    for (rank, text) in "▁abcdefghijklmnopqrstuvwxyzé<>/s".chars().enumerate() {
        push(&text.to_string(), 1, -100.0 - rank as f32);
    }
    vocab
}

fn demo_path() -> PathBuf {
    let by_env = std::env::var_os("KEEPSAKE_DEMO_MODEL").map(PathBuf::from);
    let path =
        by_env.unwrap_or_else(|| keepsake_config::data_dir().join("models").join("SmolLM2-135M-Instruct.Q4_1.gguf"));
    assert!(path.exists(), "no demo model at {}: run `make setup`", path.display());
    path
}
