//! When conversations come back, learnt while serving: a hazard rate by class and idle time.
//!
//! Every finished turn begins a *pause*; the next turn of the conversation ends it. A pause passes through bins of idle time that
//! double in width. For each bin: how many pauses came back in it, and how many seconds pauses spent in it. The ratio is the rate of
//! return there (the life-table estimate; a pause that has not come back counts for the time it was watched, so dead conversations
//! lower the rate of late bins without ever being declared dead).
//!
//! From the rates of a class follows what a chunk idle for `T` is worth a unit of time: the best ratio, over all horizons `h`, of the
//! chance that the conversation returns within `h` to the time the chunk is expected to be held until then. (Holding until `h` and
//! giving up is the policy; the best ratio is its Gittins index.) For a single exponential that is the rate itself; for a mixture of
//! live and dead conversations it falls with `T`, as `1 / T` does.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Duration;

/// A kind of conversation, whose members are taken to return alike: see [`Class::of`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Class(pub u16);

/// Turn numbers 1, 2, 3-4, 5-8, 9-16 and later ones.
const TURN_BUCKETS: u16 = 6;
/// Tenants beyond these share classes.
const TENANTS: u16 = 16;
const CLASSES: usize = (TURN_BUCKETS * TENANTS) as usize;
/// Bin `b` ends at `2^b` seconds; bin 0 begins at 0.
const BINS: usize = 16;
/// Pauses remembered a class; older ones are counted as far as they were watched.
const MAX_PAUSES: usize = 1 << 12;
/// Seconds of doubt: what a bin counts before anything was seen, a return in about the time it covers.
const PRIOR_RETURNS: f64 = 0.5;
/// Once a bin has seen so many returns, old ones count half: behaviour changes with the hour.
const MAX_RETURNS: f64 = 2048.0;
/// Recompute a class's values after so many pauses.
const REFRESH: u32 = 64;
/// Idle times for which values are kept: four in a power of two, from 1/16 s on.
const STEPS: usize = 4 * (BINS + 4);

impl Class {
    /// `tenant` is any number that is the same for all of a tenant's conversations; `turn` counts from 1.
    pub fn of(tenant: u64, turn: u32) -> Class {
        let bucket = (32 - turn.max(1).saturating_sub(1).leading_zeros()).min(u32::from(TURN_BUCKETS) - 1) as u16;
        Class((tenant % u64::from(TENANTS)) as u16 * TURN_BUCKETS + bucket)
    }
}

/// Pauses that ended and pauses that last, by class.
#[derive(Debug)]
pub struct ReturnTimes {
    classes: Vec<ClassTimes>,
}

#[derive(Debug, Default)]
struct ClassTimes {
    /// In order of their begin.
    pauses: VecDeque<Pause>,
    /// How many pauses have left `pauses`, so that `matured` can count from the first one ever.
    num_forgotten: usize,
    /// By bin: pauses counted there so far, from the first one on.
    matured: [usize; BINS],
    returns: [f64; BINS],
    /// Seconds watched.
    exposure: [f64; BINS],
    num_observed: u32,
    values: RefCell<Option<Values>>,
}

#[derive(Debug)]
struct Values {
    at_observed: u32,
    rates: Box<[f64; STEPS]>,
}

#[derive(Clone, Copy, Debug)]
struct Pause {
    begin: Duration,
    /// How long it lasted, once it ended.
    length: Option<Duration>,
}

impl Default for ReturnTimes {
    fn default() -> Self {
        Self { classes: (0..CLASSES).map(|_| ClassTimes::default()).collect() }
    }
}

impl ReturnTimes {
    /// A conversation of this class finished a turn.
    pub fn paused(&mut self, class: Class, now: Duration) {
        let times = &mut self.classes[usize::from(class.0)];
        times.pauses.push_back(Pause { begin: now, length: None });
        times.num_observed += 1;
        times.mature(now);
    }

    /// A conversation of this class comes back after `idle`. Unknown pauses (of an earlier run, say) are ignored.
    pub fn returned(&mut self, class: Class, idle: Duration, now: Duration) {
        let times = &mut self.classes[usize::from(class.0)];
        let begin = now.saturating_sub(idle);
        // The clocks of pause and return need not agree to the nanosecond.
        let slack = Duration::from_millis(50);
        let from = times.pauses.partition_point(|p| p.begin + slack < begin);
        let candidates = times.pauses.iter_mut().skip(from).take_while(|p| p.begin <= begin + slack);
        if let Some(pause) = candidates.filter(|p| p.length.is_none()).min_by_key(|p| p.begin.abs_diff(begin)) {
            pause.length = Some(now.saturating_sub(pause.begin));
            times.num_observed += 1;
        }
        times.mature(now);
    }

    /// What holding a chunk of this class is worth a second, by how long it has been idle: a rate of return.
    pub fn rate(&self, class: Class, idle_seconds: f64) -> f64 {
        let times = &self.classes[usize::from(class.0)];
        let mut values = times.values.borrow_mut();
        let is_fresh = |values: &Values| times.num_observed - values.at_observed < REFRESH;
        if !values.as_ref().is_some_and(is_fresh) {
            *values = Some(Values { at_observed: times.num_observed, rates: times.rates() });
        }
        values.as_ref().map_or(0.0, |values| values.rates[step_of(idle_seconds)])
    }
}

fn step_of(idle_seconds: f64) -> usize {
    ((idle_seconds * 16.0).max(1.0).log2() * 4.0).min((STEPS - 1) as f64) as usize
}

fn idle_of(step: usize) -> f64 {
    (step as f64 / 4.0).exp2() / 16.0
}

