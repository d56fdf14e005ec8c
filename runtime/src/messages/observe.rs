//! The question that every actor answers.

use actix::Message;

/// Asks for a small snapshot of the receiver's state: numbers and names, never text or tokens.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "serde_json::Value")]
pub struct Observe;
