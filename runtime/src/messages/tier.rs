//! Messages to a tier.

use actix::Message;

use crate::core::Command;

/// Carry one command out; a `MoveEnded` with its id answers it. Credit: one of the tier's moves in flight, held by the scheduler.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct CarryOut(pub Command);
