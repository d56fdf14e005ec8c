//! What work costs on the device in use: given to the core, measured by `calibrate`, so the simulator can run with any machine's.

use keepsake_tiers::eviction::CostCurve;
use serde::{Deserialize, Serialize};

/// Measured costs, in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// A step, whatever its rows.
    pub step: f64,
    /// One chunk of a prompt beyond `step`, by the context length that its last token attends to.
    pub chunk: CostCurve,
    /// One decode row beyond `step`, by its context length.
    pub decode_row: CostCurve,
    /// By tier below the device, in order.
    pub tiers: Vec<TierCosts>,
}

/// Copies between the device and a tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierCosts {
    /// From the tier to the device.
    pub load: RouteCost,
    /// From the device to the tier.
    pub store: RouteCost,
}

/// A route between two tiers: the first chunk arrives after `latency + chunk`, each further one after `chunk` more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteCost {
    pub latency: f64,
    pub chunk: f64,
}

impl Costs {
    /// Guesses for a machine that nobody measured: recompute is dear beside a copy from memory, and cheaper than a slow disk.
    pub fn unmeasured(num_tiers: usize) -> Self {
        let copy = RouteCost { latency: 1e-4, chunk: 1e-4 };
        Self {
            step: 5e-3,
            chunk: CostCurve::new(vec![(32, 10e-3), (8192, 20e-3)]).expect("ascending and positive"),
            decode_row: CostCurve::new(vec![(32, 1e-3), (8192, 4e-3)]).expect("ascending and positive"),
            tiers: vec![TierCosts { load: copy, store: copy }; num_tiers],
        }
    }
}
