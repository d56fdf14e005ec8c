//! Messages to the turn store.

use actix::Message;
use keepsake_tiers::TurnRecord;

use super::session::{TenantId, TurnError, TurnId};

/// Make a finished turn durable; answered once it is on disk. Credit: the turn's permit.
#[derive(Debug, Message)]
#[rtype(result = "Result<(), TurnError>")]
pub struct SaveTurn(pub TurnRecord);

/// Read the records from a conversation's root to this turn, in order. Credit: the request's own.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<Vec<TurnRecord>, TurnError>")]
pub struct LoadTurns {
    pub tenant: TenantId,
    pub id: TurnId,
}

/// Read one turn.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<TurnRecord, TurnError>")]
pub struct LoadTurn {
    pub tenant: TenantId,
    pub id: TurnId,
}

/// Forget a turn, durably; its tokens live while descendants do.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<(), TurnError>")]
pub struct DeleteTurn {
    pub tenant: TenantId,
    pub id: TurnId,
}
