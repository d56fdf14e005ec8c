//! The typed key/value section of a GGUF file.

use std::collections::BTreeMap;

use super::cursor::{Cursor, Fault};

/// Longer keys are refused (the format's own limit).
const MAX_KEY_BYTES: usize = 65_535;
/// Real files hold about 30 entries.
const MAX_ENTRIES: usize = 65_536;
/// The largest vocabularies have about 260,000 tokens and half a million merges.
const MAX_ARRAY_LEN: usize = 4 << 20;
const MAX_STRING_BYTES: usize = 16 << 20;

/// One value. Integers are widened; arrays keep an element type that readers can borrow.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Integer(i128),
    Float(f64),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    /// An integer array whose every element fits.
    I32s(Vec<i32>),
    /// An integer array with larger elements.
    Wide(Vec<i128>),
    F32s(Vec<f32>),
    F64s(Vec<f64>),
    Bools(Vec<bool>),
}

impl Value {
    fn type_name(&self) -> &'static str {
        match self {
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::String(_) => "a string",
            Self::Strings(_) => "an array of strings",
            Self::I32s(_) | Self::Wide(_) => "an array of integers",
            Self::F32s(_) | Self::F64s(_) => "an array of floats",
            Self::Bools(_) => "an array of bools",
        }
    }
}

/// A key that is there but holds another type than the reader needs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("metadata key `{key}` is {found}, not {wanted}")]
pub struct WrongType {
    pub key: String,
    pub found: &'static str,
    pub wanted: &'static str,
}

/// Keys and values. The plain getters answer `None` both for an absent key and for one of another
/// type; the `try_` getters tell these apart, for values that change what the model computes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    entries: BTreeMap<String, Value>,
}

impl FromIterator<(String, Value)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (String, Value)>>(entries: I) -> Self {
        Self { entries: entries.into_iter().collect() }
    }
}

impl Metadata {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub fn string(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// Any integer that fits.
    pub fn u32(&self, key: &str) -> Option<u32> {
        match self.get(key)? {
            Value::Integer(value) => u32::try_from(*value).ok(),
            _ => None,
        }
    }

    pub fn f32(&self, key: &str) -> Option<f32> {
        match self.get(key)? {
            Value::Float(value) => Some(*value as f32),
            _ => None,
        }
    }

    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            Value::Strings(values) => Some(values),
            _ => None,
        }
    }

    pub fn i32s(&self, key: &str) -> Option<&[i32]> {
        match self.get(key)? {
            Value::I32s(values) => Some(values),
            _ => None,
        }
    }

    pub fn f32s(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            Value::F32s(values) => Some(values),
            _ => None,
        }
    }

    pub fn try_string(&self, key: &str) -> Result<Option<&str>, WrongType> {
        self.typed(key, "a string", self.string(key))
    }

    pub fn try_u32(&self, key: &str) -> Result<Option<u32>, WrongType> {
        self.typed(key, "a 32-bit unsigned integer", self.u32(key))
    }

    pub fn try_f32(&self, key: &str) -> Result<Option<f32>, WrongType> {
        self.typed(key, "a float", self.f32(key))
    }

    pub fn try_bool(&self, key: &str) -> Result<Option<bool>, WrongType> {
        self.typed(key, "a bool", self.bool(key))
    }

    fn typed<T>(&self, key: &str, wanted: &'static str, value: Option<T>) -> Result<Option<T>, WrongType> {
        match (value, self.get(key)) {
            (None, Some(found)) => Err(WrongType { key: key.to_owned(), found: found.type_name(), wanted }),
            (value, _) => Ok(value),
        }
    }

    /// Reads `count` (as the header says) entries.
    pub(crate) fn parse(cursor: &mut Cursor, count: u64) -> Result<Self, Fault> {
        if count > MAX_ENTRIES as u64 {
            return Err(cursor.fault(format!("{count} metadata entries, at most {MAX_ENTRIES} are accepted")));
        }
        let mut entries = BTreeMap::new();
        for index in 0..count {
            cursor.set_context(format!("metadata entry {index}"));
            let key = cursor.string(MAX_KEY_BYTES)?;
            cursor.set_context(format!("metadata key `{}`", key.escape_debug()));
            let kind = cursor.u32()?;
            let value = match kind {
                8 => Value::String(cursor.string(MAX_STRING_BYTES)?),
                9 => parse_array(cursor)?,
                _ => match parse_scalar(cursor, kind)? {
                    Scalar::Integer(value) => Value::Integer(value),
                    Scalar::Float(value) => Value::Float(value),
                    Scalar::Bool(value) => Value::Bool(value),
                },
            };
            if entries.insert(key, value).is_some() {
                return Err(cursor.fault("the key appears twice"));
            }
        }
        Ok(Self { entries })
    }
}

