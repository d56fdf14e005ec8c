//! A random model small enough to compute by hand, written in every format.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use keepsake_kernels::{DType, Device};
use keepsake_model::weights::{LayerTensor, TensorName};
use keepsake_model::{load, Model, ModelSource};
use rand::rngs::StdRng;
use rand::SeedableRng;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use tempfile::{tempdir, NamedTempFile};

use super::blocks;
use super::gguf_writer::{GgufWriter, Item};

pub struct TinyShape {
    pub vocab_size: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub max_context: usize,
}

/// Rows of whole blocks for every type (K-quants need 256).
pub const SHAPE: TinyShape = TinyShape {
    vocab_size: 320,
    hidden: 256,
    ffn: 512,
    num_layers: 2,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 64,
    max_context: 512,
};

pub const THETA: f64 = 10_000.0;

pub struct Stored {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Values for the reference, bytes for the files; Q and K in Hugging Face's order.
pub struct TinyModel {
    pub shape: TinyShape,
    pub embedding: Vec<f32>,
    pub output: Option<Vec<f32>>,
    pub output_norm: Vec<f32>,
    pub layers: Vec<TinyLayer>,
    pub inverse_frequencies: Vec<f64>,
    pub rope_amplitude: f64,
    pub stored: BTreeMap<TensorName, Stored>,
    /// `rope_scaling` of `config.json`.
    pub rope_scaling: serde_json::Value,
}

pub struct TinyLayer {
    pub attention_norm: Vec<f32>,
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
    pub attention_output: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub down: Vec<f32>,
}

struct Generator {
    rng: StdRng,
    dtype: DType,
    stored: BTreeMap<TensorName, Stored>,
}

impl Generator {
    fn matrix(&mut self, name: TensorName, rows: usize, width: usize) -> Vec<f32> {
        let deviation = match name {
            // Larger, so that logits differ clearly.
            TensorName::TokenEmbedding => 1.0,
            _ => 1.0 / (width as f32).sqrt(),
        };
        let bytes = blocks::random(&mut self.rng, self.dtype, rows * width, deviation);
        self.keep(name, self.dtype, vec![rows, width], bytes)
    }

    fn norm(&mut self, name: TensorName, width: usize) -> Vec<f32> {
        let spread = blocks::random(&mut self.rng, DType::F32, width, 0.2);
        let values = blocks::values(DType::F32, &spread);
        let bytes = values.iter().flat_map(|value| (1.0 + value).to_le_bytes());
        let bytes = bytes.collect();
        self.keep(name, DType::F32, vec![width], bytes)
    }

    fn keep(&mut self, name: TensorName, dtype: DType, shape: Vec<usize>, bytes: Vec<u8>) -> Vec<f32> {
        let values = blocks::values(dtype, &bytes);
        let stored = Stored { dtype, shape, bytes };
        self.stored.insert(name, stored);
        values
    }
}

impl TinyModel {
    pub fn new(seed: u64, dtype: DType, tied: bool) -> Self {
        let shape = SHAPE;
        let mut generator = Generator { rng: StdRng::seed_from_u64(seed), dtype, stored: BTreeMap::new() };
        let (hidden, ffn) = (shape.hidden, shape.ffn);
        let kv_dim = shape.num_kv_heads * shape.head_dim;
        let query_dim = shape.num_heads * shape.head_dim;
        let embedding = generator.matrix(TensorName::TokenEmbedding, shape.vocab_size, hidden);
        let output = (!tied).then(|| generator.matrix(TensorName::Output, shape.vocab_size, hidden));
        let output_norm = generator.norm(TensorName::OutputNorm, hidden);
        let layers = (0..shape.num_layers)
            .map(|layer| {
                let name = |tensor| TensorName::Layer(layer, tensor);
                TinyLayer {
                    attention_norm: generator.norm(name(LayerTensor::AttentionNorm), hidden),
                    query: generator.matrix(name(LayerTensor::Query), query_dim, hidden),
                    key: generator.matrix(name(LayerTensor::Key), kv_dim, hidden),
                    value: generator.matrix(name(LayerTensor::Value), kv_dim, hidden),
                    attention_output: generator.matrix(name(LayerTensor::AttentionOutput), hidden, query_dim),
                    ffn_norm: generator.norm(name(LayerTensor::FfnNorm), hidden),
                    gate: generator.matrix(name(LayerTensor::Gate), ffn, hidden),
                    up: generator.matrix(name(LayerTensor::Up), ffn, hidden),
                    down: generator.matrix(name(LayerTensor::Down), hidden, ffn),
                }
            })
            .collect();
        let half = shape.head_dim / 2;
        Self {
            inverse_frequencies: (0..half).map(|i| THETA.powf(-(i as f64) / half as f64)).collect(),
            rope_amplitude: 1.0,
            shape,
            embedding,
            output,
            output_norm,
            layers,
            stored: generator.stored,
            rope_scaling: serde_json::Value::Null,
        }
    }

