//! NVRTC: from source to machine code of one architecture, with a cache on disk.

use std::ffi::{c_char, c_int, CString};
use std::fs;
use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::nvrtc::sys;

use super::library::{require, Library};
use super::sources::Source;
use crate::error::{KernelError, Result};

/// Compiles for one architecture. Cached code is keyed by source, options, NVRTC's version and architecture.
#[derive(Debug)]
pub struct Compiler {
    arch: String,
    version: (c_int, c_int),
    folder: Option<PathBuf>,
}

/// Machine code and what the compiler said about it.
#[derive(Debug)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    /// Registers, shared memory and spills of each kernel.
    pub log: String,
}

impl Compiler {
    /// `arch` as NVRTC names it: `sm_80`, `sm_90a`. Needs no GPU. [`KernelError::DeviceUnavailable`] without NVRTC.
    pub fn new(arch: String, folder: Option<PathBuf>) -> Result<Compiler> {
        require(Library::Nvrtc).map_err(|reason| KernelError::DeviceUnavailable { kind: "cuda", reason })?;
        let mut version = (0, 0);
        // SAFETY: the library is loaded; out pointers of ours.
        check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut version.0, &mut version.1) })?;
        Ok(Compiler { arch, version, folder })
    }

    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// NVRTC's version, for keys.
    pub fn version(&self) -> String {
        format!("nvrtc{}.{}", self.version.0, self.version.1)
    }

    /// Machine code of a source with macros defined, from the cache if it is there. A folder that cannot be read or written
    /// costs time only.
    pub fn cubin(&self, source: &Source, defines: &[(&str, usize)]) -> Result<Vec<u8>> {
        let options = self.options(defines);
        let path = self.folder.as_ref().map(|folder| folder.join(self.file_name(source, &options)));
        if let Some(cubin) = path.as_ref().and_then(|path| fs::read(path).ok()).filter(|cubin| !cubin.is_empty()) {
            return Ok(cubin);
        }
        let compiled = compile(source, &options)?;
        if let Some(path) = path {
            // Another process may have been faster or the disk full: the code is at hand either way.
            let _ = store(&path, &compiled.cubin);
        }
        Ok(compiled.cubin)
    }

    /// Compiles without the cache, with the resource report.
    pub fn compile(&self, source: &Source, defines: &[(&str, usize)]) -> Result<Compiled> {
        let mut options = self.options(defines);
        options.push("--ptxas-options=-v".to_owned());
        compile(source, &options)
    }

    fn options(&self, defines: &[(&str, usize)]) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={}", self.arch), "--std=c++17".to_owned()];
        options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }

    fn file_name(&self, source: &Source, options: &[String]) -> String {
        let mut hash = Fnv1a128::default();
        for part in [source.name, source.text, &self.version()].into_iter().chain(options.iter().map(String::as_str)) {
            hash.write(part.as_bytes());
            hash.write(&[0]);
        }
        format!("{}-{}-{:032x}.cubin", source.name, self.arch, hash.0)
    }
}

fn compile(source: &Source, options: &[String]) -> Result<Compiled> {
    let text = CString::new(source.text).expect("sources hold no NUL");
    let name = CString::new(format!("{}.cu", source.name)).expect("names hold no NUL");
    let options: Vec<CString> =
        options.iter().map(|option| CString::new(option.as_str()).expect("options hold no NUL")).collect();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: NUL-terminated strings that outlive the program; no headers.
    let created = unsafe {
        sys::nvrtcCreateProgram(&mut program.0, text.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
    };
    check("nvrtcCreateProgram", created)?;
    // SAFETY: the program exists; the options are NUL-terminated and counted.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, options.len() as c_int, options.as_ptr()) };
    let log = program.log()?;
    if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
        let reason = format!("{compiled:?} in {}.cu: {}", source.name, log.trim());
        return Err(KernelError::Cuda { call: "nvrtcCompileProgram", reason });
    }
    Ok(Compiled { cubin: program.cubin()?, log })
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the program exists; the buffer is as long as asked for, here and below.
        check("nvrtcGetProgramLogSize", unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) })?;
        let mut log = vec![0u8; bytes];
        // SAFETY: as above.
        check("nvrtcGetProgramLog", unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) })?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: as in `log`.
        check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(self.0, &mut bytes) })?;
        let mut cubin = vec![0u8; bytes];
        // SAFETY: as in `log`.
        check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) })?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: created once, destroyed once.
            unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

fn check(call: &'static str, result: sys::nvrtcResult) -> Result<()> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        error => Err(KernelError::Cuda { call, reason: format!("{error:?}") }),
    }
}

/// Whole or not at all: written beside and renamed.
fn store(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().expect("a file in a folder");
    fs::create_dir_all(folder)?;
    let unique = format!("{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let beside = path.with_extension(unique);
    let written = fs::write(&beside, cubin).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// FNV-1a with 128 bits: a file name, not a defence.
struct Fnv1a128(u128);

impl Default for Fnv1a128 {
    fn default() -> Self {
        Fnv1a128(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Hasher for Fnv1a128 {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    fn finish(&self) -> u64 {
        self.0 as u64
    }
}
