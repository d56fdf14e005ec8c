//! The sampling fields that all three endpoints share: OpenAI's and vLLM's extras, with their limits.

use keepsake_model::sampler::SamplingParams;
use serde_json::Value;

use super::error::ApiError;
use super::fields::{integer, number, token_ids, wrong_type, Fields};

const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
const MAX_STOP_TOKENS: usize = 256;
const MAX_BIASES: usize = 1024;
/// Below it a softmax is one-hot in f32, and dividing by it overflows: the same as greedy.
const MIN_TEMPERATURE: f64 = 1e-4;

pub(crate) struct Sampling {
    pub(crate) params: SamplingParams,
    pub(crate) stop: Vec<String>,
}

impl Sampling {
    pub(crate) fn take(fields: &mut Fields, vocab_size: usize) -> Result<Self, ApiError> {
        let temperature = fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0);
        let params = SamplingParams {
            temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { temperature as f32 },
            top_k: top_k(fields)?,
            top_p: fields.positive_number("top_p", 1.0)?.unwrap_or(1.0) as f32,
            min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0) as f32,
            repetition_penalty: fields.positive_number("repetition_penalty", 10.0)?.unwrap_or(1.0) as f32,
            frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
            presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
            seed: seed(fields)?,
            logit_bias: logit_bias(fields, vocab_size)?,
            min_tokens: fields.count("min_tokens", 0..=u32::MAX)?.unwrap_or(0),
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            stop_token_ids: stop_token_ids(fields, vocab_size)?,
        };
        Ok(Self { params, stop: stop(fields)? })
    }

    /// A reply cannot be both at least `min_tokens` and at most `max` long if the first is larger.
    pub(crate) fn check_min_tokens(&self, max: Option<u32>) -> Result<(), ApiError> {
        match max {
            Some(max) if self.params.min_tokens > max => {
                let message = format!("min_tokens must be at most the output limit of {max}");
                Err(ApiError::invalid("min_tokens", message))
            }
            _ => Ok(()),
        }
    }
}

/// vLLM's convention: 0 and -1 mean all tokens.
fn top_k(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0);
    Ok(u32::try_from(top_k).ok().filter(|&k| k > 0))
}

/// Any 64-bit integer, signed as OpenAI's or not; a random one without.
fn seed(fields: &mut Fields) -> Result<u64, ApiError> {
    match fields.take("seed") {
        None => Ok(rand::random()),
        Some(value) => match value.as_u64() {
            Some(seed) => Ok(seed),
            None => Ok(integer(&value, "seed", i64::MIN..=i64::MAX)? as u64),
        },
    }
}

fn logit_bias(fields: &mut Fields, vocab_size: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let map = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong_type("logit_bias", "an object of token ids to numbers", &other)),
    };
    if map.len() > MAX_BIASES {
        return Err(ApiError::invalid("logit_bias", format!("logit_bias may hold at most {MAX_BIASES} tokens")));
    }
    let mut biases = Vec::with_capacity(map.len());
    for (key, value) in &map {
        let id = key.parse().ok().filter(|&id: &u32| (id as usize) < vocab_size).ok_or_else(|| {
            let message = format!("logit_bias keys must be token ids between 0 and {}", vocab_size - 1);
            ApiError::invalid("logit_bias", message)
        })?;
        biases.push((id, number(value, &format!("logit_bias.{id}"), -100.0..=100.0)? as f32));
    }
    Ok(biases)
}

fn stop_token_ids(fields: &mut Fields, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    match fields.take("stop_token_ids") {
        None => Ok(Vec::new()),
        Some(Value::Array(ids)) => token_ids(&ids, "stop_token_ids", vocab_size, MAX_STOP_TOKENS),
        Some(other) => Err(wrong_type("stop_token_ids", "an array of token ids", &other)),
    }
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let values = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(values)) => values,
        Some(one @ Value::String(_)) => vec![one],
        Some(other) => return Err(wrong_type("stop", "a string or an array of strings", &other)),
    };
    if values.len() > MAX_STOPS {
        return Err(ApiError::invalid(
            "stop",
            format!("stop may hold at most {MAX_STOPS} strings, not {}", values.len()),
        ));
    }
    let stops = values.into_iter().map(|value| match value {
        Value::String(text) if text.is_empty() => Err(ApiError::invalid("stop", "stop may not hold an empty string")),
        Value::String(text) if text.len() > MAX_STOP_BYTES => {
            Err(ApiError::invalid("stop", format!("a stop string may be at most {MAX_STOP_BYTES} bytes long")))
        }
        Value::String(text) => Ok(text),
        other => Err(wrong_type("stop", "a string or an array of strings", &other)),
    });
    stops.collect()
}
