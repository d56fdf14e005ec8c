//! Finding CUDA's libraries at run time.
//!
//! cudarc opens them by name and panics when that fails. So each is opened here first, with the folders that wheels and
//! toolkits use tried too; the loader then answers cudarc's request by the library's own name.

use std::path::PathBuf;

/// A shared library of CUDA 13.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    Driver,
    Nvrtc,
    CublasLt,
}

/// Folders to look into before the system's: colon-separated.
const FOLDERS_VARIABLE: &str = "KEEPSAKE_CUDA_LIBRARIES";
/// Where wheels keep libraries, below the folder they were installed into.
const WHEEL_FOLDER: &str = "nvidia/cu13/lib";
const TOOLKIT_FOLDERS: [&str; 2] = ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"];

impl Library {
    /// What is opened, in order: what the library needs, then itself.
    fn file_names(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1"],
            Library::Nvrtc => &["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"],
            Library::CublasLt => &["libcublasLt.so.13"],
        }
    }

    /// What to install, for messages.
    fn remedy(self) -> &'static str {
        match self {
            Library::Driver => "install NVIDIA's driver (580 or newer)",
            Library::Nvrtc => "install CUDA 13's NVRTC (`make nvrtc`, or pip install nvidia-cuda-nvrtc==13.0.*)",
            Library::CublasLt => "install CUDA 13's cuBLAS (pip install nvidia-cublas==13.*)",
        }
    }
}

/// Opens a library for the rest of the process; `Err` says what is missing and what to do.
pub(crate) fn require(library: Library) -> Result<(), String> {
    let [needed @ .., last] = library.file_names() else { unreachable!("every library has a file") };
    for name in needed {
        // A library that is missing here may still be found by the one that needs it.
        open(name);
    }
    if open(last) {
        return Ok(());
    }
    Err(format!(
        "{last} was not found: {}, or name its folder in LD_LIBRARY_PATH or {FOLDERS_VARIABLE}",
        library.remedy()
    ))
}

fn open(name: &str) -> bool {
    let places = folders().into_iter().map(|folder| folder.join(name)).filter(|path| path.exists());
    let mut candidates: Vec<PathBuf> = places.collect();
    // The loader's own search, which knows LD_LIBRARY_PATH, comes behind what was named to us only.
    let named = std::env::var_os(FOLDERS_VARIABLE)
        .map_or(0, |named| std::env::split_paths(&named).filter(|folder| folder.join(name).exists()).count());
    candidates.insert(named, PathBuf::from(name));
    candidates.iter().any(|path| load(path))
}

fn folders() -> Vec<PathBuf> {
    let named = std::env::var_os(FOLDERS_VARIABLE);
    let mut folders: Vec<PathBuf> = named.iter().flat_map(std::env::split_paths).collect();
    if let Some(cache) = super::context::cache_folder() {
        folders.push(cache.join("nvrtc").join(WHEEL_FOLDER));
    }
    folders.extend(TOOLKIT_FOLDERS.map(PathBuf::from));
    folders
}

#[cfg(unix)]
fn load(path: &std::path::Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: a NUL-terminated path; the libraries' initialisers are those of a CUDA installation that the user named or the
    // system offers. The handle is never closed.
    !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }.is_null()
}

#[cfg(not(unix))]
fn load(_path: &std::path::Path) -> bool {
    false
}