    /// A GGUF file, before `bytes()`, so that tests can add to it.
    pub fn gguf(&self) -> GgufWriter {
        let mut writer = GgufWriter::default();
        let shape = &self.shape;
        writer
            .text("general.architecture", "llama")
            .number("llama.context_length", shape.max_context)
            .number("llama.embedding_length", shape.hidden)
            .number("llama.block_count", shape.num_layers)
            .number("llama.feed_forward_length", shape.ffn)
            .number("llama.attention.head_count", shape.num_heads)
            .number("llama.attention.head_count_kv", shape.num_kv_heads)
            .item("llama.attention.layer_norm_rms_epsilon", Item::F32(1e-5))
            .item("llama.rope.freq_base", Item::F32(THETA as f32));
        add_tokenizer(&mut writer, shape.vocab_size);
        for (name, stored) in &self.stored {
            let bytes = match name {
                TensorName::Layer(_, LayerTensor::Query | LayerTensor::Key) => neighbours(stored, shape.head_dim),
                _ => stored.bytes.clone(),
            };
            writer.tensor(&name.gguf(), stored.dtype, &stored.shape, bytes);
        }
        writer
    }

    pub fn load_gguf(&self, device: &Device) -> Arc<Model> {
        load_bytes(&self.gguf().bytes(), device)
    }

    pub fn load_folder(&self, num_shards: usize, device: &Device) -> Arc<Model> {
        let folder = tempdir().unwrap();
        self.write_folder(folder.path(), num_shards);
        let source = ModelSource::detect(folder.path()).unwrap();
        Arc::new(load(&source, device).unwrap())
    }

    /// A folder as `save_pretrained` writes it; more than one shard comes with an index.
    pub fn write_folder(&self, folder: &Path, num_shards: usize) {
        let shape = &self.shape;
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_context,
            "rms_norm_eps": 1e-5,
            "rope_theta": THETA,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.output.is_none(),
        });
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        write_tokenizer_json(folder, shape.vocab_size);

        let tensors: Vec<(String, &Stored)> =
            self.stored.iter().map(|(name, stored)| (name.hugging_face(), stored)).collect();
        let mut weight_map = serde_json::Map::new();
        for shard in 0..num_shards {
            let file_name = match num_shards {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{num_shards:05}.safetensors", shard + 1),
            };
            let members = tensors.iter().skip(shard).step_by(num_shards);
            let views: Vec<(String, TensorView)> = members
                .map(|(name, stored)| {
                    weight_map.insert(name.clone(), json!(file_name));
                    let dtype = match stored.dtype {
                        DType::F32 => Dtype::F32,
                        DType::F16 => Dtype::F16,
                        DType::BF16 => Dtype::BF16,
                        other => panic!("safetensors has no {other:?}"),
                    };
                    let view = TensorView::new(dtype, stored.shape.clone(), &stored.bytes);
                    (name.clone(), view.unwrap())
                })
                .collect();
            safetensors::serialize_to_file(views, None, &folder.join(file_name)).unwrap();
        }
        if num_shards > 1 {
            let index = json!({ "metadata": {}, "weight_map": weight_map });
            fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
    }
}

pub fn load_bytes(gguf: &[u8], device: &Device) -> Arc<Model> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(gguf).unwrap();
    let source = ModelSource::detect(file.path()).unwrap();
    Arc::new(load(&source, device).unwrap())
}

/// llama.cpp's `permute`: channel (half s, index j) of a head becomes channel 2 j + s.
fn neighbours(stored: &Stored, head_dim: usize) -> Vec<u8> {
    let row_bytes = stored.bytes.len() / stored.shape[0];
    let mut out = vec![0; stored.bytes.len()];
    for (row, bytes) in stored.bytes.chunks_exact(row_bytes).enumerate() {
        let (head, channel) = (row / head_dim, row % head_dim);
        let (s, j) = (channel / (head_dim / 2), channel % (head_dim / 2));
        let to = (head * head_dim + 2 * j + s) * row_bytes;
        out[to..to + row_bytes].copy_from_slice(bytes);
    }
    out
}

/// Byte tokens, then named ones, the last an end of text.
fn vocabulary(vocab_size: usize) -> Vec<String> {
    let mut next_odd = 256;
    let mut tokens: Vec<String> = (0..=255u8)
        .map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable {
                u32::from(byte)
            } else {
                next_odd += 1;
                next_odd - 1
            };
            char::from_u32(code).unwrap().to_string()
        })
        .collect();
    tokens.extend((256..vocab_size - 1).map(|id| format!("<unused{id}>")));
    tokens.push("<|endoftext|>".to_owned());
    tokens
}

fn add_tokenizer(writer: &mut GgufWriter, vocab_size: usize) {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    let mut kinds = vec![NORMAL; vocab_size];
    kinds[256..].fill(CONTROL);
    writer
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "default")
        .item("tokenizer.ggml.tokens", Item::Texts(vocabulary(vocab_size)))
        .item("tokenizer.ggml.token_type", Item::I32s(kinds))
        .item("tokenizer.ggml.merges", Item::Texts(Vec::new()))
        .number("tokenizer.ggml.bos_token_id", vocab_size - 1)
        .number("tokenizer.ggml.eos_token_id", vocab_size - 1);
}

fn write_tokenizer_json(folder: &Path, vocab_size: usize) {
    let tokens = vocabulary(vocab_size);
    let vocab: serde_json::Map<String, serde_json::Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let added: Vec<serde_json::Value> = (256..vocab_size)
        .map(|id| {
            json!({
                "id": id, "content": tokens[id], "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({ "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>" });
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}
