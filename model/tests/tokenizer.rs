//! The tokenizer against golden ids, against its own inverse, and on hostile input.

mod support;

use std::time::{Duration, Instant};

use keepsake_model::tokenizer::{GgufVocab, Tokenizer};
use proptest::prelude::*;
use serde_json::{json, Value};
use support::{demo_tokenizer, demo_vocab, sentence_piece_vocab};

#[test]
fn golden_strings_are_equal() {
    let tokenizer = demo_tokenizer();
    let golden: Value = serde_json::from_str(include_str!("fixtures/tokenizer.json")).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let cases = golden.as_array().unwrap();
    assert_eq!(cases.len(), 20);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text), ids(&case["plain"]), "plain {text:?}");
        let special = tokenizer.encode_with_special(text);
        assert_eq!(special, ids(&case["parse_special"]), "special {text:?}");
        assert_eq!(tokenizer.decode(&tokenizer.encode(text), true), text);
        assert_eq!(tokenizer.decode(&special, false), text);
    }
}

#[test]
fn demo_vocabulary_knows_its_special_tokens() {
    let tokenizer = demo_tokenizer();
    assert_eq!(tokenizer.special_id("<|im_end|>"), Some(2));
    assert_eq!(tokenizer.eog_ids(), [0, 2]);
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(905));
    assert_eq!(tokenizer.token_bytes(905), b" world");
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert!(!tokenizer.add_bos());
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
    assert_eq!(tokenizer.decode(&[19556, 2], true), "Hello");
}

#[test]
fn long_and_pathological_texts_take_linear_time() {
    let llama = Tokenizer::from_vocab(&sentence_piece_vocab()).unwrap();
    let mib = 1 << 20;
    let texts = [
        "a".repeat(mib),
        " ".repeat(mib),
        format!("{}x", " ".repeat(mib)),
        "\n ".repeat(mib / 2),
        "<|im_".repeat(mib / 5),
        "<".repeat(mib),
        "1".repeat(mib),
        "é\u{301}".repeat(mib / 4),
    ];
    for text in &texts {
        for tokenizer in [&*demo_tokenizer(), &llama] {
            let start = Instant::now();
            let ids = tokenizer.encode(text);
            let elapsed = start.elapsed();
            assert!(elapsed < Duration::from_secs(20), "{elapsed:?} for {:?}...", &text[..12]);
            assert_eq!(&tokenizer.decode(&ids, true), text);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn decode_inverts_encode(text in "(\\PC|[ \t\r\n]|<\\|im_end\\|>){0,60}") {
        let tokenizer = demo_tokenizer();
        let ids = tokenizer.encode(&text);
        prop_assert!(ids.iter().all(|&id| !tokenizer.is_special(id)));
        prop_assert_eq!(tokenizer.decode(&ids, true), text);
    }

    #[test]
    fn decode_inverts_encode_of_sentence_pieces(text in "([a-z]|the|hello| |é|東|</s>|<tool>|▁?){0,40}") {
        let tokenizer = Tokenizer::from_vocab(&sentence_piece_vocab()).unwrap();
        let ids = tokenizer.encode(&text);
        prop_assert!(ids.iter().all(|&id| !tokenizer.is_special(id)));
        // U+2581 is how SentencePiece writes a space, so it reads as one.
        prop_assert_eq!(tokenizer.decode(&ids, true), text.replace('▁', " "));
    }
}

#[test]
fn sentence_piece_merges_by_score_leftmost_first() {
    let vocab = sentence_piece_vocab();
    let tokenizer = Tokenizer::from_vocab(&vocab).unwrap();
    let pieces = |text: &str| -> Vec<String> {
        tokenizer.encode(text).iter().map(|&id| vocab.tokens[id as usize].clone()).collect()
    };
    assert_eq!(pieces("the"), ["▁the"]);
    // "ll" outranks "hel", so "hel" and "lo" never come about.
    assert_eq!(pieces("hell"), ["▁", "he", "ll"]);
    assert_eq!(pieces("hello"), ["▁hello"]);
    assert_eq!(pieces("aaaa"), ["▁", "aa", "aa"]);
    assert_eq!(pieces("aaa"), ["▁", "aaa"]);
    assert_eq!(pieces("東"), ["▁", "<0xE6>", "<0x9D>", "<0xB1>"]);
    assert_eq!(pieces("<tool>a</s>"), ["▁", "<tool>", "a", "<", "/", "s", ">"]);
    assert_eq!(tokenizer.encode_with_special("<s>a")[0], 1);
    assert_eq!(tokenizer.encode_continuation("a").len(), 1);
    assert!(tokenizer.add_bos());
}

/// A BPE model that the `sentencepiece` package trained (byte fallback, identity normalisation), and what it encodes.
#[test]
fn sentence_piece_ids_are_equal() {
    let golden: Value = serde_json::from_str(include_str!("fixtures/sentencepiece.json")).unwrap();
    let vocab = GgufVocab {
        model: "llama".into(),
        tokens: serde_json::from_value(golden["tokens"].clone()).unwrap(),
        token_types: serde_json::from_value(golden["types"].clone()).unwrap(),
        scores: serde_json::from_value(golden["scores"].clone()).unwrap(),
        bos: Some(1),
        eos: Some(2),
        unknown: Some(0),
        ..GgufVocab::default()
    };
    let tokenizer = Tokenizer::from_vocab(&vocab).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 53);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, true), text);
    }
}

