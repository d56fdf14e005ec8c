//! Where buffers live and operations run. A closed enum: operations match on it once, at their entry.

use std::fmt;

use crate::cpu::isa::Isa;
use crate::cpu::team::Team;
use crate::error::{KernelError, Result};
use std::sync::Arc;

pub use crate::cpu::team::Worker;

/// Which device to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The best device of this machine.
    Auto,
    Cpu,
    Cuda,
}

/// An open device; clones share it.
#[derive(Clone)]
pub enum Device {
    Cpu(CpuDevice),
    Cuda(CudaDevice),
}

/// The processor: a team of threads and the instruction set its kernels use.
#[derive(Clone)]
pub struct CpuDevice {
    pub(crate) team: Arc<Team>,
    pub(crate) isa: Isa,
}

/// An NVIDIA GPU. This build has no CUDA kernels, so no value of this type exists.
#[derive(Debug, Clone, Copy)]
pub enum CudaDevice {}

impl Device {
    /// Opens a device. `threads` (0: all cores this process may use) is the size of the CPU's team.
    pub fn open(kind: DeviceKind, threads: usize) -> Result<Device> {
        match kind {
            DeviceKind::Auto | DeviceKind::Cpu => Device::open_cpu(threads, Isa::detect()),
            DeviceKind::Cuda => Err(KernelError::DeviceUnavailable {
                kind: "cuda",
                reason: "this build has no CUDA kernels; use `cpu` or `auto`".into(),
            }),
        }
    }

    /// Opens the CPU with a given instruction set instead of the best one; refused if the machine lacks it.
    /// [`Isa::Reference`] computes everything in plain f32 and is the yardstick of the tests.
    pub fn open_cpu(threads: usize, isa: Isa) -> Result<Device> {
        if !isa.is_available() {
            return Err(KernelError::DeviceUnavailable {
                kind: "cpu",
                reason: format!("this machine does not offer {isa}"),
            });
        }
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            n => n,
        };
        Ok(Device::Cpu(CpuDevice { team: Arc::new(Team::start(threads)?), isa }))
    }

    /// Runs `f` on every worker of the team at once and returns worker 0's result (the calling thread's).
    /// Regions of one device run one after the other. All workers must call the same operations with the same arguments:
    /// each operation ends in a barrier.
    pub fn run<R: Send>(&self, f: impl Fn(&Worker) -> R + Sync) -> R {
        match self {
            Device::Cpu(cpu) => cpu.team.run(cpu.isa, f),
            Device::Cuda(cuda) => match *cuda {},
        }
    }

    /// Number of workers that [`Device::run`] uses.
    pub fn num_workers(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.team.num_workers(),
            Device::Cuda(cuda) => match *cuda {},
        }
    }

    /// One line for logs: what runs where.
    pub fn describe(&self) -> String {
        match self {
            Device::Cpu(cpu) => format!("cpu ({}, {} threads)", cpu.isa, cpu.team.num_workers()),
            Device::Cuda(cuda) => match *cuda {},
        }
    }

    /// Changes whenever the bits of a result may change: part of chunk keys. It does not depend on the number of threads.
    pub fn numeric_version(&self) -> String {
        match self {
            Device::Cpu(cpu) => format!("cpu-1-{}", cpu.isa.numeric_class()),
            Device::Cuda(cuda) => match *cuda {},
        }
    }

    pub(crate) fn isa(&self) -> Isa {
        match self {
            Device::Cpu(cpu) => cpu.isa,
            Device::Cuda(cuda) => match *cuda {},
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}
