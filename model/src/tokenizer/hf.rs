//! A tokenizer from a Hugging Face model folder.
//!
//! Reads `tokenizer.json` (required), `tokenizer_config.json`, `generation_config.json` and `config.json`.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use serde_json::Value;

use super::pieces::{PieceDecoder, PieceSpelling, Pieces};
use super::special::{ends_generation, looks_special};
use super::{CrateEngine, Engine, SpacePrefix, Strip, Tokenizer, TokenizerError, TokenizerParts};

/// Tables are sized by the largest id; the largest vocabularies have a quarter of a million tokens.
const MAX_VOCAB: u32 = 1 << 22;

impl Tokenizer {
    /// Builds the tokenizer of a model folder.
    pub fn from_hf_folder(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let mut json = read_json(&path)?
            .ok_or_else(|| TokenizerError::Io { path: path.clone(), source: std::io::ErrorKind::NotFound.into() })?;
        mark_special(&mut json);
        let pipeline = parse(&json)?;
        let configs = Configs::read(folder)?;
        let bos = configs.token_id("bos", &pipeline);
        let eos = configs.token_id("eos", &pipeline);
        let added = AddedTokens::read(&json)?;
        let eog = end_of_generation(&configs, eos, &added);
        let add_bos = adds_bos(&configs, &pipeline, bos)?;
        let fingerprint = fingerprint(&json, bos, &eog, add_bos);
        let (pieces, special) = decode_pieces(&json, &pipeline, &added)?;
        let space = space_prefix(&json)?;
        Ok(Tokenizer::assemble(TokenizerParts {
            engine: Engine::Crate(Box::new(CrateEngine::new(pipeline, space))),
            pieces,
            special,
            special_texts: added.special,
            strips: added.strips,
            bos,
            eos,
            eog,
            add_bos,
            fingerprint,
        }))
    }
}

fn parse(json: &Value) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let kind = json.pointer("/model/type").and_then(Value::as_str).unwrap_or("BPE");
    if !matches!(kind, "BPE" | "Unigram") {
        let message = format!("tokenizer.json: model type {kind:?}, BPE and Unigram are supported");
        return Err(TokenizerError::BadVocabulary(message));
    }
    let bytes = serde_json::to_vec(json).expect("a JSON value serialises");
    let pipeline = tokenizers::Tokenizer::from_bytes(bytes).map_err(TokenizerError::Library)?;
    pipeline.encode_fast("\u{10FFFF}", false).map_err(TokenizerError::Library)?;
    Ok(pipeline)
}

/// Sets `special` on added tokens that are special in all but name, before the pipeline is built from the value.
fn mark_special(json: &mut Value) {
    let Some(added) = json.get_mut("added_tokens").and_then(Value::as_array_mut) else {
        return;
    };
    for token in added {
        if token.get("content").and_then(Value::as_str).is_some_and(looks_special) {
            token["special"] = Value::Bool(true);
        }
    }
}

struct AddedTokens {
    special: Vec<(String, u32)>,
    plain: Vec<(String, u32)>,
    strips: HashMap<u32, Strip>,
}

impl AddedTokens {
    fn read(json: &Value) -> Result<Self, TokenizerError> {
        let mut tokens = Self { special: Vec::new(), plain: Vec::new(), strips: HashMap::new() };
        for token in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            let content = token.get("content").and_then(Value::as_str);
            let id = token.get("id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
            let (Some(content), Some(id)) = (content, id) else {
                let message = format!("tokenizer.json: added token {token} without content or id");
                return Err(TokenizerError::BadVocabulary(message));
            };
            let flag = |key: &str| token.get(key).and_then(Value::as_bool).unwrap_or(false);
            if !flag("special") {
                tokens.plain.push((content.to_owned(), id));
                continue;
            }
            tokens.special.push((content.to_owned(), id));
            let strip = Strip { left: flag("lstrip"), right: flag("rstrip") };
            if strip.left || strip.right {
                tokens.strips.insert(id, strip);
            }
        }
        Ok(tokens)
    }
}

struct Configs {
    tokenizer: Value,
    generation: Value,
    model: Value,
}

impl Configs {
    fn read(folder: &Path) -> Result<Self, TokenizerError> {
        let optional = |name: &str| Ok(read_json(&folder.join(name))?.unwrap_or(Value::Null));
        Ok(Self {
            tokenizer: optional("tokenizer_config.json")?,
            generation: optional("generation_config.json")?,
            model: optional("config.json")?,
        })
    }

    /// `bos` or `eos`: by spelling in `tokenizer_config.json`, else by id in the other files.
    fn token_id(&self, name: &str, pipeline: &tokenizers::Tokenizer) -> Option<u32> {
        let token = self.tokenizer.get(format!("{name}_token"));
        let spelling = token.and_then(|t| t.as_str().or_else(|| t.get("content")?.as_str()));
        if let Some(id) = spelling.and_then(|text| pipeline.token_to_id(text)) {
            return Some(id);
        }
        self.listed_ids(name).first().copied()
    }

    /// `eos_token_id` is one id or a list of them.
    fn listed_ids(&self, name: &str) -> Vec<u32> {
        let key = format!("{name}_token_id");
        let values = [&self.generation, &self.model].into_iter().filter_map(|c| c.get(&key));
        values
            .flat_map(|value| match value {
                Value::Array(list) => list.clone(),
                one => vec![one.clone()],
            })
            .filter_map(|id| u32::try_from(id.as_u64()?).ok())
            .collect()
    }
}

