//! Tiers around tiers: faults, counts and slowness for tests and measurements.
//!
//! A decorator passes everything on, and every byte goes through it: it hides the inner tier's host memory
//! (`host_addressable` is off), so movers read and write instead of copying past it.

mod counting;
mod faulty;
mod throttled;

pub use counting::{Counting, Counts};
pub use faulty::{Effect, Fault, Faults, Faulty, Op};
pub use throttled::Throttled;

use crate::Capability;

fn seen_from_outside(inner: Capability) -> Capability {
    Capability { host_addressable: false, ..inner }
}
