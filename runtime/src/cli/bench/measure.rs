//! One measured turn, and what every measurement needs.

use std::time::{Duration, Instant};

use anyhow::{bail, Context};
use keepsake_config::Config;
use keepsake_kernels::Device;
use keepsake_model::sampler::SamplingParams;
use rand::rngs::StdRng;
use rand::Rng;

use crate::gateway::Gateway;
use crate::messages::session::{Prompt, StartTurn, TenantId, TurnError, TurnEvent, TurnId, TurnUsage};

pub(super) struct Bench {
    pub(super) gateway: Gateway,
    /// What computes, in words.
    pub(super) device: String,
    /// Token ids that mean text.
    ids: Vec<u32>,
}

/// A turn to play: greedy, and generated to its length whatever the model thinks of it.
pub(super) struct Play {
    pub(super) parent: Option<TurnId>,
    pub(super) prompt: Vec<u32>,
    pub(super) output: u32,
    pub(super) store: bool,
}

pub(super) struct Played {
    pub(super) id: TurnId,
    pub(super) started: Instant,
    pub(super) ended: Instant,
    /// When each piece of text came.
    pub(super) pieces: Vec<Instant>,
    pub(super) usage: TurnUsage,
}

impl Bench {
    pub(super) fn new(gateway: Gateway, device: String) -> anyhow::Result<Self> {
        let tokenizer = gateway.tokenizer();
        let num_ids = gateway.model().vocab_size.min(tokenizer.vocab_size()) as u32;
        let ids: Vec<u32> = (0..num_ids).filter(|&id| !tokenizer.is_special(id)).collect();
        if ids.is_empty() {
            bail!("the model's vocabulary has only special tokens");
        }
        Ok(Self { gateway, device, ids })
    }

    pub(super) fn random_tokens(&self, random: &mut StdRng, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.ids[random.random_range(0..self.ids.len())]).collect()
    }

    pub(super) async fn play(&self, play: Play) -> Result<Played, TurnError> {
        let sampling =
            SamplingParams { temperature: 0.0, ignore_eos: true, min_tokens: play.output, ..SamplingParams::default() };
        let turn = StartTurn {
            tenant: TenantId::anonymous(),
            parent: play.parent,
            instructions: None,
            prompt: Prompt::Tokens(play.prompt),
            sampling,
            max_output_tokens: Some(play.output),
            stop: Vec::new(),
            store: play.store,
            echo: serde_json::Value::Null,
        };
        let started = Instant::now();
        let mut events = self.gateway.start_turn(turn).await?;
        let mut pieces = Vec::new();
        while let Some(event) = events.next().await {
            match event {
                TurnEvent::Started => {}
                TurnEvent::Delta(_) => pieces.push(Instant::now()),
                TurnEvent::Finished(outcome) => {
                    let ended = Instant::now();
                    return Ok(Played { id: events.id, started, ended, pieces, usage: outcome.usage });
                }
                TurnEvent::Failed(error) => return Err(error),
            }
        }
        Err(TurnError::Internal("a turn ended without its last event".to_owned()))
    }
}

impl Played {
    pub(super) fn elapsed(&self) -> Duration {
        self.ended - self.started
    }

    /// To the first piece of text, as a client sees it; a reply without text (half characters, special tokens) still
    /// has a first token.
    pub(super) fn ttft(&self) -> Duration {
        self.pieces.first().map_or(self.usage.ttft, |&first| first - self.started)
    }
}

/// The engine opens its own device in the same way.
pub(super) fn device_name(config: &Config) -> anyhow::Result<String> {
    let kind = crate::app::device_kind(config);
    let device = Device::open(kind, config.device.threads).context("cannot open the device")?;
    Ok(device.describe())
}
