//! Zeroed memory straight from the operating system: page aligned, touched lazily, in huge pages where it is large.

use std::ptr::NonNull;

use crate::error::{KernelError, Result};

/// From this size on, huge pages save enough TLB misses to be worth asking for.
const HUGE_FROM: usize = 8 << 20;

/// An owned, zeroed, page-aligned region. It hands out raw pointers only: who may look when is its owner's business.
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory; all access goes through pointers under the owners' rules.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn zeroed(what: &'static str, bytes: usize) -> Result<Memory> {
        let out_of_memory = KernelError::OutOfMemory { what, bytes };
        if bytes == 0 {
            // Aligned as pages are, so that every vector access rule holds for it too.
            return Ok(Memory { base: NonNull::<Page>::dangling().cast(), bytes: 0 });
        }
        if bytes > isize::MAX as usize {
            return Err(out_of_memory);
        }
        let base = allocate(bytes).ok_or(out_of_memory)?;
        Ok(Memory { base, bytes })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr<T>(&self) -> *mut T {
        self.base.as_ptr().cast()
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
    if bytes >= HUGE_FROM {
        // SAFETY: the mapping is ours; the call is advice and its failure changes nothing.
        unsafe { libc::madvise(base, bytes, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(base.cast())
}

#[cfg(unix)]
impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the mapping of `zeroed`, unmapped once, with no borrow left (the owner is being dropped).
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        }
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
impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated by `allocate` with the same layout.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), layout(self.bytes)) };
        }
    }
}
