//! Weights, architectures and the runner, against files written here and golden logits.

mod support;

mod architectures;
mod forward;
mod gguf_files;
mod golden;
mod invariance;
mod sources;
