//! Messages to the eviction actor.

use actix::Message;

use crate::core::Pressure;

/// Room is short somewhere. Credit: the scheduler has at most one of these out, until `ProposeEvictions` answers it.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct PressureRose(pub Pressure);
