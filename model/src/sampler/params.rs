//! What a request may ask of the sampler.

/// Sampling parameters of one request; the names are those of the HTTP API.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy. Default 1.
    pub temperature: f32,
    /// Only this many best tokens; `None` and 0 mean all.
    pub top_k: Option<u32>,
    /// Only the best tokens that together reach this probability. In (0, 1], default 1.
    pub top_p: f32,
    /// Only tokens at least this probable, relative to the best. In [0, 1], default 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output. Above 0, default 1.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence in the output. In [-2, 2], default 0.
    pub frequency_penalty: f32,
    /// Subtracted once for a token that occurs in the output. In [-2, 2], default 0.
    pub presence_penalty: f32,
    pub seed: u64,
    /// Added to the logits of these ids. Each in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// No end-of-generation or stop token before this many tokens.
    pub min_tokens: u32,
    /// An end-of-generation token does not end the reply. The sampler bans nothing for it; who ends replies asks.
    pub ignore_eos: bool,
    pub stop_token_ids: Vec<u32>,
}

/// A parameter out of its range, as the client sees it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{name} = {value}: must be {range}")]
pub struct InvalidParam {
    pub name: &'static str,
    pub value: f32,
    pub range: &'static str,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            logit_bias: Vec::new(),
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Temperatures below this are greedy, as in vLLM: dividing by them overflows.
    const MIN_TEMPERATURE: f32 = 1e-5;

    pub fn is_greedy(&self) -> bool {
        self.temperature < Self::MIN_TEMPERATURE
    }

    /// Checks every range; NaN is in none.
    pub fn validate(&self) -> Result<(), InvalidParam> {
        let penalty_range = "between -2 and 2";
        let within = |low: f32, value: f32, high: f32| low <= value && value <= high;
        let checks = [
            ("temperature", self.temperature, "between 0 and 100", within(0.0, self.temperature, 100.0)),
            ("top_p", self.top_p, "above 0, at most 1", self.top_p > 0.0 && self.top_p <= 1.0),
            ("min_p", self.min_p, "between 0 and 1", within(0.0, self.min_p, 1.0)),
            (
                "repetition_penalty",
                self.repetition_penalty,
                "above 0, at most 100",
                self.repetition_penalty > 0.0 && self.repetition_penalty <= 100.0,
            ),
            ("frequency_penalty", self.frequency_penalty, penalty_range, within(-2.0, self.frequency_penalty, 2.0)),
            ("presence_penalty", self.presence_penalty, penalty_range, within(-2.0, self.presence_penalty, 2.0)),
        ];
        let biases = self
            .logit_bias
            .iter()
            .map(|&(_, bias)| ("logit_bias", bias, "between -100 and 100", within(-100.0, bias, 100.0)));
        for (name, value, range, is_valid) in checks.into_iter().chain(biases) {
            if !is_valid {
                return Err(InvalidParam { name, value, range });
            }
        }
        Ok(())
    }
}
