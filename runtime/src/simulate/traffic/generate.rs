//! Conversations made up from published statistics.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::trace::{Conversation, TraceTurn};

/// What conversations look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// ShareGPT as the Pensieve paper describes it (EuroSys'25, table 1): lognormal inputs of 38 and outputs of 205 tokens on average,
    /// 5.6 turns. A share of `long` of them begins with a document that brings the first input to 4-60K tokens.
    Chat { think: f64, long: f64 },
    /// One conversation a user, of about `context` tokens from its first turn on, that never ends and hardly grows.
    Saturation { context: usize, think: f64 },
}

const MEAN_TURNS: f64 = 5.56;
const MEAN_INPUT: f64 = 37.77;
const MEAN_OUTPUT: f64 = 204.58;
const MAX_TURN: f64 = 1024.0;
const MAX_CHAT: usize = 4096;
const DOCUMENT: std::ops::Range<f64> = 4_000.0..60_000.0;
/// A turn of the saturation model: five decode rows follow the first token.
const SATURATION_INPUT: u32 = 4;
const SATURATION_OUTPUT: u32 = 6;

impl Shape {
    /// The longest log that conversations of `seconds` can reach.
    pub(super) fn max_context(self, seconds: f64) -> usize {
        match self {
            Shape::Chat { long, .. } if long > 0.0 => DOCUMENT.end as usize + MAX_CHAT,
            Shape::Chat { .. } => MAX_CHAT,
            Shape::Saturation { context, think } => {
                let growth = (SATURATION_INPUT + SATURATION_OUTPUT) as usize;
                context + context / 10 + growth * (num_saturation_turns(seconds, think) + 1)
            }
        }
    }
}

pub(super) struct Conversations {
    shape: Shape,
    seconds: f64,
    random: StdRng,
}

impl Conversations {
    pub(super) fn new(shape: Shape, seconds: f64, seed: u64) -> Self {
        Self { shape, seconds, random: StdRng::seed_from_u64(seed) }
    }

    fn chat(&mut self, think: f64, long: f64) -> Conversation {
        let num_turns = (2.0 + self.exponential(MEAN_TURNS - 2.0)).clamp(2.0, 40.0) as usize;
        let is_long = self.random.random::<f64>() < long;
        // As many of 4-8K as of 30-60K tokens.
        let document = match is_long {
            true => (DOCUMENT.start.ln() + (DOCUMENT.end / DOCUMENT.start).ln() * self.random.random::<f64>()).exp(),
            false => 0.0,
        };
        let mut total = 0;
        let mut turns = Vec::new();
        for index in 0..num_turns {
            let input = self.lognormal(MEAN_INPUT, 1.0);
            let output = self.lognormal(MEAN_OUTPUT, 0.7);
            if total + input + output > MAX_CHAT as u32 {
                break;
            }
            total += input + output;
            let think_s = if index == 0 { 0.0 } else { self.exponential(think) };
            turns.push(TraceTurn { input, output, think_s });
        }
        if let Some(first) = turns.first_mut() {
            first.input += document as u32;
        }
        Conversation { turns }
    }

    fn saturating(&mut self, context: usize, think: f64) -> Conversation {
        let first = context as f64 * (0.9 + 0.2 * self.random.random::<f64>());
        let mut turns = vec![TraceTurn { input: (first as u32).max(1), output: SATURATION_OUTPUT, think_s: 0.0 }];
        for _ in 0..num_saturation_turns(self.seconds, think) {
            let think_s = self.exponential(think);
            turns.push(TraceTurn { input: SATURATION_INPUT, output: SATURATION_OUTPUT, think_s });
        }
        Conversation { turns }
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.random.random::<f64>()).ln() * mean
    }

    fn lognormal(&mut self, mean: f64, sigma: f64) -> u32 {
        // Box and Muller's normal deviate.
        let radius = (-2.0 * (1.0 - self.random.random::<f64>()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.random.random::<f64>()).cos();
        (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp().clamp(4.0, MAX_TURN) as u32
    }
}

impl Iterator for Conversations {
    type Item = Conversation;

    fn next(&mut self) -> Option<Conversation> {
        Some(match self.shape {
            Shape::Chat { think, long } => self.chat(think, long),
            Shape::Saturation { context, think } => self.saturating(context, think),
        })
    }
}

/// More than a user can send if every reply came at once.
fn num_saturation_turns(seconds: f64, think: f64) -> usize {
    (seconds / think.max(0.1) * 1.5) as usize + 20
}