fn end_of_generation(configs: &Configs, eos: Option<u32>, added: &AddedTokens) -> Vec<u32> {
    let by_text = added.special.iter().filter(|(text, _)| ends_generation(text)).map(|(_, id)| *id);
    let ids: BTreeSet<u32> = configs.listed_ids("eos").into_iter().chain(eos).chain(by_text).collect();
    ids.into_iter().collect()
}

/// The post-processor of `tokenizer.json` says it best: whether it puts BOS before an empty text.
fn adds_bos(configs: &Configs, pipeline: &tokenizers::Tokenizer, bos: Option<u32>) -> Result<bool, TokenizerError> {
    let Some(bos) = bos else {
        return Ok(false);
    };
    let encoding = pipeline.encode_fast("", true).map_err(TokenizerError::Library)?;
    let by_pipeline = encoding.get_ids().first() == Some(&bos);
    let by_config = configs.tokenizer.get("add_bos_token").and_then(Value::as_bool);
    Ok(by_pipeline || by_config.unwrap_or(false))
}

fn decode_pieces(
    json: &Value,
    pipeline: &tokenizers::Tokenizer,
    added: &AddedTokens,
) -> Result<(Pieces, Vec<bool>), TokenizerError> {
    let is_byte_level = ["decoder", "pre_tokenizer"]
        .iter()
        .any(|part| json.get(part).is_some_and(|value| has_type(value, "ByteLevel")));
    let spelling = if is_byte_level { PieceSpelling::ByteLevel } else { PieceSpelling::SentencePiece };
    let mut texts: Vec<Option<Vec<u8>>> = Vec::new();
    let mut place = |id: u32, bytes: Vec<u8>| {
        if id >= MAX_VOCAB {
            let message = format!("tokenizer.json: token id {id}, ids below {MAX_VOCAB} are supported");
            return Err(TokenizerError::BadVocabulary(message));
        }
        let id = id as usize;
        if texts.len() <= id {
            texts.resize(id + 1, None);
        }
        texts[id] = Some(bytes);
        Ok(())
    };
    let decoder = PieceDecoder::new(spelling);
    for (text, id) in pipeline.get_vocab(false) {
        place(id, decoder.decode(&text))?;
    }
    for (text, id) in added.special.iter().chain(&added.plain) {
        place(*id, text.as_bytes().to_vec())?;
    }
    let mut special = vec![false; texts.len()];
    added.special.iter().for_each(|(_, id)| special[*id as usize] = true);
    let mut pieces = Pieces::default();
    texts.iter().for_each(|bytes| pieces.push(bytes.as_deref().unwrap_or(&[])));
    Ok((pieces, special))
}

/// The pipeline without its space prefix, if it has one: a `Prepend` normaliser or a `Metaspace` pre-tokeniser.
fn space_prefix(json: &Value) -> Result<Option<SpacePrefix>, TokenizerError> {
    let mut bare = json.clone();
    let mut found = Prefix::default();
    for part in ["normalizer", "pre_tokenizer"] {
        if let Some(value) = bare.get_mut(part) {
            remove_prefix(value, &mut found);
        }
    }
    if !found.any {
        return Ok(None);
    }
    Ok(Some(SpacePrefix { bare: parse(&bare)?, after_special: found.after_special }))
}

#[derive(Default)]
struct Prefix {
    any: bool,
    after_special: bool,
}

fn remove_prefix(value: &mut Value, found: &mut Prefix) {
    for list in ["normalizers", "pretokenizers"] {
        for inner in value.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            remove_prefix(inner, found);
        }
    }
    match value.get("type").and_then(Value::as_str) {
        Some("Prepend") => {
            *found = Prefix { any: true, after_special: true };
            *value = serde_json::json!({"type": "Sequence", "normalizers": []});
        }
        Some("Metaspace") => {
            let scheme = value.get("prepend_scheme").and_then(Value::as_str).unwrap_or("always");
            if scheme != "never" {
                found.any = true;
                found.after_special |= scheme == "always";
                value["prepend_scheme"] = Value::from("never");
                // The old spelling of the same setting, refused beside "never" when true.
                if value.get("add_prefix_space").is_some() {
                    value["add_prefix_space"] = Value::Bool(false);
                }
            }
        }
        _ => {}
    }
}

fn has_type(value: &Value, name: &str) -> bool {
    let is_type = value.get("type").and_then(Value::as_str) == Some(name);
    let inner = ["decoders", "pretokenizers"].iter().filter_map(|list| value.get(list)?.as_array());
    is_type || inner.flatten().any(|part| has_type(part, name))
}

fn fingerprint(json: &Value, bos: Option<u32>, eog: &[u32], add_bos: bool) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("keepsake tokenizer hf 1");
    hasher.update(format!("{bos:?} {eog:?} {add_bos} ").as_bytes());
    hasher.update(&serde_json::to_vec(json).expect("a JSON value serialises"));
    *hasher.finalize().as_bytes()
}

/// `None` when there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(TokenizerError::Io { path: path.to_owned(), source }),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|source| TokenizerError::Json { path: path.to_owned(), source })
}
