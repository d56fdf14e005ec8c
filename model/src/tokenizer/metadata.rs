//! The tokenizer keys of a GGUF file.

use crate::gguf::Metadata;

use super::{GgufVocab, Tokenizer, TokenizerError};

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        Self::from_vocab(&GgufVocab::from_metadata(metadata)?)
    }
}

impl GgufVocab {
    /// A key of another type than the format's is as good as absent, but the model and the tokens must be there.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let missing = |key: &str| TokenizerError::BadVocabulary(format!("{key} is missing"));
        let (model_key, tokens_key) = ("tokenizer.ggml.model", "tokenizer.ggml.tokens");
        let token_id = |name: &str| metadata.u32(&format!("tokenizer.ggml.{name}_token_id"));
        Ok(Self {
            model: metadata.string(model_key).ok_or_else(|| missing(model_key))?.to_owned(),
            pre: metadata.string("tokenizer.ggml.pre").map(str::to_owned),
            tokens: metadata.strings(tokens_key).ok_or_else(|| missing(tokens_key))?.to_vec(),
            token_types: metadata.i32s("tokenizer.ggml.token_type").unwrap_or_default().to_vec(),
            scores: metadata.f32s("tokenizer.ggml.scores").unwrap_or_default().to_vec(),
            merges: metadata.strings("tokenizer.ggml.merges").unwrap_or_default().to_vec(),
            bos: token_id("bos"),
            eos: token_id("eos"),
            eot: token_id("eot"),
            eom: token_id("eom"),
            unknown: token_id("unknown"),
            add_bos: metadata.bool("tokenizer.ggml.add_bos_token"),
            add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix"),
        })
    }
}
