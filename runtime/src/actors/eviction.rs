//! Owns: the rules of what moves down. Receives: `PressureRose`. Sends: `ProposeEvictions`. Never: moves anything itself, or holds a
//! view of the directory older than the message at hand.

use actix::{Actor, Context, Handler, MessageResult, Recipient};

use crate::core::{decide, Proposal};
use crate::messages::eviction::PressureRose;
use crate::messages::observe::Observe;
use crate::messages::scheduler::ProposeEvictions;

pub struct EvictionActor {
    scheduler: Recipient<ProposeEvictions>,
    num_rounds: u64,
    num_proposals: [u64; 4],
}

impl EvictionActor {
    pub fn new(scheduler: Recipient<ProposeEvictions>) -> Self {
        Self { scheduler, num_rounds: 0, num_proposals: [0; 4] }
    }
}

impl Actor for EvictionActor {
    type Context = Context<Self>;
}

impl Handler<PressureRose> for EvictionActor {
    type Result = ();

    fn handle(&mut self, PressureRose(pressure): PressureRose, _: &mut Self::Context) {
        let proposals = decide(&pressure);
        self.num_rounds += 1;
        for proposal in &proposals {
            self.num_proposals[kind(proposal)] += 1;
        }
        self.scheduler.do_send(ProposeEvictions(proposals));
    }
}

impl Handler<Observe> for EvictionActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let [swap_outs, spills, removals, drops] = self.num_proposals;
        MessageResult(serde_json::json!({
            "rounds": self.num_rounds,
            "proposed": { "swap_outs": swap_outs, "spills": spills, "removals": removals, "drops": drops },
        }))
    }
}

fn kind(proposal: &Proposal) -> usize {
    match proposal {
        Proposal::SwapOut { .. } => 0,
        Proposal::Spill { .. } => 1,
        Proposal::Remove { .. } => 2,
        Proposal::Drop { .. } => 3,
    }
}
