//! Every message that actors exchange, one file per receiver.
//!
//! Commands are imperatives, events are past tense. A message owns its data and carries ids, never references to state. Mailboxes
//! bound nothing, so each message says whose credit it holds.

pub mod eviction;
pub mod observe;
pub mod scheduler;
pub mod session;
pub mod store;
pub mod tier;
pub mod worker;
