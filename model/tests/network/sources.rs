//! Where models are looked for, what is refused, and what identifies them.

use std::fs;
use std::path::Path;

use keepsake_kernels::{BlockId, DType, Device, DeviceKind, KvPool};
use keepsake_model::{load, Model, ModelSource, Runner};
use serde_json::Value;
use std::sync::Arc;
use tempfile::tempdir;

use crate::support::driver::{self, blocks_from, Driver, Sequence, CHUNK_TOKENS};
use crate::support::gguf_writer::Item;
use crate::support::tiny::{load_bytes, TinyModel, SHAPE};

fn device() -> Device {
    Device::open(DeviceKind::Cpu, 1).unwrap()
}

fn one_line(result: Result<impl Sized, keepsake_model::ModelError>) -> String {
    let message = match result {
        Ok(_) => panic!("it was accepted"),
        Err(error) => error.to_string(),
    };
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

fn refusal(path: &Path) -> String {
    one_line(ModelSource::detect(path).and_then(|source| load(&source, &device())))
}

#[test]
fn paths_that_are_no_models() {
    let folder = tempdir().unwrap();
    let message = refusal(&folder.path().join("absent.gguf"));
    assert!(message.contains("absent.gguf: no such file"), "{message}");
    assert!(refusal(folder.path()).contains("no config.json"));
    let text = folder.path().join("notes.gguf");
    fs::write(&text, "hello").unwrap();
    assert!(refusal(&text).contains("neither a GGUF file (it starts with \"hell\")"));
}

#[test]
fn folders_that_lack_something() {
    let tiny = TinyModel::new(1, DType::F32, true);
    let folder = tempdir().unwrap();
    let root = folder.path();
    tiny.write_folder(root, 3);
    load(&ModelSource::detect(root).unwrap(), &device()).unwrap();

    let shard = root.join("model-00002-of-00003.safetensors");
    let whole = fs::read(&shard).unwrap();
    for len in [0, 7, 100, whole.len() - 1] {
        fs::write(&shard, &whole[..len]).unwrap();
        let message = refusal(root);
        assert!(message.contains("model-00002-of-00003.safetensors: header"), "{message}");
    }
    fs::remove_file(&shard).unwrap();
    assert!(refusal(root).contains("model-00002-of-00003.safetensors"));
    fs::write(&shard, &whole).unwrap();

    let index = root.join("model.safetensors.index.json");
    let sound = fs::read_to_string(&index).unwrap();
    let edited = sound.replacen("model-00001-of-00003", "../model-00001-of-00003", 1);
    fs::write(&index, edited).unwrap();
    assert!(refusal(root).contains("is not a file name"));
    let edited = sound.replacen("00001-of", "00002-of", 1);
    fs::write(&index, edited).unwrap();
    assert!(refusal(root).contains("the index names it, the file lacks it"));
    fs::write(&index, "{").unwrap();
    assert!(refusal(root).contains("model.safetensors.index.json: json"));
    fs::remove_file(&index).unwrap();
    assert!(refusal(root).contains("neither model.safetensors nor"));
}

#[test]
fn unsupported_configs_are_named() {
    let tiny = TinyModel::new(1, DType::F32, true);
    let folder = tempdir().unwrap();
    tiny.write_folder(folder.path(), 1);
    let path = folder.path().join("config.json");
    let sound: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let cases = [
        ("architectures", r#"["GPT2LMHeadModel"]"#, "LlamaForCausalLM, MistralForCausalLM"),
        ("architectures", "[]", "0 classes"),
        ("hidden_act", r#""gelu""#, "`gelu`"),
        ("attention_bias", "true", "attention_bias"),
        ("rope_scaling", r#"{"type": "dynamic", "factor": 2}"#, "`dynamic`"),
        ("rope_scaling", r#"{"type": "linear"}"#, "`rope_scaling.factor`: missing"),
        ("rope_scaling", r#"{"type": "linear", "factor": -1}"#, "-1"),
        ("quantization_config", r#"{"quant_method": "gptq"}"#, "`gptq`"),
        ("num_key_value_heads", "3", "does not divide"),
        ("num_key_value_heads", "0", "num_kv_heads 0"),
        ("num_attention_heads", "0", "num_heads 0"),
        ("num_hidden_layers", "4000000000", "num_layers 4000000000"),
        ("num_hidden_layers", "3", "`model.layers.2."),
        ("num_hidden_layers", "-1", "json"),
        ("hidden_size", "18446744073709551615", "hidden"),
        ("vocab_size", "321", "tensor `model.embed_tokens.weight` is [320, 256]"),
        ("tie_word_embeddings", "false", "tensor `lm_head.weight` is missing"),
        ("rms_norm_eps", "0", "rms_eps"),
        ("rope_theta", "1", "rope_theta"),
        ("head_dim", "63", "odd"),
    ];
    for (field, value, reason) in cases {
        let mut config = sound.clone();
        config[field] = serde_json::from_str(value).unwrap();
        fs::write(&path, config.to_string()).unwrap();
        let message = refusal(folder.path());
        assert!(message.contains(reason), "{field} = {value}: {message}");
    }
}

#[test]
fn unsupported_gguf_settings_are_named() {
    let tiny = TinyModel::new(1, DType::Q8_0, false);
    let refuse = |writer: &crate::support::gguf_writer::GgufWriter| {
        let folder = tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        fs::write(&path, writer.bytes()).unwrap();
        refusal(&path)
    };
    let with = |key: &str, item: Item| {
        let mut writer = tiny.gguf();
        writer.item(key, item);
        refuse(&writer)
    };
    assert!(with("llama.expert_count", Item::U32(8)).contains("expert_count `8`"));
    assert!(with("llama.rope.dimension_count", Item::U32(32)).contains("rope.dimension_count"));
    assert!(with("llama.rope.scaling.type", Item::Text("longrope".into())).contains("`longrope`"));
    assert!(with("llama.rope.scaling.type", Item::U32(1)).contains("is an integer, not a string"));
    assert!(with("split.count", Item::U32(2)).contains("split.count"));

    let mut writer = crate::support::gguf_writer::GgufWriter::default();
    assert!(refuse(&writer).contains("metadata key `general.architecture`: missing"));
    writer.text("general.architecture", "mamba");
    let message = refuse(&writer);
    assert!(message.contains("architecture `mamba` is not supported (supported: llama, qwen2, qwen3)"), "{message}");
}

#[test]
fn kv_heads_may_be_listed_by_layer() {
    let tiny = TinyModel::new(1, DType::Q8_0, true);
    let sound = tiny.gguf().bytes();
    let key = "llama.attention.head_count_kv";
    for (counts, accepted) in [(vec![2, 2], true), (vec![2, 1], false), (vec![-2, -2], false)] {
        let mut writer = tiny.gguf();
        writer.replace(key, Item::I32s(counts));
        assert_ne!(writer.bytes(), sound);
        let folder = tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        fs::write(&path, writer.bytes()).unwrap();
        match accepted {
            true => drop(load(&ModelSource::detect(&path).unwrap(), &device()).unwrap()),
            false => assert!(refusal(&path).contains("attention.head_count_kv")),
        }
    }
}

#[test]
fn dummies_are_seeded_and_listed() {
    let device = device();
    let tiny = |name: &str| load(&ModelSource::Dummy(name.to_owned()), &device).unwrap();
    let (first, again, bf16) = (tiny("tiny"), tiny("tiny"), tiny("tiny:bf16"));
    assert_eq!(first.fingerprint(), again.fingerprint());
    assert_ne!(first.fingerprint(), bf16.fingerprint());
    assert!(first.weight_bytes() < bf16.weight_bytes());
    let tokens: Vec<u32> = (0..50).collect();
    let logits = |model: Model| {
        let sequence = Sequence { blocks: blocks_from(0, tokens.len()), tokens: tokens.clone() };
        Driver::new(&Arc::new(model), &device, 2, 50).prefill(&sequence)
    };
    let (first, again) = (logits(first), logits(again));
    assert!(first == again);
    assert!(first.iter().flatten().all(|value| value.is_finite()));
    let message = one_line(load(&ModelSource::Dummy("huge".to_owned()), &device));
    assert!(message.contains("smollm2-135m, llama3-8b, llama2-13b"), "{message}");
}

#[test]
fn fingerprints_follow_content_not_names() {
    let device = device();
    let tiny = TinyModel::new(1, DType::Q4_1, true);
    let print = |model: Arc<Model>| model.fingerprint();
    let sound = print(tiny.load_gguf(&device));
    assert_eq!(sound, print(tiny.load_gguf(&device)), "another file, the same content");
    assert_ne!(sound, print(TinyModel::new(2, DType::Q4_1, true).load_gguf(&device)));

    let mut writer = tiny.gguf();
    writer.replace("llama.rope.freq_base", Item::F32(20_000.0));
    assert_ne!(sound, print(load_bytes(&writer.bytes(), &device)));
    let mut writer = tiny.gguf();
    writer.replace("llama.context_length", Item::U32(256));
    assert_eq!(sound, print(load_bytes(&writer.bytes(), &device)), "the context is a limit");
    // One bit of the last tensor's last byte (a norm or a matrix, whichever it is).
    let mut bytes = tiny.gguf().bytes();
    *bytes.last_mut().unwrap() ^= 1;
    assert_ne!(sound, print(load_bytes(&bytes, &device)));
}

#[test]
fn unsound_batches_are_refused() {
    let device = device();
    let model = TinyModel::new(1, DType::Q8_0, true).load_gguf(&device);
    let sequence = Sequence { tokens: vec![5; 40], blocks: blocks_from(0, 40) };
    let pool = Arc::new(KvPool::new(&device, model.kv_layout(CHUNK_TOKENS), 4).unwrap());
    let mut runner = Runner::new(model.clone(), device.clone(), pool, 64).unwrap();
    let sound = driver::batch(&[(&sequence, 0..20), (&sequence, 20..40)]);
    assert_eq!(runner.forward(&sound).unwrap().num_rows(), 0);

    type Edit = fn(&mut keepsake_model::Batch);
    let cases: [(Edit, &str); 16] = [
        (|b| b.tokens[3] = SHAPE.vocab_size as u32, "token 320"),
        (|b| b.positions[3] = 4, "row 3"),
        (|b| b.slots[3] += 1, "row 3"),
        (|b| b.slots.truncate(39), "39 slots"),
        (|b| b.positions.truncate(39), "39 positions"),
        (|b| b.entries.truncate(1), "cover 20 of 40"),
        (|b| b.entries[1].first_row = 19, "row 20 is next"),
        (|b| b.entries[1].num_rows = 21, "ends at row 41"),
        (|b| b.entries[1].first_block = 3, "leave the block table"),
        (|b| b.entries[1].num_blocks = u32::MAX, "leave the block table"),
        (|b| b.entries[1].num_blocks = 1, "1 blocks do not hold 40"),
        (|b| b.entries[1].first_position = u32::MAX, "past the context"),
        (|b| b.block_table[1] = BlockId(4), "block 4"),
        (|b| b.sample_rows = vec![40], "sample_rows"),
        (|b| b.sample_rows = vec![2, 1], "sample_rows"),
        (|b| *b = Default::default(), "0 rows"),
    ];
    for (edit, reason) in cases {
        let mut batch = sound.clone();
        edit(&mut batch);
        let message = one_line(runner.forward(&batch));
        assert!(message.contains(reason), "{message}");
    }
    let twice = driver::batch(&[(&sequence, 0..20), (&sequence, 10..30)]);
    assert!(one_line(runner.forward(&twice)).contains("two rows write slot 10"));
    let many = driver::batch(&[(&sequence, 0..40), (&sequence, 0..40)]);
    assert!(one_line(runner.forward(&many)).contains("80 rows"));
    // And it still works.
    runner.forward(&sound).unwrap();
}
