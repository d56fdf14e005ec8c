//! A bounded set of chunk-sized buffers for copies whose ends cannot address each other.

use parking_lot::{Condvar, Mutex};

/// Hands out at most `limit` buffers; takers wait. Buffers are made on first use and kept.
pub(super) struct StagingPool {
    state: Mutex<State>,
    returned: Condvar,
    buffer_bytes: usize,
    limit: usize,
}

struct State {
    idle: Vec<Vec<u8>>,
    num_out: usize,
}

impl StagingPool {
    pub(super) fn new(buffer_bytes: usize, limit: usize) -> Self {
        let state = State { idle: Vec::with_capacity(limit), num_out: 0 };
        Self { state: Mutex::new(state), returned: Condvar::new(), buffer_bytes, limit: limit.max(1) }
    }

    /// Waits for a buffer; it comes back when the guard is dropped. A holder never waits for a second one, so the
    /// wait always ends.
    pub(super) fn take(&self) -> StagingBuffer<'_> {
        let mut state = self.state.lock();
        while state.num_out >= self.limit {
            self.returned.wait(&mut state);
        }
        state.num_out += 1;
        let bytes = state.idle.pop().unwrap_or_default();
        drop(state);
        let mut buffer = StagingBuffer { pool: self, bytes };
        buffer.bytes.resize(self.buffer_bytes, 0);
        buffer
    }

    #[cfg(test)]
    pub(super) fn num_out(&self) -> usize {
        self.state.lock().num_out
    }
}

pub(super) struct StagingBuffer<'a> {
    pool: &'a StagingPool,
    pub(super) bytes: Vec<u8>,
}

impl Drop for StagingBuffer<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.num_out -= 1;
        state.idle.push(std::mem::take(&mut self.bytes));
        self.pool.returned.notify_one();
    }
}
