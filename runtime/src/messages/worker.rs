//! Messages to the device worker.

use actix::Message;

use crate::core::StepPlan;

/// Run one step. Credit: one of `scheduler.steps_in_flight`, held by the scheduler until the step's `StepDone`.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct RunStep(pub StepPlan);