enum Scalar {
    Integer(i128),
    Float(f64),
    Bool(bool),
}

/// Value types as the GGUF specification numbers them.
fn parse_scalar(cursor: &mut Cursor, kind: u32) -> Result<Scalar, Fault> {
    let scalar = match kind {
        0 => Scalar::Integer(u8::from_le_bytes(cursor.array()?).into()),
        1 => Scalar::Integer(i8::from_le_bytes(cursor.array()?).into()),
        2 => Scalar::Integer(u16::from_le_bytes(cursor.array()?).into()),
        3 => Scalar::Integer(i16::from_le_bytes(cursor.array()?).into()),
        4 => Scalar::Integer(u32::from_le_bytes(cursor.array()?).into()),
        5 => Scalar::Integer(i32::from_le_bytes(cursor.array()?).into()),
        6 => Scalar::Float(f32::from_le_bytes(cursor.array()?).into()),
        7 => match cursor.array::<1>()? {
            [0] => Scalar::Bool(false),
            [1] => Scalar::Bool(true),
            [other] => return Err(cursor.fault(format!("bool is {other}, not 0 or 1"))),
        },
        10 => Scalar::Integer(u64::from_le_bytes(cursor.array()?).into()),
        11 => Scalar::Integer(i64::from_le_bytes(cursor.array()?).into()),
        12 => Scalar::Float(f64::from_le_bytes(cursor.array()?)),
        _ => return Err(cursor.fault(format!("unknown value type {kind}"))),
    };
    Ok(scalar)
}

fn scalar_bytes(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn parse_array(cursor: &mut Cursor) -> Result<Value, Fault> {
    let kind = cursor.u32()?;
    if kind == 8 {
        let len = cursor.count("array elements", MAX_ARRAY_LEN, 8)?;
        let mut strings = Vec::with_capacity(len);
        for _ in 0..len {
            strings.push(cursor.string(MAX_STRING_BYTES)?);
        }
        return Ok(Value::Strings(strings));
    }
    if kind == 9 {
        return Err(cursor.fault("arrays of arrays are not supported"));
    }
    let Some(element_bytes) = scalar_bytes(kind) else {
        return Err(cursor.fault(format!("unknown array element type {kind}")));
    };
    let len = cursor.count("array elements", MAX_ARRAY_LEN, element_bytes)?;
    let mut integers = Vec::new();
    let mut floats = Vec::new();
    let mut bools = Vec::new();
    for _ in 0..len {
        match parse_scalar(cursor, kind)? {
            Scalar::Integer(value) => integers.push(value),
            Scalar::Float(value) => floats.push(value),
            Scalar::Bool(value) => bools.push(value),
        }
    }
    Ok(match kind {
        6 => Value::F32s(floats.iter().map(|&value| value as f32).collect()),
        12 => Value::F64s(floats),
        7 => Value::Bools(bools),
        _ => match integers.iter().map(|&value| i32::try_from(value)).collect() {
            Ok(narrow) => Value::I32s(narrow),
            Err(_) => Value::Wide(integers),
        },
    })
}
