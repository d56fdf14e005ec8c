//! A loaded model: hyperparameters, weights on a device, and the text side.

use std::fmt;
use std::sync::Arc;

use keepsake_kernels::{Device, KvLayout};
use rayon::prelude::*;

use crate::arch::Network;
use crate::chat::ChatTemplate;
use crate::config::HParams;
use crate::error::ModelError;
use crate::tokenizer::Tokenizer;
use crate::weights::{TensorName, WeightSource};

/// Changes when this crate computes K/V differently from the same weights.
const FINGERPRINT_DOMAIN: &str = "keepsake model 1";

pub struct Model {
    pub hparams: HParams,
    pub tokenizer: Arc<Tokenizer>,
    pub chat: Arc<ChatTemplate>,
    name: String,
    pub(crate) network: Network,
    fingerprint: [u8; 32],
}

impl Model {
    pub(crate) fn new(
        name: String,
        hparams: HParams,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        source: &dyn WeightSource,
        device: &Device,
    ) -> Result<Self, ModelError> {
        if tokenizer.vocab_size() > hparams.vocab_size {
            return Err(ModelError::Shape(format!(
                "the tokenizer has {} tokens, the embedding {}",
                tokenizer.vocab_size(),
                hparams.vocab_size
            )));
        }
        let network = Network::load(source, &hparams, device)?;
        Ok(Self {
            fingerprint: fingerprint(&hparams, source)?,
            hparams,
            tokenizer: Arc::new(tokenizer),
            chat: Arc::new(chat),
            name,
            network,
        })
    }

    /// The file's or folder's name; what the model is served as unless the config names it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Identifies everything here that K/V depends on: the weights' content, shapes and rotary
    /// settings. Not the file's name, the tokenizer, or the context limit.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Bytes of the weights in memory.
    pub fn weight_bytes(&self) -> u64 {
        self.network.bytes()
    }

    pub fn kv_layout(&self, chunk_tokens: usize) -> KvLayout {
        KvLayout {
            num_layers: self.hparams.num_layers,
            num_kv_heads: self.hparams.num_kv_heads,
            head_dim: self.hparams.head_dim,
            chunk_tokens,
        }
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter
            .debug_struct("Model")
            .field("name", &self.name)
            .field("hparams", &self.hparams)
            .finish_non_exhaustive()
    }
}

fn fingerprint(hparams: &HParams, source: &dyn WeightSource) -> Result<[u8; 32], ModelError> {
    let names = TensorName::all(hparams.num_layers);
    let digests: Vec<Option<blake3::Hash>> =
        names.par_iter().map(|&name| source.digest(name)).collect::<Result<_, _>>()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(FINGERPRINT_DOMAIN.as_bytes());
    // The context limit cuts what may be computed, not what is.
    let shapes = HParams { max_context: 0, ..hparams.clone() };
    hasher.update(format!("{shapes:?} {:?}", source.rope_style()).as_bytes());
    for (name, digest) in names.iter().zip(digests) {
        if let Some(digest) = digest {
            hasher.update(format!("{name:?}").as_bytes());
            hasher.update(digest.as_bytes());
        }
    }
    Ok(*hasher.finalize().as_bytes())
}
