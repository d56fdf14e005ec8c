//! A team of threads that runs one region at a time, in step. The calling thread is worker 0.
//!
//! A forward pass is one region; inside, every operation is called by every worker and ends in a barrier that spins
//! shortly and then yields the core (other threads of the server share it). Between regions the workers sleep.

use std::any::Any;
use std::cell::Cell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::isa::Isa;
use crate::error::{KernelError, Result};

/// Spins of a waiting worker before it starts to yield: a few microseconds.
const SPINS: u32 = 2_000;
/// Task counters in flight: the one in use, the last one (a late worker may still look), and the next one, reset.
const COUNTERS: usize = 3;

#[repr(align(128))]
struct Padded(AtomicUsize);

/// The state that workers share inside a region.
struct Shared {
    num_workers: usize,
    arrived: Padded,
    generation: Padded,
    counters: [Padded; COUNTERS],
    poisoned: AtomicBool,
    /// Mirrors `Inbox::region` so that a worker can look for work without the lock.
    region: Padded,
    inbox: Mutex<Inbox>,
    wake: Condvar,
    finished: Padded,
}

struct Inbox {
    region: usize,
    job: Option<Job>,
    closing: bool,
}

/// A region's closure without its type: `call(data, worker)`.
#[derive(Clone, Copy)]
struct Job {
    data: *const (),
    call: unsafe fn(*const (), &Worker),
    isa: Isa,
}

// SAFETY: `data` points to a `Sync` closure that outlives the region (`Team::run` waits for every worker before it returns).
unsafe impl Send for Job {}

pub(crate) struct Team {
    shared: Arc<Shared>,
    /// One region at a time.
    running: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

/// One thread's place in a region. Not `Send`: it belongs to its thread.
pub struct Worker<'a> {
    shared: &'a Shared,
    index: usize,
    isa: Isa,
    counter: Cell<usize>,
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Team {
    pub(crate) fn start(num_workers: usize) -> Result<Team> {
        let shared = Arc::new(Shared {
            num_workers,
            arrived: Padded(AtomicUsize::new(0)),
            generation: Padded(AtomicUsize::new(0)),
            counters: std::array::from_fn(|_| Padded(AtomicUsize::new(0))),
            poisoned: AtomicBool::new(false),
            region: Padded(AtomicUsize::new(0)),
            inbox: Mutex::new(Inbox { region: 0, job: None, closing: false }),
            wake: Condvar::new(),
            finished: Padded(AtomicUsize::new(0)),
        });
        let mut team = Team { shared, running: Mutex::new(()), threads: Vec::new() };
        for index in 1..num_workers {
            let shared = team.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("keepsake-cpu-{index}"))
                .spawn(move || serve(&shared, index))
                .map_err(|error| KernelError::DeviceUnavailable {
                    kind: "cpu",
                    reason: format!("cannot start worker thread {index} of {num_workers}: {error}"),
                })?;
            team.threads.push(thread);
        }
        Ok(team)
    }

    pub(crate) fn num_workers(&self) -> usize {
        self.shared.num_workers
    }

    pub(crate) fn run<R: Send>(&self, isa: Isa, f: impl Fn(&Worker) -> R + Sync) -> R {
        let _one_region = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        shared.poisoned.store(false, Ordering::Relaxed);
        shared.arrived.0.store(0, Ordering::Relaxed);
        shared.finished.0.store(0, Ordering::Relaxed);
        for counter in &shared.counters {
            counter.0.store(0, Ordering::Relaxed);
        }
        let others = |worker: &Worker| {
            f(worker);
        };
        if shared.num_workers > 1 {
            shared.publish(job_of(&others, isa));
        }
        let result = catch_unwind(AssertUnwindSafe(|| f(&Worker::new(shared, 0, isa))));
        if result.is_err() {
            shared.poisoned.store(true, Ordering::Release);
        }
        // The closure lives on this stack: no return, not even by panic, before every worker has left it.
        wait_until(|| shared.finished.0.load(Ordering::Acquire) == shared.num_workers - 1);
        match result {
            Ok(_) if shared.poisoned.load(Ordering::Acquire) => panic!("a worker of the team panicked"),
            Ok(value) => value,
            Err(panic) => resume_unwind(panic),
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.lock_inbox().closing = true;
        self.shared.region.0.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches its panics, so joining cannot fail in a way that matters here.
            let _: Result<(), Box<dyn Any + Send>> = thread.join();
        }
    }
}

