//! Zeroed memory straight from the operating system: page aligned, touched lazily, in huge pages where it pays.
//!
//! Weights and activations are read in order again and again, so they should lie in huge pages: fewer TLB misses, and
//! prefetchers do not stop every 4 KiB. Pieces too small for huge pages of their own share slabs.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{KernelError, Result};

/// From this size on a piece is a mapping of its own.
const OWN_MAPPING_FROM: usize = 8 << 20;
/// Size of a slab that smaller pieces share. Its untouched end costs nothing.
const SLAB: usize = 64 << 20;
/// Alignment of pieces inside a slab: two pairs of cache lines, so that no two pieces share a prefetched pair.
const PIECE_ALIGN: usize = 256;

/// An owned, zeroed region. It hands out raw pointers only: who may look when is its owner's business.
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    /// Keeps the mapping alive; `None` for an empty region.
    _mapping: Option<Arc<Mapping>>,
}

// SAFETY: plain memory; all access goes through pointers under the owners' rules.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// The slab that is being filled and how far.
static CURRENT: Mutex<Option<(Arc<Mapping>, usize)>> = Mutex::new(None);

impl Memory {
    pub(crate) fn zeroed(what: &'static str, bytes: usize) -> Result<Memory> {
        let out_of_memory = KernelError::OutOfMemory { what, bytes };
        if bytes == 0 {
            // Aligned as pages are, so that every vector access rule holds for it too.
            return Ok(Memory { base: NonNull::<Page>::dangling().cast(), bytes: 0, _mapping: None });
        }
        if bytes > isize::MAX as usize / 2 {
            return Err(out_of_memory);
        }
        if bytes >= OWN_MAPPING_FROM {
            let mapping = Arc::new(Mapping::new(bytes).ok_or(out_of_memory)?);
            return Ok(Memory { base: mapping.base, bytes, _mapping: Some(mapping) });
        }
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, used) = match current.take() {
            Some((slab, used)) if used + bytes <= SLAB => (slab, used),
            _ => (Arc::new(Mapping::new(SLAB).ok_or(out_of_memory)?), 0),
        };
        // SAFETY: `used + bytes <= SLAB`, and no other piece has this range: a slab is filled once, front to back.
        let base = unsafe { slab.base.add(used) };
        *current = Some((slab.clone(), (used + bytes).next_multiple_of(PIECE_ALIGN)));
        Ok(Memory { base, bytes, _mapping: Some(slab) })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr<T>(&self) -> *mut T {
        self.base.as_ptr().cast()
    }
}

/// Memory of the operating system, returned when the last piece of it goes.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory, as `Memory`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> Option<Mapping> {
        Some(Mapping { base: allocate(bytes)?, bytes })
    }
}

#[repr(align(4096))]
struct Page;

#[cfg(unix)]
fn allocate(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: an anonymous private mapping of a nonzero length at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return None;
    }
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the mapping is ours; the call is advice and its failure changes nothing.
        unsafe { libc::madvise(base, bytes, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(base.cast())
}

#[cfg(unix)]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, unmapped once, when no piece is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(not(unix))]
fn layout(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes, 4096).expect("bytes was checked against isize::MAX")
}

#[cfg(not(unix))]
fn allocate(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: the size is not zero.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout(bytes)) })
}

#[cfg(not(unix))]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate` with the same layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), layout(self.bytes)) };
    }
}
