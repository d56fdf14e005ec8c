//! A Hugging Face model folder: `config.json` and one or more safetensors files.
//!
//! The `safetensors` crate checks a file's header (sizes, overlaps, overflow); this module checks
//! the index and keeps the maps.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use keepsake_kernels::DType;
use memmap2::Mmap;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::{Tensor, TensorName, WeightSource};
use crate::config::HParams;
use crate::error::ModelError;

pub const CONFIG_FILE: &str = "config.json";
const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The length field before a safetensors header.
const LENGTH_BYTES: usize = 8;

/// Weights of a folder; tensor bytes stay in the maps until they are asked for.
pub struct SafetensorsFolder {
    hparams: HParams,
    shards: Vec<Shard>,
    /// Tensor name to index into `shards`.
    shard_of: BTreeMap<String, usize>,
}

struct Shard {
    path: PathBuf,
    map: Mmap,
    metadata: Metadata,
    data_start: usize,
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: BTreeMap<String, String>,
}

impl SafetensorsFolder {
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config_path = folder.join(CONFIG_FILE);
        let hparams = HParams::from_config_json(&config_path, &read_text(&config_path)?)?;
        let index_path = folder.join(INDEX_FILE);
        let single_path = folder.join(SINGLE_FILE);
        let (shards, shard_of) = if index_path.exists() {
            open_sharded(folder, &index_path)?
        } else if single_path.exists() {
            let shard = Shard::open(single_path)?;
            let names = shard.metadata.tensors().into_keys();
            let shard_of = names.map(|name| (name, 0)).collect();
            (vec![shard], shard_of)
        } else {
            return Err(ModelError::NotAModel {
                path: folder.to_owned(),
                reason: format!("neither {SINGLE_FILE} nor {INDEX_FILE} is in the folder"),
            });
        };
        Ok(Self { hparams, shards, shard_of })
    }

    pub fn hparams(&self) -> &HParams {
        &self.hparams
    }

    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.shard_of.keys().map(String::as_str)
    }
}

impl WeightSource for SafetensorsFolder {
    fn tensor(&self, name: TensorName) -> Result<Option<Tensor<'_>>, ModelError> {
        let name = self.display_name(name);
        match self.shard_of.get(&name) {
            Some(&shard) => self.shards[shard].tensor(&name).map(Some),
            None => Ok(None),
        }
    }

    fn display_name(&self, name: TensorName) -> String {
        self.hparams.arch.hugging_face_name(name)
    }
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, ModelError> {
        let file = File::open(&path).map_err(|source| ModelError::io(&path, source))?;
        // SAFETY: as for GGUF files: a private read-only map of a file that is not rewritten.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| ModelError::io(&path, source))?;
        let (header_bytes, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|error| ModelError::malformed(&path, "header", error.to_string()))?;
        Ok(Self { path, map, metadata, data_start: LENGTH_BYTES + header_bytes })
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let place = || format!("tensor `{name}`");
        let info = self
            .metadata
            .info(name)
            .ok_or_else(|| ModelError::malformed(&self.path, place(), "the index names it, the file lacks it"))?;
        let dtype = match info.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => {
                let reason = format!("{other:?} is not supported (supported: F32, F16, BF16)");
                return Err(ModelError::malformed(&self.path, place(), reason));
            }
        };
        let (start, end) = info.data_offsets;
        Ok(Tensor {
            dtype,
            shape: info.shape.clone(),
            bytes: (&self.map[self.data_start + start..self.data_start + end]).into(),
        })
    }
}

fn open_sharded(folder: &Path, index_path: &Path) -> Result<(Vec<Shard>, BTreeMap<String, usize>), ModelError> {
    let index: IndexJson = serde_json::from_str(&read_text(index_path)?)
        .map_err(|error| ModelError::malformed(index_path, "json", error.to_string()))?;
    let mut shards: Vec<Shard> = Vec::new();
    let mut shard_of = BTreeMap::new();
    for (tensor, file_name) in index.weight_map {
        // A bare name only: an index must not reach outside its folder.
        if Path::new(&file_name).file_name() != Some(file_name.as_ref()) {
            let reason = format!("`{}` is not a file name", file_name.escape_debug());
            return Err(ModelError::malformed(index_path, "weight_map", reason));
        }
        let path = folder.join(file_name);
        let known = shards.iter().position(|shard| shard.path == path);
        let shard = match known {
            Some(shard) => shard,
            None => {
                shards.push(Shard::open(path)?);
                shards.len() - 1
            }
        };
        if shards[shard].metadata.info(&tensor).is_none() {
            return Err(ModelError::malformed(
                &shards[shard].path,
                format!("tensor `{}`", tensor.escape_debug()),
                "the index names it, the file lacks it",
            ));
        }
        shard_of.insert(tensor, shard);
    }
    Ok((shards, shard_of))
}

fn read_text(path: &Path) -> Result<String, ModelError> {
    fs::read_to_string(path).map_err(|source| ModelError::io(path, source))
}