/// The same small byte-level vocabulary as GGUF and as a Hugging Face folder.
fn byte_level_twins() -> (GgufVocab, Value) {
    let demo = demo_vocab();
    let mut vocab = GgufVocab {
        model: "gpt2".into(),
        pre: Some("llama-bpe".into()),
        merges: demo.merges[..2000].to_vec(),
        ..GgufVocab::default()
    };
    let alphabet = demo.tokens.iter().filter(|t| t.chars().count() == 1).cloned();
    vocab.tokens = alphabet.collect();
    vocab.tokens.extend(vocab.merges.iter().map(|merge| merge.replacen(' ', "", 1)));
    let model_vocab: serde_json::Map<String, Value> =
        vocab.tokens.iter().enumerate().map(|(id, text)| (text.clone(), json!(id))).collect();
    vocab.token_types = vec![1; vocab.tokens.len()];
    let mut added = Vec::new();
    for (text, kind) in [("<|begin|>", 3), ("<|eot_id|>", 3), ("<tool>", 4)] {
        // The file marks <|eot_id|> as plain: it is a control token all the same.
        let is_special = text == "<|begin|>";
        added.push(json!({"id": vocab.tokens.len(), "content": text, "special": is_special, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false}));
        vocab.tokens.push(text.into());
        vocab.token_types.push(kind);
    }
    vocab.bos = Some(vocab.tokens.len() as u32 - 3);
    vocab.eos = Some(vocab.tokens.len() as u32 - 2);
    let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}, byte_level]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [vocab.bos], "tokens": ["<|begin|>"]}}},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": model_vocab, "merges": vocab.merges, "ignore_merges": true,
            "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false}
    });
    (vocab, tokenizer)
}

#[test]
fn gguf_and_hugging_face_forms_of_one_vocabulary_agree() {
    let (vocab, json) = byte_level_twins();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    write("tokenizer.json", json);
    write("tokenizer_config.json", json!({"bos_token": {"content": "<|begin|>"}, "eos_token": "<|eot_id|>"}));
    write("generation_config.json", json!({"eos_token_id": [vocab.eos, 7]}));
    let hf = Tokenizer::from_hf_folder(folder.path()).unwrap();
    let gguf = Tokenizer::from_vocab(&vocab).unwrap();
    for text in ["Hello, world! 12345", "<|eot_id|>x<tool>y", " it'S  tabs\t\r\n\n", "東京 😀", "<|begin|>"] {
        assert_eq!(hf.encode(text), gguf.encode(text), "{text:?}");
        assert_eq!(hf.encode_with_special(text), gguf.encode_with_special(text), "{text:?}");
        assert_eq!(hf.decode(&hf.encode(text), true), text);
        assert!(hf.encode(text).iter().all(|&id| !hf.is_special(id)));
    }
    assert_eq!((hf.bos(), hf.eos(), hf.add_bos()), (gguf.bos(), gguf.eos(), gguf.add_bos()));
    assert_eq!(hf.vocab_size(), gguf.vocab_size());
    assert_eq!(hf.eog_ids(), [7, vocab.eos.unwrap()]);
    let all_bytes =
        |t: &Tokenizer| -> Vec<Vec<u8>> { (0..t.vocab_size() as u32).map(|id| t.token_bytes(id).to_vec()).collect() };
    assert_eq!(all_bytes(&hf), all_bytes(&gguf));
}

