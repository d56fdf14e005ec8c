//! What the network tests share.

pub mod blocks;
pub mod driver;
pub mod gguf_writer;
pub mod reference;
pub mod tiny;
