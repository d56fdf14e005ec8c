//! A GPU: its primary context, its numbers, and the kernels compiled for it.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::call::{check, check_quietly};
use super::compiler::Compiler;
use super::library::{require, Library};
use super::module::{Function, Module};
use super::sources::{self, Source};
use crate::error::{KernelError, Result};

/// CUDA 13.0, as `cuDriverGetVersion` counts.
const MIN_DRIVER: c_int = 13_000;
/// Ampere: bf16 arithmetic, asynchronous copies.
const MIN_CAPABILITY: (u32, u32) = (8, 0);

/// One GPU. Everything that belongs to it holds an `Arc` of this.
pub struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    ordinal: usize,
    name: String,
    capability: (u32, u32),
    num_multiprocessors: u32,
    total_bytes: usize,
    compiler: Compiler,
    /// Functions of the modules that every model needs, by name.
    functions: HashMap<String, Function>,
    /// Modules made for a shape, by their options.
    special: Mutex<HashMap<String, Arc<Module>>>,
    /// Owns what `functions` points into.
    modules: Vec<Module>,
}

// SAFETY: driver handles may be used from any thread that has made the context current (`bind`).
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for Context {}

thread_local! {
    /// The context that is current on this thread, as far as this crate has set it.
    static CURRENT: Cell<sys::CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

/// The project's folder for what can be made again: `$XDG_CACHE_HOME/keepsake` or `~/.cache/keepsake`.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(base) => PathBuf::from(base),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".cache"),
    };
    Some(base.join("keepsake"))
}

/// Where compiled kernels are kept unless a caller says otherwise; `None` without a home.
pub fn default_cubin_folder() -> Option<PathBuf> {
    Some(cache_folder()?.join("cubins"))
}

