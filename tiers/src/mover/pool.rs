//! The threads and queues of the mover.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use keepsake_kernels::KvLayout;
use parking_lot::{Condvar, Mutex};

use super::copy::copy_chunk;
use super::staging::StagingPool;
use super::ticket::TicketEntry;
use super::{Move, MoveError, MoveOutcome, MoveRequest, Mover, Ticket};
use crate::{Result, TierError};

/// Sizes of a [`MoverPool`].
#[derive(Clone, Copy, Debug)]
pub struct MoverConfig {
    /// Threads for copies between memories (swap-in before swap-out).
    pub host_threads: usize,
    /// Threads for copies that touch a durable tier (reads before writes).
    pub disk_threads: usize,
    /// Moves that may wait in each of the two queues.
    pub queue_moves: usize,
    /// Chunk-sized buffers for copies whose ends cannot address each other; this memory counts beside the tiers.
    pub staging_buffers: usize,
}

impl Default for MoverConfig {
    fn default() -> Self {
        Self { host_threads: 1, disk_threads: 2, queue_moves: 1024, staging_buffers: 4 }
    }
}

/// Two lanes of named threads: one for memory, one for disks, so that a slow disk never holds a swap-in up.
pub struct MoverPool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    layout: KvLayout,
    staging: StagingPool,
    host_lane: Lane,
    disk_lane: Lane,
}

impl MoverPool {
    pub fn new(layout: KvLayout, config: MoverConfig) -> Result<Self> {
        let shared = Arc::new(Shared {
            staging: StagingPool::new(layout.chunk_bytes(), config.staging_buffers),
            layout,
            host_lane: Lane::new(config.queue_moves),
            disk_lane: Lane::new(config.queue_moves),
        });
        let pool = Self { shared: Arc::clone(&shared), threads: Mutex::new(Vec::new()) };
        type Choose = fn(&Shared) -> &Lane;
        let lanes: [(&str, usize, Choose); 2] = [
            ("mover-host", config.host_threads, |shared| &shared.host_lane),
            ("mover-disk", config.disk_threads, |shared| &shared.disk_lane),
        ];
        for (name, num_threads, lane) in lanes {
            for index in 0..num_threads.max(1) {
                let shared = Arc::clone(&shared);
                let thread = std::thread::Builder::new()
                    .name(format!("{name}-{index}"))
                    .spawn(move || run(&shared, lane(&shared)))
                    .map_err(|e| TierError::io(&Arc::from("mover"), "start a thread", e))?;
                pool.threads.lock().push(thread);
            }
        }
        Ok(pool)
    }

    /// Moves that wait, in both lanes together.
    pub fn num_queued(&self) -> usize {
        self.shared.host_lane.len() + self.shared.disk_lane.len()
    }

    /// Memory that staging buffers may take.
    pub fn staging_bytes(layout: &KvLayout, config: &MoverConfig) -> u64 {
        layout.chunk_bytes() as u64 * config.staging_buffers.max(1) as u64
    }

    /// Takes nothing new, lets queued moves finish until the deadline, ends the others as [`MoveError::Closed`] and
    /// joins the threads. A copy that is running is never torn. Calling it again does nothing.
    pub fn close(&self, deadline: Instant) {
        for lane in [&self.shared.host_lane, &self.shared.disk_lane] {
            for request in lane.close(deadline) {
                finish(request, Duration::ZERO, |_, _, _| Err(MoveError::Closed));
            }
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        let this_thread = std::thread::current().id();
        for thread in threads {
            // The last owner may be a completion callback, which runs on one of these threads.
            if thread.thread().id() == this_thread {
                continue;
            }
            if thread.join().is_err() {
                tracing::error!("a mover thread panicked");
            }
        }
    }

    #[cfg(test)]
    pub(super) fn num_staging_out(&self) -> usize {
        self.shared.staging.num_out()
    }
}

impl Drop for MoverPool {
    fn drop(&mut self) {
        self.close(Instant::now());
    }
}

impl Mover for MoverPool {
    fn submit(&self, request: MoveRequest) -> Result<(), MoveRequest> {
        self.shared.lane(&request).push(request, false)
    }

