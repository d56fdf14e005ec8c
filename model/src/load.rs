//! From a path or a name to a [`Model`].

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use keepsake_kernels::Device;

use crate::chat::{self, ChatTemplate};
use crate::config::{DummyShape, HParams};
use crate::error::ModelError;
use crate::model::Model;
use crate::tokenizer::Tokenizer;
use crate::weights::dummy::DummyWeights;
use crate::weights::gguf::{self, GgufFile};
use crate::weights::safetensors::{SafetensorsFolder, CONFIG_FILE};

/// Generated weights are the same in every process.
const DUMMY_SEED: u64 = 1;

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    Gguf(PathBuf),
    /// `config.json`, safetensors and `tokenizer.json`.
    HfFolder(PathBuf),
    /// A shape's name, see [`DummyShape::parse`].
    Dummy(String),
}

impl ModelSource {
    /// What lies at a path, by content and not by its name's ending.
    pub fn detect(path: &Path) -> Result<Self, ModelError> {
        let not_a_model = |reason: String| Err(ModelError::NotAModel { path: path.to_owned(), reason });
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return not_a_model("no such file or folder".to_owned())
            }
            Err(error) => return Err(ModelError::io(path, error)),
        };
        if metadata.is_dir() {
            return match path.join(CONFIG_FILE).exists() {
                true => Ok(Self::HfFolder(path.to_owned())),
                false => not_a_model(format!("the folder has no {CONFIG_FILE} (a GGUF model is named by its file)")),
            };
        }
        let mut magic = Vec::new();
        File::open(path)
            .and_then(|file| file.take(gguf::MAGIC.len() as u64).read_to_end(&mut magic))
            .map_err(|error| ModelError::io(path, error))?;
        match magic == gguf::MAGIC {
            true => Ok(Self::Gguf(path.to_owned())),
            false => not_a_model(format!(
                "neither a GGUF file (it starts with \"{}\") nor a folder with {CONFIG_FILE}",
                magic.escape_ascii()
            )),
        }
    }

    /// What the model is called unless the config names it.
    pub fn name(&self) -> String {
        match self {
            Self::Gguf(path) => lossy(path.file_stem()),
            Self::HfFolder(path) => lossy(path.file_name()),
            Self::Dummy(name) => name.clone(),
        }
    }
}

fn lossy(name: Option<&std::ffi::OsStr>) -> String {
    let name = name.unwrap_or_default().to_string_lossy();
    match name.is_empty() {
        true => "model".to_owned(),
        false => name.into_owned(),
    }
}

/// Reads and checks the files, packs the weights for the device, and builds the text side.
pub fn load(source: &ModelSource, device: &Device) -> Result<Model, ModelError> {
    let name = source.name();
    match source {
        ModelSource::Gguf(path) => {
            let file = GgufFile::open(path)?;
            let hparams = HParams::from_gguf(&file)?;
            let tokenizer = Tokenizer::from_gguf(file.metadata())?;
            let template = file.metadata().string("tokenizer.chat_template");
            let chat = ChatTemplate::for_tokenizer(template, &tokenizer)?;
            Model::new(name, hparams, tokenizer, chat, &file, device)
        }
        ModelSource::HfFolder(path) => {
            let folder = SafetensorsFolder::open(path)?;
            let hparams = folder.hparams().clone();
            let tokenizer = Tokenizer::from_hf_folder(path)?;
            let template = chat::template_of_hf_folder(path)?;
            let chat = ChatTemplate::for_tokenizer(template.as_deref(), &tokenizer)?;
            Model::new(name, hparams, tokenizer, chat, &folder, device)
        }
        ModelSource::Dummy(shape) => {
            let shape = DummyShape::parse(shape)?;
            let tokenizer = Tokenizer::dummy(shape.hparams.vocab_size);
            let chat = ChatTemplate::for_tokenizer(None, &tokenizer)?;
            let weights = DummyWeights::new(shape.hparams.clone(), shape.dtype, DUMMY_SEED);
            Model::new(name, shape.hparams, tokenizer, chat, &weights, device)
        }
    }
}
