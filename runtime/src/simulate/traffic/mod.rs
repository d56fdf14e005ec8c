//! Who sends which turn when.

mod chats;
mod generate;
mod mooncake;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::trace::Conversation;

use super::log::Log;
use super::SimulateError;
use chats::Chats;
pub use generate::Shape;
#[cfg(test)]
pub(super) use mooncake::parse as mooncake_requests;
use mooncake::{Replay, Request};

/// One turn, as it is sent.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    /// Its place in the traffic's own books.
    pub(super) source: usize,
    pub(super) log: Log,
    /// Tokens of the log that are sent.
    pub(super) prompt: usize,
    /// Of those, what earlier turns computed.
    pub(super) num_past: usize,
    pub(super) output: usize,
}

/// Traffic reacts to what became of its turns, as users do.
pub(super) trait Traffic {
    /// Turns whose time is known from the start.
    fn start(&mut self) -> Vec<(Duration, Turn)>;

    /// The turn that the end of this one leads to. `completed`: its reply came; else its user gave up.
    fn ended(&mut self, turn: &Turn, completed: bool, now: Duration) -> Option<(Duration, Turn)>;

    /// The longest log it will send or receive.
    fn max_context(&self) -> usize;
}

/// Who decides when a conversation begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// So many users, the first turns spread over `arrival` seconds; each takes the next conversation when one has ended.
    Users { users: usize, arrival: f64 },
    /// Conversations begin at random moments, so that about this many turns are sent a second.
    TurnsPerSecond(f64),
}

/// What is played.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Conversations of a file, in its order.
    Trace { conversations: Arc<Vec<Conversation>>, pace: Pace },
    /// Conversations made up from a seed, without an end.
    Generated { shape: Shape, pace: Pace, seconds: f64 },
    /// Requests at their own times, `speed` times as fast; each session of them with probability `share`.
    Requests { requests: Arc<Vec<Request>>, speed: f64, share: f64, seconds: f64 },
}

impl Workload {
    /// A file in the format of `chat_trace.py`.
    pub fn chat_trace(file: &Path, pace: Pace) -> anyhow::Result<Self> {
        Ok(Self::Trace { conversations: Arc::new(crate::trace::read(file)?), pace })
    }

    /// A file in Mooncake's format.
    pub fn mooncake(file: &Path, speed: f64, share: f64, seconds: f64) -> anyhow::Result<Self> {
        Ok(Self::Requests { requests: Arc::new(mooncake::read(file)?), speed, share, seconds })
    }

    pub(super) fn traffic(&self, seed: u64) -> Result<Box<dyn Traffic>, SimulateError> {
        let refuse = |message: &str| Err(SimulateError::Settings(message.to_owned()));
        Ok(match self {
            Self::Trace { pace, .. } | Self::Generated { pace, .. } if !pace.is_valid() => {
                return refuse("--users and --turns-per-second must be above 0, --arrival 0 to 1e9");
            }
            Self::Requests { speed, share, .. } if *speed <= 0.0 || !(0.0..=1.0).contains(share) => {
                return refuse("--speed must be above 0, --share 0 to 1");
            }
            Self::Trace { conversations, pace } => {
                let max_context = conversations.iter().map(|c| c.turns.iter().map(|t| t.input + t.output).sum::<u32>());
                let max_context = max_context.max().unwrap_or(0) as usize;
                let conversations = conversations.clone();
                let next = (0..conversations.len()).map(move |index| conversations[index].clone());
                Box::new(Chats::new(Box::new(next), *pace, f64::MAX, max_context, seed))
            }
            Self::Generated { shape, pace, seconds } => {
                let conversations = generate::Conversations::new(*shape, *seconds, seed);
                Box::new(Chats::new(Box::new(conversations), *pace, *seconds, shape.max_context(*seconds), seed))
            }
            Self::Requests { requests, speed, share, seconds } => {
                Box::new(Replay::new(requests, *speed, *share, *seconds, seed))
            }
        })
    }
}

impl Pace {
    fn is_valid(self) -> bool {
        match self {
            Pace::Users { users, arrival } => users > 0 && (0.0..=1e9).contains(&arrival),
            Pace::TurnsPerSecond(rate) => rate > 0.0 && rate.is_finite(),
        }
    }
}