    fn submit_all(&self, moves: Vec<Move>) -> Ticket {
        let (sender, outcomes) = crossbeam_channel::bounded(moves.len());
        let mut entries = Vec::with_capacity(moves.len());
        for (index, Move { from, to }) in moves.into_iter().enumerate() {
            entries.push(TicketEntry {
                key: *to.key(),
                from: from.tier_name(),
                to: to.tier_name(),
                bytes: to.meta().bytes,
            });
            let sender = sender.clone();
            let request = MoveRequest::new(from, to, move |outcome| {
                // The channel holds one message a move; a failed send means that nobody waits any more.
                let _ = sender.send((index, outcome));
            });
            if let Err(request) = self.shared.lane(&request).push(request, true) {
                finish(request, Duration::ZERO, |_, _, _| Err(MoveError::Closed));
            }
        }
        Ticket { outcomes, moves: entries }
    }
}

impl Shared {
    fn lane(&self, request: &MoveRequest) -> &Lane {
        if request.from.capability().durable || request.to.capability().durable {
            &self.disk_lane
        } else {
            &self.host_lane
        }
    }
}

/// A bounded queue in two ranks: what a waiting request needs goes before what only makes room.
struct Lane {
    queue: Mutex<Queue>,
    changed: Condvar,
    limit: usize,
}

#[derive(Default)]
struct Queue {
    inward: VecDeque<MoveRequest>,
    outward: VecDeque<MoveRequest>,
    closed: bool,
}

impl Lane {
    fn new(limit: usize) -> Self {
        Self { queue: Mutex::new(Queue::default()), changed: Condvar::new(), limit: limit.max(1) }
    }

    fn len(&self) -> usize {
        self.queue.lock().len()
    }

    #[allow(clippy::result_large_err, reason = "the request itself is handed back")]
    fn push(&self, request: MoveRequest, wait: bool) -> Result<(), MoveRequest> {
        let mut queue = self.queue.lock();
        while wait && queue.len() >= self.limit && !queue.closed {
            self.changed.wait(&mut queue);
        }
        if queue.closed || queue.len() >= self.limit {
            return Err(request);
        }
        if is_inward(&request) {
            queue.inward.push_back(request);
        } else {
            queue.outward.push_back(request);
        }
        drop(queue);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the next move; `None` once the lane is closed and empty.
    fn pop(&self) -> Option<MoveRequest> {
        let mut queue = self.queue.lock();
        loop {
            let next = queue.inward.pop_front();
            if let Some(request) = next.or_else(|| queue.outward.pop_front()) {
                drop(queue);
                self.changed.notify_all();
                return Some(request);
            }
            if queue.closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    /// Waits until the queue is empty or the deadline is here; gives back what is left.
    fn close(&self, deadline: Instant) -> Vec<MoveRequest> {
        let mut queue = self.queue.lock();
        queue.closed = true;
        self.changed.notify_all();
        while queue.len() > 0 && !self.changed.wait_until(&mut queue, deadline).timed_out() {}
        let inward = std::mem::take(&mut queue.inward);
        let outward = std::mem::take(&mut queue.outward);
        inward.into_iter().chain(outward).collect()
    }
}

impl Queue {
    fn len(&self) -> usize {
        self.inward.len() + self.outward.len()
    }
}

/// Towards the device, or off a disk.
fn is_inward(request: &MoveRequest) -> bool {
    let (from, to) = (request.from.capability(), request.to.capability());
    to.device_addressable || (from.durable && !to.durable)
}

fn run(shared: &Shared, lane: &Lane) {
    while let Some(request) = lane.pop() {
        let started = Instant::now();
        let deadline = request.deadline;
        finish(request, started.elapsed(), |from, to, on_layer| {
            copy_chunk(from, to, &shared.layout, &shared.staging, deadline, on_layer)
        });
    }
}

/// Runs `work` and reports its end, after pin and place are back.
fn finish(
    request: MoveRequest,
    mut elapsed: Duration,
    work: impl FnOnce(&crate::Pinned, crate::Place, Option<super::OnLayer>) -> Result<(), MoveError>,
) {
    let MoveRequest { from, to, deadline: _, on_layer, on_done } = request;
    let (key, bytes) = (*to.key(), to.meta().bytes);
    let (from_name, to_name) = (from.tier_name(), to.tier_name());
    let started = Instant::now();
    let result = work(&from, to, on_layer);
    elapsed += started.elapsed();
    drop(from);
    on_done(MoveOutcome { key, from: from_name, to: to_name, bytes, elapsed, result });
}
