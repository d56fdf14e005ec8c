//! Host memory that the device copies from and to at full speed, and can address itself.
//!
//! Not write-combined: the host reads it at its own speed too (tiers checksum and compress what lies here).

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::{check, check_quietly};
use super::context::Context;
use super::memory::Element;
use crate::error::{ensure, KernelError, Result};

/// A pinned allocation. Who may look at which part while copies run is its owner's business, as with the K/V pool.
pub struct PinnedBuffer<T> {
    context: Arc<Context>,
    base: *mut T,
    device_address: sys::CUdeviceptr,
    len: usize,
    elements: PhantomData<T>,
}

// SAFETY: plain memory; access follows the owners' rules.
unsafe impl<T: Element> Send for PinnedBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for PinnedBuffer<T> {}

impl<T: Element> PinnedBuffer<T> {
    /// `len` zeros. Pinning takes about a quarter of a second a GiB: large slabs are made by a background thread, in pieces.
    pub fn new(context: &Arc<Context>, what: &'static str, len: usize) -> Result<PinnedBuffer<T>> {
        ensure!("PinnedBuffer::new", len > 0, "no elements");
        let bytes = len.saturating_mul(size_of::<T>());
        context.bind()?;
        let mut base = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current; the out pointer is ours.
        let got = unsafe { sys::cuMemHostAlloc(&mut base, bytes, flags) };
        if got == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(KernelError::OutOfMemory { what, bytes });
        }
        check("cuMemHostAlloc", got)?;
        let mut buffer =
            PinnedBuffer { context: context.clone(), base: base.cast(), device_address: 0, len, elements: PhantomData };
        // SAFETY: the allocation was made with DEVICEMAP; it has `bytes` bytes.
        unsafe {
            let address = &mut buffer.device_address;
            check("cuMemHostGetDevicePointer", sys::cuMemHostGetDevicePointer_v2(address, base, 0))?;
            std::ptr::write_bytes(buffer.base, 0, len);
        }
        Ok(buffer)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements. Not while a copy writes them.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` initialised elements; no copy writes them meanwhile (contract).
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    /// The elements, to change. Not while a copy reads or writes them.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, exclusive by the borrow.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }

    /// A part of the elements, to change through a shared reference: slabs are split among many users.
    ///
    /// # Safety
    /// Nobody else, on the host or the device, reads or writes the range for the borrow's life.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn range_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: inside the allocation, exclusive by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }

    pub(crate) fn range_ptr(&self, offset: usize, len: usize) -> Result<*mut T> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        ensure!("PinnedBuffer", fits, "{len} elements at {offset} of {}", self.len);
        // SAFETY: inside the allocation.
        Ok(unsafe { self.base.add(offset) })
    }

    /// Where kernels see an element.
    pub(crate) fn device_address(&self, offset: usize) -> sys::CUdeviceptr {
        self.device_address + (offset * size_of::<T>()) as sys::CUdeviceptr
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        // Copies that are under way end first.
        if self.context.synchronize().is_ok() {
            // SAFETY: allocated once, freed once; the device is idle.
            check_quietly(unsafe { sys::cuMemFreeHost(self.base.cast()) });
        }
    }
}