impl Shared {
    fn lock_inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, job: Job) {
        let mut inbox = self.lock_inbox();
        inbox.job = Some(job);
        inbox.region += 1;
        self.region.0.store(inbox.region, Ordering::Release);
        drop(inbox);
        self.wake.notify_all();
    }

    /// The next region's job after `seen`, or `None` when the team closes.
    fn next_job(&self, seen: &mut usize) -> Option<Job> {
        let mut spins = 0;
        while spins < SPINS && self.region.0.load(Ordering::Acquire) == *seen {
            std::hint::spin_loop();
            spins += 1;
        }
        let mut inbox = self.lock_inbox();
        while inbox.region == *seen && !inbox.closing {
            inbox = self.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        if inbox.closing {
            return None;
        }
        *seen = inbox.region;
        inbox.job
    }
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared, index: usize, isa: Isa) -> Worker<'a> {
        Worker { shared, index, isa, counter: Cell::new(0), _not_send: std::marker::PhantomData }
    }

    /// This worker's place, `0..num_workers`.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Workers in the region.
    pub fn num_workers(&self) -> usize {
        self.shared.num_workers
    }

    /// Waits until every worker of the region is here. What any of them wrote before is visible to all after.
    ///
    /// # Panics
    /// When another worker of the region panicked: it will never arrive.
    pub fn barrier(&self) {
        self.counter.set((self.counter.get() + 1) % COUNTERS);
        let shared = self.shared;
        if shared.num_workers == 1 {
            shared.counters[self.counter.get()].0.store(0, Ordering::Relaxed);
            return;
        }
        let generation = shared.generation.0.load(Ordering::Acquire);
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == shared.num_workers {
            // Everyone is between operations: the counter after the next one is free to be reset.
            shared.counters[(self.counter.get() + 1) % COUNTERS].0.store(0, Ordering::Relaxed);
            shared.arrived.0.store(0, Ordering::Relaxed);
            shared.generation.0.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        wait_until(|| {
            assert!(!shared.poisoned.load(Ordering::Relaxed), "another worker of the team panicked");
            shared.generation.0.load(Ordering::Acquire) != generation
        });
    }

    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    /// This worker's share of `0..count`, contiguous; shares differ by one at most.
    pub(crate) fn share(&self, count: usize) -> std::ops::Range<usize> {
        let n = self.num_workers();
        count * self.index / n..count * (self.index + 1) / n
    }

    /// The next task of this operation that no worker has taken, below `count`. An operation that uses it must end in
    /// [`Worker::barrier`], which gives the next operation a fresh counter.
    pub(crate) fn claim(&self, count: usize) -> Option<usize> {
        let task = self.shared.counters[self.counter.get()].0.fetch_add(1, Ordering::Relaxed);
        (task < count).then_some(task)
    }
}

fn job_of<F: Fn(&Worker) + Sync>(f: &F, isa: Isa) -> Job {
    unsafe fn call<F: Fn(&Worker) + Sync>(data: *const (), worker: &Worker) {
        // SAFETY: `data` came from a `&F` that `Team::run` keeps alive until every worker has finished.
        let f = unsafe { &*data.cast::<F>() };
        f(worker);
    }
    Job { data: std::ptr::from_ref(f).cast(), call: call::<F>, isa }
}

fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    while let Some(job) = shared.next_job(&mut seen) {
        let worker = Worker::new(shared, index, job.isa);
        // SAFETY: the region that published the job waits for `finished` before its closure dies.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (job.call)(job.data, &worker) }));
        if result.is_err() {
            shared.poisoned.store(true, Ordering::Release);
        }
        shared.finished.0.fetch_add(1, Ordering::AcqRel);
    }
}

fn wait_until(mut ready: impl FnMut() -> bool) {
    let mut spins = 0;
    while !ready() {
        if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}
