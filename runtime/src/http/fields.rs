//! Decoding of request bodies: a JSON object whose fields are taken one by one, each with its type and limits.
//!
//! serde's derived messages say neither which field was wrong nor what would be right ("data did not match any variant of
//! untagged enum"), so every field that this server acts on is decoded here. Rules: `null` is the same as absent; numbers
//! are JSON numbers, never strings; integers have no fraction; of duplicated keys the last counts, as in OpenAI's servers.
//! Fields that nobody takes are ignored, as vLLM does: clients send fields of other servers all the time.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(other) => Err(ApiError::bad_json(format!("the body must be a JSON object, not {}", kind_of(&other)))),
            Err(error) => Err(ApiError::bad_json(format!("the body is not valid JSON: {error}"))),
        }
    }

    /// Removes a field; `None` when it is absent or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(name, "a string", &other)),
        }
    }

    pub(crate) fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(name, "a boolean", &other)),
        }
    }

    /// A number within `range`; both ends count.
    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        self.take(name).map(|value| number(&value, name, range)).transpose()
    }

    /// A number within `(0, max]`.
    pub(crate) fn positive_number(&mut self, name: &str, max: f64) -> Result<Option<f64>, ApiError> {
        let value = self.number(name, 0.0..=max)?;
        // What f32 rounds to zero is zero to the sampler.
        if value.is_some_and(|value| value as f32 <= 0.0) {
            return Err(ApiError::invalid(name, format!("{name} must be greater than 0 and at most {max}")));
        }
        Ok(value)
    }

    /// An integer within `range`.
    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.take(name).map(|value| integer(&value, name, range)).transpose()
    }

    /// An integer within `range`, which must lie in `u32`.
    pub(crate) fn count(&mut self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let range = i64::from(*range.start())..=i64::from(*range.end());
        let value = self.integer(name, range)?;
        Ok(value.map(|value| u32::try_from(value).expect("the range lies in u32")))
    }

    /// Refuses the field unless it is absent or `accept` finds that it asks for nothing special.
    pub(crate) fn refuse_unless(
        &mut self,
        name: &str,
        accept: impl FnOnce(&Value) -> bool,
        why: &str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !accept(&value) => Err(ApiError::unsupported(name, format!("{name}: {why}"))),
            _ => Ok(()),
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn into_map(self) -> Map<String, Value> {
        self.0
    }
}

/// A finite number within `range`. JSON has no NaN or infinity, and what overflows `f64` is a syntax error already.
pub(crate) fn number(value: &Value, name: &str, range: RangeInclusive<f64>) -> Result<f64, ApiError> {
    let number = value.as_f64().ok_or_else(|| wrong_type(name, "a number", value))?;
    if !range.contains(&number) {
        let message = format!("{name} must be between {} and {}, not {value}", range.start(), range.end());
        return Err(ApiError::invalid(name, message));
    }
    Ok(number)
}

pub(crate) fn integer(value: &Value, name: &str, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
    let limits = || format!("{name} must be an integer between {} and {}", range.start(), range.end());
    let Value::Number(number) = value else {
        return Err(wrong_type(name, "an integer", value));
    };
    match number.as_i64() {
        Some(integer) if range.contains(&integer) => Ok(integer),
        _ => Err(ApiError::invalid(name, format!("{}, not {number}", limits()))),
    }
}

/// A list of at most `max` token ids of the vocabulary.
pub(crate) fn token_ids(values: &[Value], name: &str, vocab_size: usize, max: usize) -> Result<Vec<u32>, ApiError> {
    if values.len() > max {
        return Err(ApiError::invalid(name, format!("{name} may hold at most {max} token ids, not {}", values.len())));
    }
    let last = i64::try_from(vocab_size).expect("a vocabulary fits i64") - 1;
    let ids = values.iter().enumerate().map(|(i, value)| {
        let id = match value.as_i64().filter(|id| (0..=last).contains(id)) {
            Some(id) => id,
            None => integer(value, &format!("{name}[{i}]"), 0..=last)?,
        };
        Ok(u32::try_from(id).expect("vocabularies fit u32"))
    });
    ids.collect()
}

pub(crate) fn wrong_type(name: &str, expected: &str, got: &Value) -> ApiError {
    ApiError::invalid(name, format!("{name} must be {expected}, not {}", kind_of(got)))
}

/// Never the value itself: it may be megabytes of somebody's prompt.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
