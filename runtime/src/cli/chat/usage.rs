//! The line after each turn: what it cost, and where the past's K/V came from.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

/// A turn's tokens by source, from the `usage` of its response.
#[derive(Debug, PartialEq)]
pub(super) struct TurnCost {
    new: u64,
    reused: u64,
    /// In the server's order; empty for a server that does not say.
    reused_by_tier: Vec<(String, u64)>,
    recomputed: u64,
    output: u64,
    ttft: Duration,
}

impl TurnCost {
    /// `measured_ttft` stands in where the server does not tell its own.
    pub(super) fn from_usage(usage: &Value, measured_ttft: Duration) -> Self {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let keepsake = &usage["keepsake"];
        let reused = count(&usage["input_tokens_details"]["cached_tokens"]);
        let recomputed = count(&keepsake["recomputed"]);
        let tiers = keepsake["tiers"].as_object();
        let reused_by_tier = tiers.into_iter().flatten().map(|(tier, n)| (tier.clone(), count(n)));
        let ttft_ms = keepsake["ttft_ms"].as_f64();
        let ttft = ttft_ms.and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok());
        Self {
            new: count(&usage["input_tokens"]).saturating_sub(reused + recomputed),
            reused,
            reused_by_tier: reused_by_tier.collect(),
            recomputed,
            output: count(&usage["output_tokens"]),
            ttft: ttft.unwrap_or(measured_ttft),
        }
    }
}

impl fmt::Display for TurnCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} new, {} reused", self.new, self.reused)?;
        let tiers: Vec<String> = self.reused_by_tier.iter().map(|(tier, n)| format!("{tier} {n}")).collect();
        if !tiers.is_empty() {
            write!(f, " ({})", tiers.join(", "))?;
        }
        write!(f, ", {} recomputed, {} output tokens, TTFT ", self.recomputed, self.output)?;
        match self.ttft.as_secs_f64() {
            seconds if seconds < 1.0 => write!(f, "{:.0} ms", seconds * 1e3),
            seconds => write!(f, "{seconds:.2} s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tokens_by_source_in_one_line() {
        let usage = json!({
            "input_tokens": 120, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 96},
            "keepsake": {"tiers": {"device": 64, "dram": 32, "rocks": 0}, "recomputed": 16, "ttft_ms": 84.6},
        });
        let cost = TurnCost::from_usage(&usage, Duration::from_secs(9));
        let line = "8 new, 96 reused (device 64, dram 32, rocks 0), 16 recomputed, 7 output tokens, TTFT 85 ms";
        assert_eq!(cost.to_string(), line);
    }

    #[test]
    fn another_server_says_less() {
        let usage = json!({"input_tokens": 20, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}});
        let cost = TurnCost::from_usage(&usage, Duration::from_millis(1234));
        assert_eq!(cost.to_string(), "16 new, 4 reused, 0 recomputed, 3 output tokens, TTFT 1.23 s");
        let nothing = TurnCost::from_usage(&Value::Null, Duration::ZERO);
        assert_eq!(nothing.to_string(), "0 new, 0 reused, 0 recomputed, 0 output tokens, TTFT 0 ms");
    }
}
