//! Copies in time: each tier has a lane a direction, and a lane moves one chunk after another.

use std::time::Duration;

use crate::core::{Command, CommandKind, Costs, TierIndex};

/// What each of two directions keeps of its rate while both run (PCIe 4, measured: 18-20% less each way).
const SHARED_RATE: f64 = 0.8;

#[derive(Clone, Copy, Default)]
struct Lane {
    /// When the last copy on it ends.
    free_at: Duration,
}

#[derive(Clone, Default)]
struct TierLanes {
    loads: Lane,
    stores: Lane,
}

pub(super) struct Lanes {
    tiers: Vec<TierLanes>,
    costs: Costs,
    num_loads: usize,
}

impl Lanes {
    pub(super) fn new(costs: &Costs, num_tiers: usize) -> Self {
        Self { tiers: vec![TierLanes::default(); num_tiers], costs: costs.clone(), num_loads: 0 }
    }

    /// Puts a command at the end of its lane; returns when it ends.
    pub(super) fn start(&mut self, command: &Command, now: Duration) -> Duration {
        match command.kind {
            CommandKind::Load { from: TierIndex(tier), .. } => {
                self.num_loads += 1;
                let TierLanes { loads, stores } = &mut self.tiers[tier];
                loads.append(now, self.costs.tiers[tier].load, stores)
            }
            CommandKind::Prefetch { from: TierIndex(tier), .. } => {
                let TierLanes { loads, stores } = &mut self.tiers[tier];
                loads.append(now, self.costs.tiers[tier].load, stores)
            }
            CommandKind::SwapOut { to: TierIndex(tier), .. } | CommandKind::Spill { to: TierIndex(tier), .. } => {
                let TierLanes { loads, stores } = &mut self.tiers[tier];
                stores.append(now, self.costs.tiers[tier].store, loads)
            }
            CommandKind::Remove { .. } => now,
        }
    }

    pub(super) fn end(&mut self, command: &Command) {
        self.num_loads -= usize::from(matches!(command.kind, CommandKind::Load { .. }));
    }

    /// Loads under way.
    pub(super) fn num_loads(&self) -> usize {
        self.num_loads
    }
}

impl Lane {
    fn append(&mut self, now: Duration, cost: crate::core::RouteCost, opposite: &Lane) -> Duration {
        let is_idle = self.free_at <= now;
        let start = self.free_at.max(now);
        // Decided when the copy is queued: copies queued the other way later do not slow this one.
        let rate = if opposite.free_at > start { SHARED_RATE } else { 1.0 };
        let latency = if is_idle { cost.latency } else { 0.0 };
        self.free_at = start + Duration::from_secs_f64(latency + cost.chunk / rate);
        self.free_at
    }
}
