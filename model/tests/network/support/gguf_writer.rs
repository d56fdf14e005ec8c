//! A writer of small GGUF files.

use keepsake_kernels::DType;

pub enum Item {
    U32(u32),
    F32(f32),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

struct TensorItem {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

#[derive(Default)]
pub struct GgufWriter {
    items: Vec<(String, Item)>,
    tensors: Vec<TensorItem>,
}

impl GgufWriter {
    pub fn item(&mut self, key: &str, item: Item) -> &mut Self {
        self.items.push((key.to_owned(), item));
        self
    }

    pub fn replace(&mut self, key: &str, item: Item) {
        let slot = self.items.iter_mut().find(|(other, _)| other == key);
        slot.unwrap().1 = item;
    }

    pub fn text(&mut self, key: &str, text: &str) -> &mut Self {
        self.item(key, Item::Text(text.to_owned()))
    }

    pub fn number(&mut self, key: &str, number: usize) -> &mut Self {
        self.item(key, Item::U32(number as u32))
    }

    /// `shape` with the outermost dimension first.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) -> &mut Self {
        self.tensors.push(TensorItem { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes });
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        const ALIGNMENT: usize = 32;
        let mut out = Vec::new();
        out.extend_from_slice(b"GGUF");
        out.extend_from_slice(&3u32.to_le_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&(self.items.len() as u64).to_le_bytes());
        for (key, item) in &self.items {
            put_string(&mut out, key);
            put_item(&mut out, item);
        }
        let mut offset = 0usize;
        for tensor in &self.tensors {
            put_string(&mut out, &tensor.name);
            out.extend_from_slice(&(tensor.shape.len() as u32).to_le_bytes());
            for &dim in tensor.shape.iter().rev() {
                out.extend_from_slice(&(dim as u64).to_le_bytes());
            }
            out.extend_from_slice(&ggml_type(tensor.dtype).to_le_bytes());
            out.extend_from_slice(&(offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(ALIGNMENT);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend_from_slice(&tensor.bytes);
        }
        out
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_item(out: &mut Vec<u8>, item: &Item) {
    let mut kind = |number: u32| out.extend_from_slice(&number.to_le_bytes());
    match item {
        Item::U32(value) => {
            kind(4);
            out.extend_from_slice(&value.to_le_bytes());
        }
        Item::F32(value) => {
            kind(6);
            out.extend_from_slice(&value.to_le_bytes());
        }
        Item::Text(text) => {
            kind(8);
            put_string(out, text);
        }
        Item::Texts(texts) => {
            kind(9);
            kind_of_elements(out, 8, texts.len());
            texts.iter().for_each(|text| put_string(out, text));
        }
        Item::I32s(values) => {
            kind(9);
            kind_of_elements(out, 5, values.len());
            for value in values {
                out.extend_from_slice(&value.to_le_bytes());
            }
        }
    }
}

fn kind_of_elements(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(len as u64).to_le_bytes());
}

pub fn ggml_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q5_0 => 6,
        DType::Q5_1 => 7,
        DType::Q8_0 => 8,
        DType::Q4K => 12,
        DType::Q5K => 13,
        DType::Q6K => 14,
        DType::BF16 => 30,
    }
}
