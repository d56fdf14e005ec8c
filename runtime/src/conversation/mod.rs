//! A conversation's tokens: what a turn appends to the log, and what stays of a reply. Pure: no actors, no clock, no disk.
//!
//! Past tokens are never tokenised again. A turn's prompt is a delta rendered after the parent's reply, or, when that cannot be (the
//! template is not prefix-stable, the instructions changed), a whole render around the replies' original ids: a new root.

mod document;
mod prompt;
mod reply;

#[cfg(test)]
mod tests;

pub use document::{Kind, Node, TurnDocument};
pub use prompt::{build, PromptTokens};
pub use reply::{Reply, ReplyProgress};
