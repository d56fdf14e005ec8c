//! f32 memory on a device: the activations that operations read and write.

use std::ops::Range;

use crate::cpu::memory::Memory;
use crate::device::Device;
use crate::error::{ensure, Result};

/// A fixed number of f32 on a device. Operations write through a shared reference: inside [`Device::run`] the workers
/// split an operation's output among themselves and a barrier ends it, so no element is written by one worker while
/// another one looks at it. Outside a region, buffers are only read or written by whoever drives the device.
pub struct Buffer {
    memory: Memory,
    len: usize,
}

impl Buffer {
    /// `len` zeros.
    pub fn zeros(device: &Device, len: usize) -> Result<Buffer> {
        let _host = device.isa();
        let bytes = len.saturating_mul(4);
        Ok(Buffer { memory: Memory::zeroed("a buffer", bytes)?, len })
    }

    pub fn from_slice(device: &Device, values: &[f32]) -> Result<Buffer> {
        let buffer = Buffer::zeros(device, values.len())?;
        // SAFETY: the buffer was made here; nobody else can look at it yet.
        unsafe { buffer.slice_mut(0..values.len()) }.copy_from_slice(values);
        Ok(buffer)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of a range; an error if it does not lie inside.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<f32>> {
        ensure!("Buffer::read", range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        Ok(self.as_slice()[range].to_vec())
    }

    /// Overwrites elements from `offset` on. Not while a region that uses the buffer runs.
    pub fn write(&self, offset: usize, values: &[f32]) -> Result<()> {
        let fits = offset.checked_add(values.len()).is_some_and(|end| end <= self.len);
        ensure!("Buffer::write", fits, "{} at {offset} of {}", values.len(), self.len);
        // SAFETY: in range; no region runs (the method's contract).
        unsafe { self.slice_mut(offset..offset + values.len()) }.copy_from_slice(values);
        Ok(())
    }

    /// The elements, where the device's memory is the host's. Not while an operation that writes them runs.
    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: `len` initialised f32; nobody writes meanwhile (the type's contract).
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.len) }
    }

    /// Where the elements lie, for kernels that split them among workers.
    pub(crate) fn as_mut_ptr(&self) -> *mut f32 {
        self.memory.as_ptr()
    }

    /// # Safety
    /// The range lies inside, and for the borrow's life no one else reads or writes it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [f32] {
        debug_assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the allocation, exclusive by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr::<f32>().add(range.start), range.len()) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} f32)", self.len)
    }
}
