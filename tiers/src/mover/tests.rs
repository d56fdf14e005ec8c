use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use keepsake_kernels::{Device, DeviceKind, KvPool};
use parking_lot::Mutex;

use super::*;
use crate::conformance::{key, layout, meta, payload, read, store};
use crate::wrap::{Counting, Effect, Fault, Faulty, Op, Throttled};
use crate::{BlockPool, Capability, DeviceTier, DramTier, MemoryTier, Tier};

const CHUNKS: usize = 16;

fn bytes() -> usize {
    layout().chunk_bytes()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn dram() -> Arc<dyn Tier> {
    let capacity_bytes = (CHUNKS * bytes()) as u64;
    Arc::new(DramTier::new("dram", capacity_bytes, layout()).unwrap())
}

/// A tier without host memory, as a disk is.
fn disk() -> Arc<dyn Tier> {
    Arc::new(Durable(MemoryTier::new("disk", (CHUNKS * bytes()) as u64, bytes())))
}

fn device() -> (DeviceTier, Arc<BlockPool>) {
    let device = Device::open(DeviceKind::Cpu, 1).unwrap();
    let pool = Arc::new(KvPool::new(&device, layout(), CHUNKS).unwrap());
    let blocks = Arc::new(BlockPool::new(CHUNKS));
    (DeviceTier::new("device", pool, Arc::clone(&blocks)).unwrap(), blocks)
}

fn pool(config: MoverConfig) -> MoverPool {
    MoverPool::new(layout(), config).unwrap()
}

fn movement(from: &Arc<dyn Tier>, to: &Arc<dyn Tier>, index: u64) -> Move {
    Move {
        from: from.pin(&key(index)).unwrap().unwrap(),
        to: to.reserve(&key(index), &meta(bytes())).unwrap().unwrap(),
    }
}

/// Looks durable, so that it takes the disk lane.
struct Durable(MemoryTier);

impl Tier for Durable {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn capability(&self) -> Capability {
        Capability { durable: true, ..Capability::default() }
    }
    fn usage(&self) -> crate::Usage {
        self.0.usage()
    }
    fn reserve(&self, key: &ChunkKey, meta: &crate::ChunkMeta) -> crate::Result<Option<Place>> {
        let place = self.0.reserve(key, meta)?;
        Ok(place.map(|place| place.wrap(self.capability(), |writer| writer)))
    }
    fn pin(&self, key: &ChunkKey) -> crate::Result<Option<Pinned>> {
        let pinned = self.0.pin(key)?;
        Ok(pinned.map(|pinned| pinned.wrap(self.capability(), |reader| reader)))
    }
    fn remove(&self, key: &ChunkKey) -> crate::Result<bool> {
        self.0.remove(key)
    }
    fn recover(&self) -> crate::Result<Vec<(ChunkKey, crate::ChunkMeta)>> {
        self.0.recover()
    }
    fn health(&self) -> crate::Health {
        self.0.health()
    }
    fn close(&self, deadline: Instant) -> crate::Result<()> {
        self.0.close(deadline)
    }
}

#[test]
fn every_pair_of_tiers_carries_the_bytes() {
    let mover = pool(MoverConfig::default());
    let (device, _) = device();
    let tiers: [Arc<dyn Tier>; 3] = [Arc::new(device), dram(), disk()];
    for (index, from) in tiers.iter().enumerate() {
        for to in &tiers {
            if Arc::ptr_eq(from, to) {
                continue;
            }
            let index = index as u64;
            store(from, index, bytes()).unwrap();
            let outcomes = mover.submit_all(vec![movement(from, to, index)]).wait(soon());
            let outcome = &outcomes[0];
            assert!(outcome.result.is_ok(), "{outcome:?}");
            assert_eq!((&*outcome.from, &*outcome.to), (from.name(), to.name()));
            assert_eq!((outcome.key, outcome.bytes), (key(index), bytes() as u64));
            assert_eq!(read(to, index, bytes()), Some(payload(index, bytes())));
            assert!(to.remove(&key(index)).unwrap(), "the pin and the place are back");
            assert!(from.remove(&key(index)).unwrap(), "the pin and the place are back");
        }
    }
}

#[test]
fn one_staging_buffer_serves_many_slow_copies() {
    // A buffer given to a second copy while the first still uses it would mix their bytes.
    let config = MoverConfig { disk_threads: 4, staging_buffers: 1, ..MoverConfig::default() };
    let mover = pool(config);
    let slow = |inner| Throttled::new(inner, Duration::from_millis(2), u64::MAX);
    let disk: Arc<dyn Tier> = Arc::new(slow(disk()));
    let (device, _) = device();
    let device: Arc<dyn Tier> = Arc::new(slow(Arc::new(device)));
    for index in 0..CHUNKS as u64 {
        store(&disk, index, bytes()).unwrap();
    }
    let moves = (0..CHUNKS as u64).map(|index| movement(&disk, &device, index));
    for outcome in mover.submit_all(moves.collect()).wait(soon()) {
        assert!(outcome.result.is_ok(), "{outcome:?}");
    }
    for index in 0..CHUNKS as u64 {
        assert_eq!(read(&device, index, bytes()), Some(payload(index, bytes())));
    }
    assert_eq!(mover.num_staging_out(), 0);
}

#[test]
fn a_disk_hit_is_served_while_dram_is_full() {
    let mover = pool(MoverConfig::default());
    let (dram, disk) = (dram(), disk());
    let mut index = 100;
    while store(&dram, index, bytes()).unwrap() {
        index += 1;
    }
    assert!(dram.reserve(&key(1), &meta(bytes())).unwrap().is_none());
    store(&disk, 1, bytes()).unwrap();
    let (device, blocks) = device();
    let block = blocks.alloc().unwrap();
    let movement = Move { from: disk.pin(&key(1)).unwrap().unwrap(), to: device.adopt(block, key(1), meta(bytes())) };
    let outcomes = mover.submit_all(vec![movement]).wait(soon());
    assert!(outcomes[0].result.is_ok());
    let mut out = vec![0; bytes()];
    device.lend(block, key(1), meta(bytes())).read(0, &mut out).unwrap();
    assert_eq!(out, payload(1, bytes()));
}

#[test]
fn layers_are_reported_in_order_before_the_end() {
    let mover = pool(MoverConfig::default());
    let dram = dram();
    store(&dram, 1, bytes()).unwrap();
    let (device, blocks) = device();
    let to = device.adopt(blocks.alloc().unwrap(), key(1), meta(bytes()));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (sender, receiver) = crossbeam_channel::bounded(1);
    let mut request = MoveRequest::new(dram.pin(&key(1)).unwrap().unwrap(), to, {
        let seen = Arc::clone(&seen);
        move |outcome| sender.send((outcome, seen.lock().clone())).unwrap()
    });
    request.on_layer = Some(Box::new({
        let seen = Arc::clone(&seen);
        move |layer| seen.lock().push(layer)
    }));
    mover.submit(request).unwrap();
    let (outcome, layers): (MoveOutcome, Vec<usize>) = receiver.recv().unwrap();
    assert!(outcome.result.is_ok());
    assert_eq!(layers, (0..layout().num_layers).collect::<Vec<_>>());
}

#[test]
fn every_fault_gives_place_and_pin_back() {
    let mover = pool(MoverConfig::default());
    let error = Effect::Error(io::ErrorKind::Other);
    // First, middle and last of three chunks, each operation in turn.
    for op in [Op::Read, Op::Write, Op::Commit] {
        for which in 0..3 {
            let (from, to) = (Faulty::new(dram()), Faulty::new(disk()));
            let faults = [from.faults(), to.faults()];
            let from = Arc::new(Counting::new(Arc::new(from)));
            let to = Arc::new(Counting::new(Arc::new(to)));
            let (from_tier, to_tier): (Arc<dyn Tier>, Arc<dyn Tier>) = (from.clone(), to.clone());
            for index in 0..3 {
                store(&from_tier, index, bytes()).unwrap();
            }
            for side in &faults {
                side.arm(Fault::once(op, error).after(which));
            }
            let mut num_failed = 0;
            for index in 0..3 {
                let ticket = mover.submit_all(vec![movement(&from_tier, &to_tier, index)]);
                let outcome = ticket.wait(soon()).remove(0);
                if let Err(reason) = outcome.result {
                    assert!(matches!(reason, MoveError::Fault(_)), "{reason}");
                    assert_eq!(index, which, "{op:?}");
                    assert!(to_tier.pin(&key(index)).unwrap().is_none());
                    num_failed += 1;
                }
            }
            assert_eq!(num_failed, 1, "{op:?}");
            assert_eq!((from.counts().num_pins_out(), to.counts().num_places_out()), (0, 0));
            assert_eq!(to.usage().num_chunks, 2);
            assert_eq!(to.usage().reserved_bytes, 0);
        }
    }
}

#[test]
fn a_late_move_times_out_and_is_never_committed() {
    let mover = pool(MoverConfig::default());
    let slow = Throttled::new(dram(), Duration::from_millis(60), u64::MAX);
    let (from, to): (Arc<dyn Tier>, Arc<dyn Tier>) = (Arc::new(slow), disk());
    store(&from, 1, bytes()).unwrap();
    let Move { from: pin, to: place } = movement(&from, &to, 1);
    let (sender, receiver) = crossbeam_channel::bounded(1);
    let mut request = MoveRequest::new(pin, place, move |outcome| sender.send(outcome).unwrap());
    request.deadline = Some(Instant::now() + Duration::from_millis(20));
    mover.submit(request).unwrap();
    let outcome = receiver.recv().unwrap();
    assert!(matches!(outcome.result, Err(MoveError::TimedOut)));
    assert!(to.pin(&key(1)).unwrap().is_none());
    assert_eq!(to.usage().used_bytes, 0);
    // A ticket gives up earlier than the move does; the move still ends by itself.
    let ticket = mover.submit_all(vec![movement(&from, &to, 1)]);
    let outcomes = ticket.wait(Instant::now() + Duration::from_millis(5));
    assert!(matches!(outcomes[0].result, Err(MoveError::TimedOut)));
    while to.pin(&key(1)).unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_full_queue_hands_the_request_back() {
    let config = MoverConfig { queue_moves: 2, ..MoverConfig::default() };
    let mover = pool(config);
    let slow = Throttled::new(dram(), Duration::from_millis(50), u64::MAX);
    let from: Arc<dyn Tier> = Arc::new(slow);
    let to: Arc<dyn Tier> = Arc::new(MemoryTier::new("memory", 1 << 20, bytes()));
    store(&from, 1, bytes()).unwrap();
    let mut num_refused = 0;
    for _ in 0..8 {
        let Move { from: pin, to: place } = movement(&from, &to, 1);
        if let Err(request) = mover.submit(MoveRequest::new(pin, place, |_| {})) {
            assert_eq!(request.from.key(), &key(1));
            num_refused += 1;
        }
    }
    assert!(num_refused >= 5, "{num_refused} of 8 refused by a queue of 2");
    mover.close(soon());
    assert_eq!(to.usage().reserved_bytes, 0);
    assert!(from.remove(&key(1)).unwrap(), "no pin is left");
}

#[test]
fn reads_go_before_writes_that_wait_longer() {
    let config = MoverConfig { disk_threads: 1, ..MoverConfig::default() };
    let mover = pool(config);
    let slow = Throttled::new(disk(), Duration::from_millis(20), u64::MAX);
    let (disk, dram): (Arc<dyn Tier>, Arc<dyn Tier>) = (Arc::new(slow), dram());
    for index in 0..4 {
        store(&dram, index, bytes()).unwrap();
    }
    store(&disk, 9, bytes()).unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let submit = |movement: Move| {
        let order = Arc::clone(&order);
        let done = move |outcome: MoveOutcome| order.lock().push(outcome.key);
        mover.submit(MoveRequest::new(movement.from, movement.to, done)).unwrap();
    };
    for index in 0..4 {
        submit(movement(&dram, &disk, index));
    }
    submit(movement(&disk, &dram, 9));
    mover.close(soon());
    let order = order.lock();
    let read = order.iter().position(|k| *k == key(9)).unwrap();
    assert_eq!(order.len(), 5);
    // At most the write that was running already comes first.
    assert!(read <= 1, "the read ended at place {read}");
}

#[test]
fn close_ends_what_waits_and_is_idempotent() {
    let config = MoverConfig { host_threads: 1, ..MoverConfig::default() };
    let mover = pool(config);
    let slow = Throttled::new(dram(), Duration::from_millis(30), u64::MAX);
    let from: Arc<dyn Tier> = Arc::new(slow);
    let to: Arc<dyn Tier> = Arc::new(MemoryTier::new("memory", 1 << 20, bytes()));
    store(&from, 1, bytes()).unwrap();
    let moves = (0..6).map(|_| movement(&from, &to, 1)).collect();
    let ticket = mover.submit_all(moves);
    mover.close(Instant::now() + Duration::from_millis(10));
    mover.close(Instant::now());
    let outcomes = ticket.wait(soon());
    let closed = outcomes.iter().filter(|o| matches!(o.result, Err(MoveError::Closed)));
    assert!(closed.count() >= 4);
    assert_eq!(to.usage().reserved_bytes, 0);
    let Move { from: pin, to: place } = movement(&from, &to, 1);
    assert!(mover.submit(MoveRequest::new(pin, place, |_| {})).is_err());
}

#[test]
fn errors_become_outcomes_by_what_the_scheduler_does_next() {
    let tier: Arc<str> = Arc::from("t");
    let corrupt = TierError::Corrupt { tier: Arc::clone(&tier), key: key(1), reason: String::new() };
    let gone = TierError::Gone { tier: Arc::clone(&tier), key: key(1) };
    let read_only = TierError::ReadOnly { tier: Arc::clone(&tier), reason: String::new() };
    assert!(matches!(corrupt.into(), MoveError::Corrupt(_)));
    assert!(matches!(gone.into(), MoveError::Missing(_)));
    assert!(matches!(read_only.into(), MoveError::Full(_)));
    assert!(matches!(TierError::Closed { tier }.into(), MoveError::Fault(_)));
}
