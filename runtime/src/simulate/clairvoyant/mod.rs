//! The ceiling: eviction that knows when each chunk will be used next.
//!
//! [`Oracle`] learns from the world when turns will be sent: all of them where the trace fixes their times, the next one of each
//! conversation where users wait for replies. [`ClairvoyantPolicy`] reads it. No rule of a real server can be compared on equal terms
//! with it; it says how much there was to gain.

mod oracle;
mod policy;

use keepsake_tiers::eviction::EvictionPolicy;

use crate::core::PolicyChoice;

use super::settings::{BELADY, CLAIRVOYANT};
pub(super) use oracle::{Oracle, SharedOracle};
use policy::{ClairvoyantPolicy, Rule};

/// The policies of `keepsake_tiers`, and with an oracle those that ask it.
pub(super) fn make(choice: &PolicyChoice, oracle: Option<&SharedOracle>) -> Box<dyn EvictionPolicy> {
    let rule = match choice.name.as_str() {
        CLAIRVOYANT => Rule::CostBySecond,
        BELADY => Rule::Farthest,
        name => return keepsake_tiers::eviction::policy(name, choice.idle_cutoff).expect("checked with the settings"),
    };
    let oracle = oracle.expect("a world under a policy that looks ahead has an oracle");
    Box::new(ClairvoyantPolicy::new(rule, oracle.clone()))
}