#[test]
fn hugging_face_llama_keeps_its_space_rules() {
    let pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a"];
    let vocab: serde_json::Map<String, Value> =
        pieces.iter().enumerate().map(|(id, text)| ((*text).to_owned(), json!(id))).collect();
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": id == 2})
    };
    let with = |normalizer: Value, pre_tokenizer: Value| {
        json!({"version": "1.0", "truncation": null, "padding": null, "post_processor": null,
            "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "vocab": vocab, "merges": ["▁ a"], "unk_token": "<unk>", "fuse_unk": true,
                "byte_fallback": false, "dropout": null, "continuing_subword_prefix": null, "end_of_word_suffix": null}})
    };
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let legacy =
        with(json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}), Value::Null);
    let first =
        with(Value::Null, json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}));
    let load = |json: &Value| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_hf_folder(folder.path()).unwrap()
    };
    let (legacy, first) = (load(&legacy), load(&first));
    assert_eq!(legacy.encode_with_special("<s>a b"), [1, 6, 3, 5]);
    assert_eq!(first.encode_with_special("<s>a b"), [1, 4, 3, 5]);
    assert_eq!(first.encode_with_special("a</s>  b"), [6, 2, 5], "</s> takes the space behind it");
    for tokenizer in [&legacy, &first] {
        assert_eq!(tokenizer.encode("a b"), [6, 3, 5]);
        assert_eq!(tokenizer.encode_continuation("a"), [4]);
        assert_eq!(tokenizer.decode(&[6, 3, 5], true), "a b");
    }
}

#[test]
fn bad_vocabularies_are_clear_errors() {
    let refused = |change: &dyn Fn(&mut GgufVocab)| {
        let mut vocab = sentence_piece_vocab();
        change(&mut vocab);
        Tokenizer::from_vocab(&vocab).err().expect("refused").to_string()
    };
    assert!(refused(&|v| v.model = "bert".into()).contains("\"bert\""));
    assert!(refused(&|v| v.bos = Some(9999)).contains("bos_token_id = 9999"));
    assert!(refused(&|v| v.token_types.truncate(3)).contains("3 entries"));
    assert!(refused(&|v| v.token_types[0] = 77).contains("77"));
    assert!(refused(&|v| v.scores.clear()).contains("scores is missing"));
    assert!(refused(&|v| v.tokens.clear()).contains("tokens is empty"));
    assert!(refused(&|v| v.tokens[4] = "<0xZZ>".into()).contains("byte token"));
    let bpe = |v: &mut GgufVocab| v.model = "gpt2".into();
    assert!(refused(&|v| {
        bpe(v);
        v.pre = Some("nonesuch".into())
    })
    .contains("\"nonesuch\""));
    assert!(refused(&|v| {
        bpe(v);
        v.merges = vec!["ab".into()]
    })
    .contains("no space"));
    assert!(refused(&|v| {
        bpe(v);
        v.merges = vec!["zz yy".into()]
    })
    .contains("zz"));
    assert!(Tokenizer::from_hf_folder(std::path::Path::new("nowhere")).is_err());
}

#[test]
fn fingerprints_change_with_what_matters() {
    let base = sentence_piece_vocab();
    let fingerprint = |change: &dyn Fn(&mut GgufVocab)| {
        let mut vocab = base.clone();
        change(&mut vocab);
        Tokenizer::from_vocab(&vocab).unwrap().fingerprint()
    };
    let original = fingerprint(&|_| {});
    assert_eq!(original, fingerprint(&|_| {}));
    assert_ne!(original, fingerprint(&|v| v.tokens.swap(300, 301)));
    assert_ne!(original, fingerprint(&|v| v.scores[300] -= 0.5));
    assert_ne!(original, fingerprint(&|v| v.token_types[300] = 5));
    assert_ne!(original, fingerprint(&|v| v.add_bos = Some(false)));
    assert_ne!(original, fingerprint(&|v| v.eot = Some(2)));
}

#[test]
fn the_dummy_has_text_for_every_id() {
    let tokenizer = Tokenizer::dummy(1000);
    assert_eq!(tokenizer.vocab_size(), 1000);
    assert_eq!(tokenizer.decode(&tokenizer.encode("héllo"), true), "héllo");
    assert_eq!(tokenizer.decode(&[999], true), " t999");
    assert!(tokenizer.eog_ids().is_empty());
}
