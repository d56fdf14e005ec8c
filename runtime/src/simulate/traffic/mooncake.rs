//! Mooncake's format: requests at their times, with hash ids for blocks of 512 tokens in place of content.
//!
//! The format has no sessions. A request continues the latest earlier one that has the deepest of its hash ids. A request's last,
//! partial block has an id of its own, so a continuation has another id there; when it holds all full blocks of the earlier
//! request and is longer, it is that request's log, its reply and something new, and the partial block and the reply get the tokens
//! that the continuation has at their place. (In the published conversation trace, 3,508 of 3,959 such continuations are at least
//! as long as the earlier prompt and its reply together.)

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{bail, Context};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;

use super::super::log::{Log, BLOCK_TOKENS};
use super::{Traffic, Turn};

/// One line.
#[derive(Clone, Debug, Deserialize)]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u32>,
}

/// A request with its tokens and its past.
#[derive(Clone, Debug)]
pub struct Request {
    pub(super) at: f64,
    /// The first request of its session.
    pub(in super::super) session: usize,
    pub(super) prompt: usize,
    pub(super) output: usize,
    /// Tokens of the prompt that earlier requests computed.
    pub(in super::super) num_past: usize,
    pub(in super::super) log: Log,
}

pub(super) fn read(file: &Path) -> anyhow::Result<Vec<Request>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("--trace {}", file.display()))?;
    parse(&text).with_context(|| format!("--trace {}", file.display()))
}

pub(in super::super) fn parse(text: &str) -> anyhow::Result<Vec<Request>> {
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let number = index + 1;
        let line: Line = serde_json::from_str(line).with_context(|| format!("line {number}"))?;
        if line.input_length == 0 || line.output_length == 0 {
            bail!("line {number}: a request needs at least one token of input and one of output");
        }
        if line.hash_ids.len() != line.input_length.div_ceil(BLOCK_TOKENS) {
            bail!("line {number}: {} hash ids for {} tokens", line.hash_ids.len(), line.input_length);
        }
        if !(0.0..=1e12).contains(&line.timestamp) {
            bail!("line {number}: timestamp = {}: must be 0 to 1e12", line.timestamp);
        }
        lines.push(line);
    }
    if lines.is_empty() {
        bail!("no requests in it");
    }
    lines.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    Ok(rebuild(&lines))
}

fn rebuild(lines: &[Line]) -> Vec<Request> {
    // By hash id: the latest request that has it.
    let mut latest: HashMap<u32, usize> = HashMap::new();
    // A partial block's id, and the id of the full block that it became.
    let mut became: HashMap<u32, u32> = HashMap::new();
    let mut parents = Vec::new();
    let mut continuations: HashMap<usize, usize> = HashMap::new();
    for (index, line) in lines.iter().enumerate() {
        let depth = line.hash_ids.iter().rposition(|id| latest.contains_key(id)).map_or(0, |last| last + 1);
        let parent = depth.checked_sub(1).map(|last| latest[&line.hash_ids[last]]);
        // One block in common is a system prompt.
        let parent = parent.filter(|_| depth > 1);
        let extends = parent.is_some_and(|parent| {
            let full = lines[parent].input_length / BLOCK_TOKENS;
            depth >= full && line.input_length > lines[parent].input_length
        });
        if let Some(parent) = parent.filter(|_| extends) {
            let full = lines[parent].input_length / BLOCK_TOKENS;
            let partial = lines[parent].hash_ids.get(full);
            let is_first_continuation = !continuations.contains_key(&parent);
            // An id that is new here cannot lead back, so following `became` ends.
            let here = line.hash_ids.get(full).filter(|id| !latest.contains_key(id));
            if let (true, Some(here)) = (is_first_continuation, here) {
                continuations.insert(parent, index);
                if let Some(partial) = partial {
                    became.entry(*partial).or_insert(*here);
                }
            }
        }
        parents.push((parent, depth));
        for id in &line.hash_ids {
            latest.insert(*id, index);
        }
    }
    let resolve = |id: &u32| {
        let mut id = *id;
        while let Some(next) = became.get(&id) {
            id = *next;
        }
        id
    };
    let mut requests: Vec<Request> = Vec::new();
    for (index, (line, (parent, depth))) in lines.iter().zip(parents).enumerate() {
        let prompt = line.input_length;
        let total = prompt + line.output_length;
        let (ids, end) = match continuations.get(&index) {
            Some(next) => (&lines[*next].hash_ids, total.min(lines[*next].input_length)),
            None => (&line.hash_ids, prompt),
        };
        let is_continuation = parent.filter(|parent| continuations.get(parent) == Some(&index));
        let num_past = match is_continuation.map(|parent| &requests[parent]) {
            // The last token of a reply was never fed, so it has no K/V.
            Some(parent) => (parent.prompt + parent.output - 1).min(prompt - 1),
            None => (depth * BLOCK_TOKENS).min(prompt - 1),
        };
        requests.push(Request {
            at: line.timestamp / 1e3,
            session: parent.map_or(index, |parent| requests[parent].session),
            prompt,
            output: line.output_length,
            num_past,
            log: Log::Blocks { ids: ids.iter().map(resolve).collect(), end, own: (1 << 41) + index as u64 },
        });
    }
    requests
}

/// Plays requests at their own times, whatever became of earlier ones.
pub(super) struct Replay {
    turns: Vec<(Duration, Turn)>,
    max_context: usize,
}

impl Replay {
    /// Every session is played with probability `share`: another part of them with another seed.
    pub(super) fn new(requests: &[Request], speed: f64, share: f64, seconds: f64, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut is_played: HashMap<usize, bool> = HashMap::new();
        let mut turns = Vec::new();
        for (source, request) in requests.iter().enumerate() {
            let is_played = *is_played.entry(request.session).or_insert_with(|| random.random::<f64>() < share);
            if !is_played || request.at / speed > seconds {
                continue;
            }
            let turn = Turn {
                source,
                log: request.log.clone(),
                prompt: request.prompt,
                num_past: request.num_past,
                output: request.output,
            };
            turns.push((Duration::from_secs_f64(request.at / speed), turn));
        }
        let max_context = requests.iter().map(|r| r.prompt + r.output).max().unwrap_or(0);
        Self { turns, max_context }
    }
}

impl Traffic for Replay {
    fn start(&mut self) -> Vec<(Duration, Turn)> {
        std::mem::take(&mut self.turns)
    }

    fn ended(&mut self, _: &Turn, _: bool, _: Duration) -> Option<(Duration, Turn)> {
        None
    }

    fn max_context(&self) -> usize {
        self.max_context
    }
}
