//! The one error type of this crate; each message is one line that names what and where.

use std::path::{Path, PathBuf};

use crate::chat::ChatError;
use crate::tokenizer::TokenizerError;

/// What went wrong, by what the caller does next: tell the operator (all but the last two), or
/// refuse one request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The path is missing or is neither a GGUF file nor a model folder.
    #[error("model {}: {reason}", path.display())]
    NotAModel { path: PathBuf, reason: String },

    /// The operating system refused.
    #[error("model {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },

    /// The bytes are damaged, truncated or hostile; `place` is where (an offset, a key, a tensor).
    #[error("model {}: {place}: {reason}", path.display())]
    Malformed { path: PathBuf, place: String, reason: String },

    /// The file is well formed, but asks for something this build does not have.
    #[error("{what} `{value}` is not supported (supported: {supported})")]
    Unsupported { what: &'static str, value: String, supported: String },

    /// Hyperparameters that contradict each other or the tensors.
    #[error("model shape: {0}")]
    Shape(String),

    /// The tokenizer's vocabulary or settings are unusable.
    #[error("tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),

    /// The chat template does not parse or does not render.
    #[error(transparent)]
    Chat(#[from] ChatError),

    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] keepsake_kernels::KernelError),

    /// A step that the runner cannot run: it contradicts itself or exceeds what was sized.
    #[error("batch: {0}")]
    Batch(String),
}

impl ModelError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn malformed(path: &Path, place: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), place: place.into(), reason: reason.into() }
    }
}
