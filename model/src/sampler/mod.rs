//! From logits to the next token.
//!
//! Order and meaning of the steps are vLLM's (`v1/sample/sampler.py`): logit bias and bans, penalties, then greedy, or
//! temperature, min-p, top-k, top-p and a draw. The draw for a token depends on the seed and the token's position only,
//! so a conversation that was swapped out, recomputed or batched otherwise samples the same tokens.
//!
//! Invariants: no full sort of the vocabulary for greedy or top-k; NaN logits count as minus infinity and never win.
//! Deliberately absent: stop strings (`stop`), deciding that a reply is over (the session's).

mod params;
mod random;

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

pub use params::{InvalidParam, SamplingParams};

/// Sampling state of one reply.
pub struct SamplerState {
    params: SamplingParams,
    /// Ids that may not come while fewer than `min_tokens` are out.
    banned_early: Vec<u32>,
    eog: Vec<u32>,
    /// Tokens of prompt and output, kept for the repetition penalty only.
    seen: HashSet<u32>,
    output_counts: HashMap<u32, u32>,
    num_output: u32,
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl SamplerState {
    /// `prompt` is everything before the reply; `eog` the tokenizer's end-of-generation set.
    pub fn new(params: SamplingParams, prompt: &[u32], eog: &[u32]) -> Self {
        let seen = if params.repetition_penalty == 1.0 { HashSet::new() } else { prompt.iter().copied().collect() };
        Self {
            banned_early: eog.iter().chain(&params.stop_token_ids).copied().collect(),
            eog: eog.to_vec(),
            params,
            seen,
            output_counts: HashMap::new(),
            num_output: 0,
            candidates: Vec::new(),
        }
    }

    /// Draws the token that follows `position` tokens and counts it as output. `logits` (one a vocabulary entry) are
    /// changed in place.
    ///
    /// When nothing can be drawn (every logit is NaN or minus infinity) the answer is the first end-of-generation
    /// token, or token 0 without one: a reply that cannot go on ends.
    pub fn sample(&mut self, logits: &mut [f32], position: usize) -> u32 {
        self.adjust(logits);
        let chosen = if self.params.is_greedy() { argmax(logits) } else { self.draw(logits, position) };
        let id = chosen.or(self.eog.first().copied()).unwrap_or(0);
        self.observe(id);
        id
    }

    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Tokens drawn so far.
    pub fn num_output(&self) -> u32 {
        self.num_output
    }

    fn adjust(&self, logits: &mut [f32]) {
        for logit in logits.iter_mut() {
            if logit.is_nan() {
                *logit = f32::NEG_INFINITY;
            }
        }
        for &(id, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        if self.num_output < self.params.min_tokens {
            for &id in &self.banned_early {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let repetition = self.params.repetition_penalty;
        for &id in &self.seen {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
        }
        for (&id, &count) in &self.output_counts {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit -= self.params.frequency_penalty * count as f32 + self.params.presence_penalty;
            }
        }
    }

    fn draw(&mut self, logits: &[f32], position: usize) -> Option<u32> {
        let max = logits[argmax(logits)? as usize].min(f32::MAX);
        let temperature = self.params.temperature;
        // exp of this is the weight beside the best token's weight of 1; min-p is a bound on the same scale.
        let scaled = |logit: f32| (logit.min(f32::MAX) - max) / temperature;
        let floor = if self.params.min_p > 0.0 { self.params.min_p.ln() } else { f32::NEG_INFINITY };
        self.candidates.clear();
        self.candidates.extend(logits.iter().enumerate().filter_map(|(id, &logit)| {
            let logit = scaled(logit);
            let is_possible = logit > f32::NEG_INFINITY && logit >= floor;
            is_possible.then_some(Candidate { id: id as u32, logit })
        }));
        if let Some(top_k) = self.params.top_k.filter(|&k| k > 0) {
            keep_best(&mut self.candidates, top_k as usize);
        }
        if self.params.top_p < 1.0 {
            keep_nucleus(&mut self.candidates, self.params.top_p);
        }
        pick(&self.candidates, random::unit(self.params.seed, position as u64))
    }

    fn observe(&mut self, id: u32) {
        self.num_output += 1;
        if self.params.repetition_penalty != 1.0 {
            self.seen.insert(id);
        }
        if self.params.frequency_penalty != 0.0 || self.params.presence_penalty != 0.0 {
            *self.output_counts.entry(id).or_insert(0) += 1;
        }
    }
}

/// The best token, lowest id among equals; `None` when every logit is minus infinity.
fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut best_logit = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best_logit {
            best_logit = logit;
            best = Some(id as u32);
        }
    }
    best
}

/// Best first; ids break ties, so that the order is total and a draw is reproducible.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Cuts to the `count` best, in order.
fn keep_best(candidates: &mut Vec<Candidate>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, best_first);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(best_first);
}

/// Cuts to the smallest set of best tokens whose probability reaches `top_p`, at least one.
///
/// Grows a sorted head until the set lies inside of it, since it is nearly always a small part of the vocabulary.
fn keep_nucleus(candidates: &mut Vec<Candidate>, top_p: f32) {
    let total: f64 = candidates.iter().map(|c| weight(*c)).sum();
    let wanted = total * f64::from(top_p);
    let mut head = 64;
    loop {
        if head < candidates.len() {
            candidates.select_nth_unstable_by(head, best_first);
        }
        let sorted = head.min(candidates.len());
        candidates[..sorted].sort_unstable_by(best_first);
        let mut sum = 0.0;
        for index in 0..sorted {
            sum += weight(candidates[index]);
            if sum >= wanted {
                candidates.truncate(index + 1);
                return;
            }
        }
        if sorted == candidates.len() {
            return;
        }
        head *= 4;
    }
}

/// Inverse transform sampling: the first candidate whose cumulated weight exceeds `unit` of the total.
fn pick(candidates: &[Candidate], unit: f64) -> Option<u32> {
    let total: f64 = candidates.iter().map(|c| weight(*c)).sum();
    let target = unit * total;
    let mut sum = 0.0;
    for candidate in candidates {
        sum += weight(*candidate);
        if sum > target {
            return Some(candidate.id);
        }
    }
    // Rounding at the far end.
    candidates.last().map(|candidate| candidate.id)
}

fn weight(candidate: Candidate) -> f64 {
    f64::from(candidate.logit).exp()
}
