//! GGUF files (versions 2 and 3, little-endian): typed metadata and tensors inside a memory map.
//!
//! The file is hostile until parsed: counts are capped and held against the bytes left before
//! anything is allocated, tensor sizes are computed without overflow, and tensors may neither leave
//! the file nor overlap. What `open` accepted can be read later without a bounds error.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod cursor;
mod metadata;
mod tensors;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use keepsake_kernels::RopeStyle;
use memmap2::Mmap;

use self::cursor::{Cursor, Fault};
pub use self::metadata::{Metadata, Value, WrongType};
use self::tensors::TensorSpan;
use super::{Tensor, TensorName, WeightSource};
use crate::error::ModelError;

pub const MAGIC: [u8; 4] = *b"GGUF";

/// A parsed file; tensor bytes stay in the map until they are asked for.
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    contents: Contents,
}

/// What the header says, with every span inside the file.
#[derive(Debug)]
struct Contents {
    metadata: Metadata,
    tensors: BTreeMap<String, TensorSpan>,
}

impl GgufFile {
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = File::open(path).map_err(|source| ModelError::io(path, source))?;
        // SAFETY: the map is read-only and private to this process. Another process that truncates
        // the file while it is mapped would raise SIGBUS; model files are not rewritten in place,
        // and the alternative is a second copy of the weights in memory.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| ModelError::io(path, source))?;
        let contents = parse(&map).map_err(|fault| ModelError::malformed(path, fault.place, fault.reason))?;
        Ok(Self { path: path.to_owned(), map, contents })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn metadata(&self) -> &Metadata {
        &self.contents.metadata
    }

    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.contents.tensors.keys().map(String::as_str)
    }

    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let span = self.contents.tensors.get(name)?;
        Some(Tensor { dtype: span.dtype, shape: span.shape.clone(), bytes: (&self.map[span.range.clone()]).into() })
    }
}

impl WeightSource for GgufFile {
    fn tensor(&self, name: TensorName) -> Result<Option<Tensor<'_>>, ModelError> {
        Ok(self.tensor(&name.gguf()))
    }

    fn display_name(&self, name: TensorName) -> String {
        name.gguf()
    }

    /// What llama.cpp's converter does for architecture `llama`.
    fn rope_style(&self) -> RopeStyle {
        RopeStyle::Interleaved
    }
}

fn parse(bytes: &[u8]) -> Result<Contents, Fault> {
    let mut cursor = Cursor::new(bytes);
    let magic: [u8; 4] = cursor.array()?;
    if magic != MAGIC {
        return Err(Fault::new("header", format!("not a GGUF file: it starts with {magic:02x?}, not \"GGUF\"")));
    }
    let version = cursor.u32()?;
    match version {
        2 | 3 => {}
        _ if matches!(version.swap_bytes(), 2 | 3) => {
            return Err(cursor.fault("big-endian GGUF files are not supported"));
        }
        _ => {
            return Err(cursor.fault(format!("GGUF version {version} is not supported (supported: 2, 3)")));
        }
    }
    let num_tensors = cursor.u64()?;
    let num_entries = cursor.u64()?;
    let metadata = Metadata::parse(&mut cursor, num_entries)?;
    let tensors = tensors::parse(&mut cursor, num_tensors, &metadata)?;
    Ok(Contents { metadata, tensors })
}
