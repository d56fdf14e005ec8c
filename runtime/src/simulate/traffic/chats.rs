//! Users who talk: a turn follows the reply before it after a pause.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::trace::Conversation;

use super::super::log::Log;
use super::{Pace, Traffic, Turn};

pub(super) struct Chats {
    next: Box<dyn Iterator<Item = Conversation> + Send>,
    pace: Pace,
    /// No conversation begins later.
    until: f64,
    max_context: usize,
    seed: u64,
    /// All that have begun; those that ended keep no turns.
    begun: Vec<Begun>,
}

struct Begun {
    turns: Vec<crate::trace::TraceTurn>,
    /// The turn that is being played.
    at: usize,
}

impl Chats {
    pub(super) fn new(
        next: Box<dyn Iterator<Item = Conversation> + Send>,
        pace: Pace,
        until: f64,
        max_context: usize,
        seed: u64,
    ) -> Self {
        Self { next, pace, until, max_context, seed, begun: Vec::new() }
    }

    /// The first turn of the next conversation that has any.
    fn begin(&mut self) -> Option<Turn> {
        let conversation = self.next.by_ref().find(|c| !c.turns.is_empty())?;
        self.begun.push(Begun { turns: conversation.turns, at: 0 });
        Some(self.turn(self.begun.len() - 1, 0))
    }

    fn turn(&self, source: usize, past: usize) -> Turn {
        let begun = &self.begun[source];
        let turn = &begun.turns[begun.at];
        Turn {
            source,
            log: Log::Own { seed: self.seed.wrapping_mul(1 << 20) + source as u64 },
            prompt: past + turn.input as usize,
            // The last token of a reply was never fed, so it has no K/V.
            num_past: past.saturating_sub(1),
            output: turn.output as usize,
        }
    }

    /// Conversations that begin at random moments: each is as likely as any other to be the next.
    fn scatter(&mut self, rate: f64) -> Vec<(Duration, Turn)> {
        let mut random = StdRng::seed_from_u64(self.seed ^ 0xA441_7A15);
        let mut first = Vec::new();
        let mut at = 0.0;
        let mut num_turns = 0;
        while let Some(turn) = self.begin() {
            // One conversation brings all its turns, so the mean over those so far says how many of them a rate of turns needs.
            num_turns += self.begun[turn.source].turns.len();
            let mean = num_turns as f64 / self.begun.len() as f64;
            at -= (1.0 - random.random::<f64>()).ln() * mean / rate;
            if at > self.until {
                break;
            }
            first.push((Duration::from_secs_f64(at), turn));
        }
        first
    }
}

impl Traffic for Chats {
    fn start(&mut self) -> Vec<(Duration, Turn)> {
        let (users, arrival) = match self.pace {
            Pace::TurnsPerSecond(rate) => return self.scatter(rate),
            Pace::Users { users, arrival } => (users, arrival),
        };
        let mut random = StdRng::seed_from_u64(self.seed ^ 0xA441_7A15);
        let mut first = Vec::new();
        for user in 0..users {
            let Some(turn) = self.begin() else { break };
            // Evenly, but never two in step: users who arrive in lockstep would make a wave that lasts.
            let at = arrival * (user as f64 + random.random::<f64>()) / users as f64;
            first.push((Duration::from_secs_f64(at), turn));
        }
        first
    }

    fn ended(&mut self, turn: &Turn, completed: bool, now: Duration) -> Option<(Duration, Turn)> {
        let begun = &mut self.begun[turn.source];
        begun.at += 1;
        if completed && begun.at < begun.turns.len() {
            let think = Duration::from_secs_f64(begun.turns[begun.at].think_s);
            return Some((now + think, self.turn(turn.source, turn.prompt + turn.output)));
        }
        begun.turns = Vec::new();
        let begins_another = matches!(self.pace, Pace::Users { .. }) && now.as_secs_f64() <= self.until;
        begins_another.then(|| self.begin()).flatten().map(|turn| (now, turn))
    }

    fn max_context(&self) -> usize {
        self.max_context
    }
}
