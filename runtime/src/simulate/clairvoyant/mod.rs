//! The ceiling: eviction that knows when each chunk will be used next.
//!
//! [`Oracle`] learns from the world when turns will be sent: all of them where the trace fixes their times, the next one of each
//! conversation where users wait for replies. [`ClairvoyantPolicy`] reads it. No rule of a real server can be compared on equal terms
//! with it; it says how much there was to gain.

mod oracle;
mod policy;

use std::sync::Arc;

use keepsake_tiers::eviction::EvictionPolicy;

use crate::core::PolicyFactory;

use super::settings::{BELADY, CLAIRVOYANT};
pub(super) use oracle::{Oracle, SharedOracle};
use policy::{ClairvoyantPolicy, Rule};

/// The policies of `keepsake_tiers`, and with an oracle those that ask it.
pub(super) fn factory(oracle: Option<SharedOracle>) -> PolicyFactory {
    PolicyFactory(Arc::new(move |name| {
        let rule = match name {
            CLAIRVOYANT => Rule::CostBySecond,
            BELADY => Rule::Farthest,
            _ => return keepsake_tiers::eviction::policy(name),
        };
        let oracle = oracle.clone()?;
        Some(Box::new(ClairvoyantPolicy::new(rule, oracle)) as Box<dyn EvictionPolicy>)
    }))
}