impl Context {
    /// Opens GPU number `ordinal` and loads its kernels, compiled now or found in `cubin_folder`. Whatever is missing is
    /// one line: [`KernelError::DeviceUnavailable`].
    pub fn open(ordinal: usize, cubin_folder: Option<&Path>) -> Result<Arc<Context>> {
        require(Library::Driver).map_err(unavailable)?;
        // SAFETY: no preconditions.
        check("cuInit", unsafe { sys::cuInit(0) }).map_err(|error| unavailable(error.to_string()))?;
        let device = find_device(ordinal)?;
        let name = device_name(device)?;
        let capability = (
            attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < MIN_CAPABILITY {
            let (major, minor) = capability;
            return Err(unavailable(format!("{name} has compute capability {major}.{minor}; 8.0 is the least")));
        }
        require(Library::Nvrtc).map_err(unavailable)?;
        require(Library::CublasLt).map_err(unavailable)?;
        let compiler = Compiler::new(arch_name(capability), cubin_folder.map(Path::to_owned))?;
        let num_multiprocessors = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;

        let mut raw = std::ptr::null_mut();
        // SAFETY: a device of this process; the out pointer is ours.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) };
        check("cuDevicePrimaryCtxRetain", retained).map_err(|error| unavailable(error.to_string()))?;
        let mut context = Context {
            raw,
            device,
            ordinal,
            name,
            capability,
            num_multiprocessors,
            total_bytes: 0,
            compiler,
            functions: HashMap::new(),
            special: Mutex::new(HashMap::new()),
            modules: Vec::new(),
        };
        context.bind()?;
        context.total_bytes = context.memory_bytes()?.1;
        context.load_modules()?;
        Ok(Arc::new(context))
    }

    /// Free and total bytes of device memory.
    pub fn memory_bytes(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; the out pointers are ours.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The GPU's marketing name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn num_multiprocessors(&self) -> u32 {
        self.num_multiprocessors
    }

    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// One line for logs.
    pub fn describe(&self) -> String {
        let gib = self.total_bytes as f64 / (1u64 << 30) as f64;
        format!("cuda:{} ({}, {gib:.0} GiB, {})", self.ordinal, self.name, self.compiler.arch())
    }

    /// What the bits of results depend on, as far as this crate can tell.
    pub fn numeric_version(&self) -> String {
        format!("cuda-1-{}-{}-{}", self.compiler.arch(), self.compiler.version(), super::blas::library_version())
    }

    /// Waits until the device has done everything that was asked of it.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Makes the context current on this thread. Cheap when it already is.
    pub(crate) fn bind(&self) -> Result<()> {
        if CURRENT.get() == self.raw {
            return Ok(());
        }
        // SAFETY: the context is alive: it is released in `drop` only.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })?;
        CURRENT.set(self.raw);
        Ok(())
    }

    /// A kernel of the modules that are always loaded.
    pub(crate) fn function(&self, name: &'static str) -> Result<Function> {
        self.functions.get(name).copied().ok_or_else(|| KernelError::Cuda {
            call: "cuModuleGetFunction",
            reason: format!("no kernel is called {name}"),
        })
    }

    /// A module compiled with `defines`, once.
    pub(crate) fn special_module(&self, source: &Source, defines: &[(&str, usize)]) -> Result<Arc<Module>> {
        self.bind()?;
        let key = format!("{} {defines:?}", source.name);
        let mut special = self.special.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = special.get(&key) {
            return Ok(module.clone());
        }
        let cubin = self.compiler.cubin(source, defines)?;
        let module = Arc::new(Module::load(&cubin, self.max_shared_bytes()?)?);
        special.insert(key, module.clone());
        Ok(module)
    }

    fn load_modules(&mut self) -> Result<()> {
        let compiler = &self.compiler;
        let cubins: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
            let compile = |source: &'static Source| scope.spawn(move || compiler.cubin(source, &[]));
            let threads: Vec<_> = sources::GENERAL.iter().map(compile).collect();
            threads.into_iter().map(|thread| thread.join().expect("the compiler does not panic")).collect()
        });
        let max_shared_bytes = self.max_shared_bytes()?;
        for cubin in cubins {
            let module = Module::load(&cubin?, max_shared_bytes)?;
            self.functions.extend(module.functions().map(|(name, function)| (name.to_owned(), function)));
            self.modules.push(module);
        }
        Ok(())
    }

    fn max_shared_bytes(&self) -> Result<u32> {
        attribute(self.device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        self.modules.clear();
        self.special.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        CURRENT.set(std::ptr::null_mut());
        // SAFETY: retained in `open`; nothing of the context is left, since everything holds an `Arc` of it.
        check_quietly(unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

fn unavailable(reason: String) -> KernelError {
    KernelError::DeviceUnavailable { kind: "cuda", reason }
}

fn find_device(ordinal: usize) -> Result<sys::CUdevice> {
    let mut driver = 0;
    // SAFETY: out pointers of ours, here and below.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut driver) })?;
    if driver < MIN_DRIVER {
        let (major, minor) = (driver / 1000, driver % 1000 / 10);
        return Err(unavailable(format!("the driver knows CUDA {major}.{minor}; 13.0 is the least (driver 580)")));
    }
    let mut count = 0;
    // SAFETY: as above.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    if ordinal >= count as usize {
        return Err(unavailable(format!("no GPU number {ordinal}: this machine has {count}")));
    }
    let mut device = 0;
    // SAFETY: as above; the ordinal exists.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
    Ok(device)
}

fn device_name(device: sys::CUdevice) -> Result<String> {
    let mut name = [0u8; 128];
    // SAFETY: the driver writes at most the given length, a NUL included.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device) })?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: an out pointer of ours.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value.max(0) as u32)
}

/// NVRTC's name of the device. Hopper's own instructions need the `a`.
fn arch_name((major, minor): (u32, u32)) -> String {
    match (major, minor) {
        (9, 0) => "sm_90a".to_owned(),
        _ => format!("sm_{major}{minor}"),
    }
}
