//! Prefill and decode rates: medians over repetitions, each with its own random tokens so that nothing is reused.

use std::time::Duration;

use anyhow::{bail, Context};
use clap::Args;
use futures_util::future::try_join_all;
use keepsake_config::Config;
use rand::rngs::StdRng;
use rand::SeedableRng;
use serde::Serialize;

use super::measure::{Bench, Play, Played};
use super::report::{median, print, round};

/// Enough to start decoding from, too little to matter.
const DECODE_PROMPT_TOKENS: usize = 16;

#[derive(Debug, Args)]
pub struct RatesArgs {
    /// Prompt tokens of the prefill measurement
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill: u32,
    /// Tokens that each stream of the decode measurement generates
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    pub decode: u32,
    /// Numbers of streams to decode at the same time, separated by commas
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1, 8], value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub streams: Vec<u32>,
    /// Measured repetitions, after one that is not; the median counts
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(5..))]
    pub runs: u32,
}

impl RatesArgs {
    /// All streams of a measurement are to run, none to wait.
    pub(super) fn make_room(&self, config: &mut Config) {
        let most = self.streams.iter().copied().max().unwrap_or(1) as usize;
        let scheduler = &mut config.scheduler;
        scheduler.max_running = scheduler.max_running.max(most);
        scheduler.step_tokens = scheduler.step_tokens.max(scheduler.max_running);
    }
}

/// One line of output.
#[derive(Debug, Serialize)]
struct Rate {
    measured: &'static str,
    device: String,
    model: String,
    streams: u32,
    prompt_tokens: u32,
    /// Of each stream.
    output_tokens: u32,
    runs: usize,
    /// The median of the runs: prompt tokens a second, or output tokens a second of all streams together.
    tokens_per_second: f64,
    tokens_per_second_min: f64,
    tokens_per_second_max: f64,
    ttft_seconds: f64,
}

pub(super) async fn run(bench: &Bench, args: &RatesArgs, seed: u64) -> anyhow::Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let prefill = Measurement { streams: 1, prompt: args.prefill, output: 1 };
    print(&prefill.repeat(bench, args.runs, &mut random, "prefill", prefill_rate).await?)?;
    for &streams in &args.streams {
        let decode = Measurement { streams, prompt: DECODE_PROMPT_TOKENS as u32, output: args.decode };
        print(&decode.repeat(bench, args.runs, &mut random, "decode", decode_rate).await?)?;
    }
    Ok(())
}

/// Several streams that start at the same time.
struct Measurement {
    streams: u32,
    prompt: u32,
    output: u32,
}

impl Measurement {
    async fn repeat(
        &self,
        bench: &Bench,
        runs: u32,
        random: &mut StdRng,
        measured: &'static str,
        rate: fn(&[Timing]) -> f64,
    ) -> anyhow::Result<Rate> {
        let mut rates = Vec::new();
        let mut ttfts = Vec::new();
        for run in 0..=runs {
            let timings = self.once(bench, random).await.with_context(|| format!("{measured} failed"))?;
            // The first run touches memory and starts threads.
            if run > 0 {
                rates.push(rate(&timings));
                ttfts.extend(timings.iter().map(|timing| timing.ttft.as_secs_f64()));
            }
        }
        let of = |values: &[f64], digits| round(median(values).unwrap_or(f64::NAN), digits);
        Ok(Rate {
            measured,
            device: bench.device.clone(),
            model: bench.gateway.model().name.clone(),
            streams: self.streams,
            prompt_tokens: self.prompt,
            output_tokens: self.output,
            runs: rates.len(),
            tokens_per_second: of(&rates, 2),
            tokens_per_second_min: round(rates.iter().copied().fold(f64::INFINITY, f64::min), 2),
            tokens_per_second_max: round(rates.iter().copied().fold(0.0, f64::max), 2),
            ttft_seconds: of(&ttfts, 4),
        })
    }

    async fn once(&self, bench: &Bench, random: &mut StdRng) -> anyhow::Result<Vec<Timing>> {
        let mut streams = Vec::new();
        for _ in 0..self.streams {
            let prompt = bench.random_tokens(random, self.prompt as usize);
            streams.push(bench.play(Play { parent: None, prompt, output: self.output, store: false }));
        }
        let played = try_join_all(streams).await?;
        if let Some(short) = played.iter().find(|played| played.usage.output_tokens < self.output) {
            let (limit, got) = (bench.gateway.model().max_context, short.usage.output_tokens);
            bail!("a reply ended after {got} tokens: the context is limited to {limit} tokens");
        }
        Ok(played.iter().map(Timing::of).collect())
    }
}

/// When the tokens of one stream came.
#[derive(Clone, Debug)]
struct Timing {
    prompt_tokens: u32,
    output_tokens: u32,
    ttft: Duration,
    elapsed: Duration,
}

impl Timing {
    fn of(played: &Played) -> Self {
        Self {
            prompt_tokens: played.usage.input_tokens,
            output_tokens: played.usage.output_tokens,
            // Not the first text: a token can be half a character.
            ttft: played.usage.ttft,
            elapsed: played.elapsed(),
        }
    }
}

fn prefill_rate(streams: &[Timing]) -> f64 {
    let rate = |timing: &Timing| f64::from(timing.prompt_tokens) / timing.ttft.as_secs_f64();
    streams.iter().map(rate).sum()
}

/// The sum of the streams' own rates, each from its first token to its last: prefill is not in it.
fn decode_rate(streams: &[Timing]) -> f64 {
    let rate = |timing: &Timing| {
        let decoding = timing.elapsed.saturating_sub(timing.ttft);
        f64::from(timing.output_tokens - 1) / decoding.as_secs_f64()
    };
    streams.iter().map(rate).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_leave_out_what_they_do_not_measure() {
        let stream = Timing {
            prompt_tokens: 512,
            output_tokens: 101,
            ttft: Duration::from_secs(2),
            elapsed: Duration::from_secs(7),
        };
        assert_eq!(prefill_rate(std::slice::from_ref(&stream)), 256.0);
        assert_eq!(decode_rate(std::slice::from_ref(&stream)), 20.0);
        assert_eq!(decode_rate(&[stream.clone(), stream]), 40.0);
    }

    #[test]
    fn streams_beyond_the_configured_batch_get_room() {
        let args = RatesArgs { prefill: 1, decode: 2, streams: vec![1, 1000], runs: 5 };
        let mut config = Config::default();
        args.make_room(&mut config);
        assert_eq!((config.scheduler.max_running, config.scheduler.step_tokens), (1000, 1000));
        let mut config = Config::default();
        RatesArgs { streams: vec![8], ..args }.make_room(&mut config);
        assert_eq!(config, Config::default());
    }
}
