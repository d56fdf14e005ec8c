//! Everything between a model's files and its logits: weights, architectures, the forward pass,
//! and (the text half) tokenizer, chat template and sampler.
//!
//! May depend on `keepsake-kernels` and `keepsake-config`, nothing else of the workspace.
//! Knows neither sessions nor tiers: a [`Batch`] says which K/V slots to write and
//! which blocks to attend, and where those blocks came from is nobody's business here.
//!
//! Invariants: a file is hostile until it is parsed (every offset, length and count is checked
//! before it is used or allocated); a token's K/V and logits do not depend on what else is in the
//! batch; [`Model::fingerprint`] covers everything that changes K/V.
//!
//! Deliberately absent: networking, downloading, and any policy about what to keep.

pub mod arch;
pub mod batch;
pub mod chat;
pub mod config;
pub mod detokenizer;
pub mod error;
mod load;
mod model;
mod runner;
pub mod sampler;
pub mod stop;
pub mod tokenizer;
pub mod weights;

pub use arch::Architecture;
pub use batch::Batch;
pub use config::HParams;
pub use error::ModelError;
pub use load::{load, ModelSource};
pub use model::Model;
pub use runner::{Logits, Runner};
pub use weights::gguf;