/// Where a bin begins and ends, in seconds.
fn bin(index: usize) -> (f64, f64) {
    let begin = if index == 0 { 0.0 } else { f64::from(1u32 << (index - 1)) };
    (begin, f64::from(1u32 << index))
}

fn bin_of(seconds: f64) -> usize {
    (0..BINS).find(|b| seconds < bin(*b).1).unwrap_or(BINS - 1)
}

impl ClassTimes {
    /// Counts every pause in the bins that it has passed through by `now`.
    fn mature(&mut self, now: Duration) {
        for index in 0..BINS {
            let (begin, end) = bin(index);
            while let Some(pause) = self.pauses.get(self.matured[index].saturating_sub(self.num_forgotten)) {
                let watched = now.saturating_sub(pause.begin).as_secs_f64();
                if watched < end {
                    break;
                }
                let lasted = pause.length.map_or(watched, |length| length.as_secs_f64());
                if lasted >= begin {
                    self.exposure[index] += lasted.min(end) - begin;
                    self.returns[index] += f64::from(u8::from(lasted < end));
                }
                self.matured[index] += 1;
            }
            if self.returns[index] > MAX_RETURNS {
                self.returns[index] /= 2.0;
                self.exposure[index] /= 2.0;
            }
        }
        let last = self.matured[BINS - 1];
        while self.num_forgotten < last || self.pauses.len() > MAX_PAUSES {
            self.pauses.pop_front();
            self.num_forgotten += 1;
        }
        for matured in &mut self.matured {
            *matured = (*matured).max(self.num_forgotten);
        }
    }

    /// Returns a second in a bin. Before anything was seen: one in about the idle time, as the paper's `1 / T` has it.
    fn hazard(&self, index: usize) -> f64 {
        let (begin, end) = bin(index);
        (self.returns[index] + PRIOR_RETURNS) / (self.exposure[index] + PRIOR_RETURNS * (begin + end) / 2.0)
    }

    /// Values by idle time.
    fn rates(&self) -> Box<[f64; STEPS]> {
        let hazards: [f64; BINS] = std::array::from_fn(|index| self.hazard(index));
        let mut rates = Box::new([0.0; STEPS]);
        for (step, rate) in rates.iter_mut().enumerate() {
            *rate = best_ratio(&hazards, idle_of(step));
        }
        // Lists keep chunks of a class by idle time: a value that rose with it would hide behind one that did not.
        for step in 1..STEPS {
            rates[step] = rates[step].min(rates[step - 1]);
        }
        rates
    }
}

/// The best chance of return over expected time held, over horizons at bin ends.
fn best_ratio(hazards: &[f64; BINS], idle: f64) -> f64 {
    let (mut absent, mut held, mut best) = (1.0, 0.0, 0.0f64);
    for (index, hazard) in hazards.iter().enumerate().skip(bin_of(idle)) {
        let (begin, end) = bin(index);
        let width = (end - begin.max(idle)).max(0.0);
        let stays = (-hazard * width).exp();
        held += absent * (1.0 - stays) / hazard;
        absent *= stays;
        best = best.max((1.0 - absent) / held.max(f64::MIN_POSITIVE));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn classes_differ_by_tenant_and_turn() {
        let turns = [1, 2, 3, 4, 5, 9, 17, 99].map(|turn| Class::of(0, turn).0);
        assert_eq!(turns, [0, 1, 2, 2, 3, 4, 5, 5]);
        assert_ne!(Class::of(1, 1), Class::of(0, 1));
        assert!(usize::from(Class::of(u64::MAX, u32::MAX).0) < CLASSES);
    }

    #[test]
    fn unseen_classes_are_valued_like_one_over_idle_time() {
        let times = ReturnTimes::default();
        for idle in [2.0, 30.0, 500.0] {
            let value = times.rate(Class::default(), idle);
            assert!((0.2 / idle..5.0 / idle).contains(&value), "{idle}: {value}");
        }
    }

    /// Nine in ten come back after about ten seconds, the tenth never: young pauses are worth about a tenth a second, old ones little.
    #[test]
    fn learns_a_mixture_of_live_and_dead() {
        let mut times = ReturnTimes::default();
        let class = Class::of(0, 2);
        let mut waiting: Vec<(f64, f64)> = Vec::new();
        for step in 0..4_000 {
            let now = f64::from(step);
            waiting.retain(|&(begin, length)| {
                let is_due = begin + length <= now;
                if is_due {
                    times.returned(class, seconds(now - begin), seconds(now));
                }
                !is_due
            });
            times.paused(class, seconds(now));
            if step % 10 != 0 {
                // Quantiles of an exponential with mean 10 s, in a fixed order.
                let quantile = (f64::from(step * 37 % 100) + 0.5) / 100.0;
                waiting.push((now, -10.0 * (1.0 - quantile).ln()));
            }
        }
        let [young, old, dead] = [1.0, 40.0, 1000.0].map(|idle| times.rate(class, idle));
        assert!((0.06..0.16).contains(&young), "{young}");
        assert!(old < young / 2.0, "{old}");
        assert!(dead < young / 200.0, "{dead}");
        // Others are not touched by it.
        assert_eq!(times.rate(Class::of(0, 9), 1000.0), ReturnTimes::default().rate(Class::default(), 1000.0));
    }

    #[test]
    fn remembers_no_more_than_it_must() {
        let mut times = ReturnTimes::default();
        for step in 0..200_000u32 {
            times.paused(Class::default(), seconds(f64::from(step) / 100.0));
        }
        assert!(times.classes[0].pauses.len() <= MAX_PAUSES);
    }
}
