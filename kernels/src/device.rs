//! Where buffers live and operations run. A closed enum: operations match on it once, at their entry.

use std::fmt;

use crate::cpu::isa::Isa;
use crate::cpu::team::Team;
#[cfg(feature = "cuda")]
use crate::cuda::{default_cubin_folder, Context};
use crate::error::{KernelError, Result};
use std::path::Path;
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
///
/// [`Buffer`](crate::Buffer), [`Matrix`](crate::Matrix) and regions ([`Device::run`]) are the processor's, also beside a GPU:
/// there they use the GPU's host side. What a GPU holds and runs is in the module `cuda`.
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
    /// Why `auto` did not take a GPU.
    without_gpu: Option<String>,
}

/// An NVIDIA GPU and the processor beside it.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub struct CudaDevice {
    context: Arc<Context>,
    host: CpuDevice,
}

/// An NVIDIA GPU. This build has no CUDA kernels, so no value of this type exists.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Clone, Copy)]
pub enum CudaDevice {}

impl Device {
    /// Opens a device. `threads` (0: all cores this process may use) is the size of the CPU's team. Compiled GPU kernels are
    /// kept in the user's cache folder. `Auto` takes the first GPU, and the CPU if there is none that can be used.
    pub fn open(kind: DeviceKind, threads: usize) -> Result<Device> {
        match kind {
            DeviceKind::Cpu => Device::open_cpu(threads, Isa::detect()),
            DeviceKind::Cuda => Device::open_default_cuda(threads),
            DeviceKind::Auto => match Device::open_default_cuda(threads) {
                Err(KernelError::DeviceUnavailable { reason, .. }) => {
                    let mut cpu = CpuDevice::open(threads, Isa::detect())?;
                    cpu.without_gpu = Some(reason);
                    Ok(Device::Cpu(cpu))
                }
                opened => opened,
            },
        }
    }

    /// Opens the CPU with a given instruction set instead of the best one; refused if the machine lacks it.
    /// [`Isa::Reference`] computes everything in plain f32 and is the yardstick of the tests.
    pub fn open_cpu(threads: usize, isa: Isa) -> Result<Device> {
        CpuDevice::open(threads, isa).map(Device::Cpu)
    }

    /// Opens GPU number `ordinal`; kernels compiled for it are kept in `cubin_folder`.
    #[cfg(feature = "cuda")]
    pub fn open_cuda(ordinal: usize, threads: usize, cubin_folder: Option<&Path>) -> Result<Device> {
        let context = Context::open(ordinal, cubin_folder)?;
        Ok(Device::Cuda(CudaDevice { context, host: CpuDevice::open(threads, Isa::detect())? }))
    }

    /// This build has no CUDA kernels and says so.
    #[cfg(not(feature = "cuda"))]
    pub fn open_cuda(_ordinal: usize, _threads: usize, _cubin_folder: Option<&Path>) -> Result<Device> {
        let reason = "this build has no CUDA kernels; use `cpu` or `auto`".to_owned();
        Err(KernelError::DeviceUnavailable { kind: "cuda", reason })
    }

    fn open_default_cuda(threads: usize) -> Result<Device> {
        #[cfg(feature = "cuda")]
        let folder = default_cubin_folder();
        #[cfg(not(feature = "cuda"))]
        let folder: Option<std::path::PathBuf> = None;
        Device::open_cuda(0, threads, folder.as_deref())
    }

    /// Runs `f` on every worker of the team at once and returns worker 0's result (the calling thread's).
    /// Regions of one device run one after the other. All workers must call the same operations with the same arguments:
    /// each operation ends in a barrier.
    pub fn run<R: Send>(&self, f: impl Fn(&Worker) -> R + Sync) -> R {
        let host = self.host();
        host.team.run(host.isa, f)
    }

    /// Number of workers that [`Device::run`] uses.
    pub fn num_workers(&self) -> usize {
        self.host().team.num_workers()
    }

    /// One line for logs: what runs where.
    pub fn describe(&self) -> String {
        match self {
            Device::Cpu(cpu) => {
                let cpu_line = format!("cpu ({}, {} threads)", cpu.isa, cpu.team.num_workers());
                match &cpu.without_gpu {
                    None => cpu_line,
                    Some(reason) => format!("{cpu_line}; no GPU: {reason}"),
                }
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.context.describe(),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(cuda) => cuda.never(),
        }
    }

    /// Changes whenever the bits of a result may change: part of chunk keys. It does not depend on the number of threads.
    pub fn numeric_version(&self) -> String {
        match self {
            Device::Cpu(cpu) => format!("cpu-1-{}", cpu.isa.numeric_class()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.context.numeric_version(),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(cuda) => cuda.never(),
        }
    }

    /// The instruction set of the processor's kernels.
    pub(crate) fn isa(&self) -> Isa {
        self.host().isa
    }

    fn host(&self) -> &CpuDevice {
        match self {
            Device::Cpu(cpu) => cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => &cuda.host,
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(cuda) => cuda.never(),
        }
    }
}

impl CpuDevice {
    fn open(threads: usize, isa: Isa) -> Result<CpuDevice> {
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
        Ok(CpuDevice { team: Arc::new(Team::start(threads)?), isa, without_gpu: None })
    }
}

#[cfg(feature = "cuda")]
impl CudaDevice {
    /// The GPU.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

#[cfg(not(feature = "cuda"))]
impl CudaDevice {
    /// No value exists.
    pub(crate) fn never(&self) -> ! {
        match *self {}
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}
