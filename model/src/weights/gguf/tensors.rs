//! The tensor directory of a GGUF file: names, types, shapes, and where the bytes are.

use std::collections::BTreeMap;
use std::ops::Range;

use keepsake_kernels::DType;

use super::cursor::{Cursor, Fault};
use super::metadata::Metadata;

const MAX_TENSORS: u64 = 65_536;
const MAX_NAME_BYTES: usize = 256;
/// GGML_MAX_DIMS.
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u32 = 32;
const MAX_ALIGNMENT: u32 = 1 << 16;
/// Name length, dimension count, one dimension, type, offset.
const MIN_ENTRY_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// One tensor's place in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpan {
    pub dtype: DType,
    /// Outermost dimension first; the last one is contiguous. (The file has them reversed.)
    pub shape: Vec<usize>,
    /// Bytes of the file.
    pub range: Range<usize>,
}

struct Entry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    offset: u64,
    bytes: usize,
}

pub(super) fn parse(
    cursor: &mut Cursor,
    count: u64,
    metadata: &Metadata,
) -> Result<BTreeMap<String, TensorSpan>, Fault> {
    cursor.set_context("tensor directory");
    if count > MAX_TENSORS || count > (cursor.remaining() / MIN_ENTRY_BYTES) as u64 {
        return Err(
            cursor.fault(format!("truncated: {count} tensors cannot be in the {} bytes left", cursor.remaining()))
        );
    }
    let alignment = alignment(metadata)?;
    let mut entries = Vec::new();
    for index in 0..count {
        entries.push(parse_entry(cursor, index, alignment)?);
    }
    place(cursor, entries, alignment)
}

fn alignment(metadata: &Metadata) -> Result<u64, Fault> {
    let key = "general.alignment";
    let alignment =
        metadata.try_u32(key).map_err(|error| Fault::new("header", error.to_string()))?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(Fault::new(
            format!("metadata key `{key}`"),
            format!("{alignment} is not a power of two up to {MAX_ALIGNMENT}"),
        ));
    }
    Ok(alignment.into())
}

fn parse_entry(cursor: &mut Cursor, index: u64, alignment: u64) -> Result<Entry, Fault> {
    cursor.set_context(format!("tensor {index}"));
    let name = cursor.string(MAX_NAME_BYTES)?;
    cursor.set_context(format!("tensor `{}`", name.escape_debug()));
    let num_dims = cursor.u32()?;
    if num_dims == 0 || num_dims > MAX_DIMS {
        return Err(cursor.fault(format!("{num_dims} dimensions, not 1 to {MAX_DIMS}")));
    }
    let mut shape = Vec::new();
    let mut len: usize = 1;
    for _ in 0..num_dims {
        let dim = cursor.u64()?;
        let dim = usize::try_from(dim).ok().filter(|&dim| dim > 0);
        let Some(product) = dim.and_then(|dim| len.checked_mul(dim)) else {
            return Err(cursor.fault("a dimension is zero or the shape overflows"));
        };
        len = product;
        shape.push(dim.expect("checked just above"));
    }
    shape.reverse();
    let dtype = dtype(cursor)?;
    let row_len = *shape.last().expect("at least one dimension");
    if !row_len.is_multiple_of(dtype.block_len()) {
        return Err(
            cursor.fault(format!("rows of {row_len} values are not whole {dtype:?} blocks of {}", dtype.block_len()))
        );
    }
    let Some(bytes) = (len / dtype.block_len()).checked_mul(dtype.block_bytes()) else {
        return Err(cursor.fault("the size in bytes overflows"));
    };
    let offset = cursor.u64()?;
    if !offset.is_multiple_of(alignment) {
        return Err(cursor.fault(format!("offset {offset} is not a multiple of the alignment {alignment}")));
    }
    Ok(Entry { name, dtype, shape, offset, bytes })
}

/// Types as `ggml_type` numbers them.
fn dtype(cursor: &mut Cursor) -> Result<DType, Fault> {
    let number = cursor.u32()?;
    Ok(match number {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        12 => DType::Q4K,
        13 => DType::Q5K,
        14 => DType::Q6K,
        30 => DType::BF16,
        _ => {
            return Err(cursor.fault(format!(
                "ggml type {number} is not supported (supported: F32, F16, BF16, Q4_0, Q4_1, \
                 Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)"
            )))
        }
    })
}

/// Offsets count from the first aligned byte after the directory.
fn place(cursor: &Cursor, mut entries: Vec<Entry>, alignment: u64) -> Result<BTreeMap<String, TensorSpan>, Fault> {
    let file_bytes = (cursor.offset() + cursor.remaining()) as u64;
    let data_start = (cursor.offset() as u64).next_multiple_of(alignment);
    entries.sort_by_key(|entry| entry.offset);

    let mut tensors = BTreeMap::new();
    let mut previous_end = data_start;
    for entry in entries {
        let fault = |reason: String| {
            let place = format!("tensor `{}`", entry.name.escape_debug());
            Err(Fault::new(place, reason))
        };
        let start = data_start.checked_add(entry.offset);
        let end = start.and_then(|start| start.checked_add(entry.bytes as u64));
        let (start, end) = match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => (start, end),
            _ => {
                return fault(format!(
                    "truncated: {} bytes at data offset {} leave the file of {file_bytes} bytes",
                    entry.bytes, entry.offset
                ))
            }
        };
        if start < previous_end {
            return fault("its bytes overlap another tensor's".to_owned());
        }
        previous_end = end;
        let span = TensorSpan { dtype: entry.dtype, shape: entry.shape.clone(), range: start as usize..end as usize };
        if tensors.insert(entry.name.clone(), span).is_some() {
            return fault("the name appears twice".to_owned());
        }
    }
    Ok(tensors)
}
