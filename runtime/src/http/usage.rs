//! `usage` in the two wire formats, each with the same `keepsake` object that says where the input's K/V came from.

use openai_protocol::common::{PromptTokenUsageInfo, Usage};
use openai_protocol::responses::{InputTokensDetails, OutputTokensDetails, ResponseUsage};
use serde_json::{json, Map, Value};

use crate::messages::session::TurnUsage;

/// Of `/v1/responses`.
pub(crate) fn responses(usage: &TurnUsage) -> Value {
    let wire = ResponseUsage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        total_tokens: usage.input_tokens.saturating_add(usage.output_tokens),
        input_tokens_details: InputTokensDetails { cached_tokens: usage.cached_tokens },
        output_tokens_details: OutputTokensDetails { reasoning_tokens: 0 },
    };
    with_sources(json!(wire), usage)
}

/// Of `/v1/chat/completions` and `/v1/completions`.
pub(crate) fn chat(usage: &TurnUsage) -> Value {
    let wire = Usage {
        prompt_tokens: usage.input_tokens,
        completion_tokens: usage.output_tokens,
        total_tokens: usage.input_tokens.saturating_add(usage.output_tokens),
        prompt_tokens_details: Some(PromptTokenUsageInfo { cached_tokens: usage.cached_tokens, audio_tokens: None }),
        completion_tokens_details: None,
    };
    with_sources(json!(wire), usage)
}

/// The usage of several prompts in one request: counts add up, the slowest first token counts.
pub(crate) fn sum<'a>(usages: impl IntoIterator<Item = &'a TurnUsage>) -> TurnUsage {
    usages.into_iter().fold(TurnUsage::default(), |mut total, usage| {
        total.input_tokens = total.input_tokens.saturating_add(usage.input_tokens);
        total.cached_tokens = total.cached_tokens.saturating_add(usage.cached_tokens);
        total.output_tokens = total.output_tokens.saturating_add(usage.output_tokens);
        total.recomputed_tokens = total.recomputed_tokens.saturating_add(usage.recomputed_tokens);
        total.ttft = total.ttft.max(usage.ttft);
        for (tier, tokens) in &usage.cached_by_tier {
            match total.cached_by_tier.iter_mut().find(|(name, _)| name == tier) {
                Some((_, sum)) => *sum = sum.saturating_add(*tokens),
                None => total.cached_by_tier.push((tier.clone(), *tokens)),
            }
        }
        total
    })
}

fn with_sources(mut wire: Value, usage: &TurnUsage) -> Value {
    let tiers: Map<String, Value> =
        usage.cached_by_tier.iter().map(|(tier, tokens)| (tier.clone(), json!(tokens))).collect();
    wire["keepsake"] = json!({
        "tiers": tiers,
        "recomputed": usage.recomputed_tokens,
        "ttft_ms": (usage.ttft.as_secs_f64() * 1e6).round() / 1e3,
    });
    wire
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn counts_and_tiers_in_both_formats() {
        let usage = TurnUsage {
            input_tokens: 100,
            cached_tokens: 64,
            output_tokens: 7,
            cached_by_tier: vec![("device".into(), 32), ("dram".into(), 32)],
            recomputed_tokens: 16,
            ttft: Duration::from_micros(12_345),
        };
        let keepsake = json!({"tiers": {"device": 32, "dram": 32}, "recomputed": 16, "ttft_ms": 12.345});
        assert_eq!(
            responses(&usage),
            json!({
                "input_tokens": 100, "output_tokens": 7, "total_tokens": 107, "input_tokens_details": {"cached_tokens": 64},
                "output_tokens_details": {"reasoning_tokens": 0}, "keepsake": keepsake,
            })
        );
        let chat = chat(&usage);
        assert_eq!(chat["prompt_tokens"], 100);
        assert_eq!(chat["prompt_tokens_details"]["cached_tokens"], 64);
        assert_eq!(chat["keepsake"], keepsake);

        let twice = sum([&usage, &usage]);
        assert_eq!((twice.input_tokens, twice.ttft), (200, usage.ttft));
        assert_eq!(twice.cached_by_tier, [("device".into(), 64), ("dram".into(), 64)]);
    }
}
