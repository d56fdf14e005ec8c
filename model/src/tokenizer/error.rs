//! What can be wrong with a vocabulary.

/// Why a tokenizer could not be built or could not encode.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("unknown pre-tokeniser {0:?} (tokenizer.ggml.pre): this vocabulary cannot be tokenised faithfully")]
    UnknownPreTokenizer(String),
    #[error("unsupported tokenizer model {0:?} (tokenizer.ggml.model): \"gpt2\" and \"llama\" are supported")]
    UnsupportedModel(String),
    #[error("bad vocabulary: {0}")]
    BadVocabulary(String),
    #[error("{path}: {source}")]
    Io { path: std::path::PathBuf, source: std::io::Error },
    #[error("{path}: {source}")]
    Json { path: std::path::PathBuf, source: serde_json::Error },
    #[error("tokenizers: {0}")]
    Library(#[source] tokenizers::Error),
}
