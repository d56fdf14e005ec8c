//! Typed memory on the device.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use half::bf16;

use super::call::{check, check_quietly};
use super::context::Context;
use super::stream::Param;
use crate::error::{ensure, KernelError, Result};

/// What buffers hold. Every bit pattern is a value.
pub trait Element: Copy + Default + Send + Sync + 'static + sealed::Sealed {}

impl<T: Copy + Default + Send + Sync + 'static + sealed::Sealed> Element for T {}

pub(crate) mod sealed {
    /// Plain numbers, and structs of them without padding.
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// An allocation on the device. Operations write through shared references; streams order them.
pub struct DeviceBuffer<T> {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    len: usize,
    elements: PhantomData<T>,
}

/// A part of a buffer, or nothing ([`View::none`]) where an operand is optional. As a kernel's parameter it is the address.
#[repr(C)]
pub struct View<'a, T> {
    address: sys::CUdeviceptr,
    len: usize,
    buffer: PhantomData<&'a T>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

// SAFETY: the first field is the address, which is what a pointer parameter takes.
unsafe impl<T> Param for View<'_, T> {}

impl<T: Element> DeviceBuffer<T> {
    /// `len` elements of unknown content; `what` names them if they cannot be had.
    pub fn new(context: &Arc<Context>, what: &'static str, len: usize) -> Result<DeviceBuffer<T>> {
        context.bind()?;
        let bytes = len.saturating_mul(size_of::<T>());
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: a context is current; the out pointer is ours.
            let got = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
            if got == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                let (free_bytes, _) = context.memory_bytes()?;
                return Err(KernelError::DeviceOutOfMemory { what, bytes, free_bytes });
            }
            check("cuMemAlloc", got)?;
        }
        Ok(DeviceBuffer { context: context.clone(), address, len, elements: PhantomData })
    }

    /// `len` zeros.
    pub fn zeros(context: &Arc<Context>, what: &'static str, len: usize) -> Result<DeviceBuffer<T>> {
        let buffer = DeviceBuffer::new(context, what, len)?;
        if len > 0 {
            // SAFETY: the whole allocation. The null stream's work is waited for below, so every later stream sees it.
            check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(buffer.address, 0, buffer.bytes()) })?;
            context.synchronize()?;
        }
        Ok(buffer)
    }

    pub fn from_slice(context: &Arc<Context>, what: &'static str, values: &[T]) -> Result<DeviceBuffer<T>> {
        let buffer = DeviceBuffer::new(context, what, values.len())?;
        if !values.is_empty() {
            // SAFETY: elements are plain numbers.
            let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
            buffer.view().write_bytes(context, bytes)?;
        }
        Ok(buffer)
    }
}

impl<T> DeviceBuffer<T> {
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// All of it.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, buffer: PhantomData }
    }

    /// The elements of a range.
    pub fn slice(&self, range: Range<usize>) -> Result<View<'_, T>> {
        self.view().slice(range)
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        // Whoever still uses it, on any stream, ends first.
        if self.address != 0 && self.context.synchronize().is_ok() {
            // SAFETY: allocated once, freed once; the device is idle.
            check_quietly(unsafe { sys::cuMemFree_v2(self.address) });
        }
    }
}

impl<T> std::fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer({} x {})", self.len, std::any::type_name::<T>())
    }
}

impl<'a, T> View<'a, T> {
    /// The absent operand.
    pub fn none() -> View<'static, T> {
        View { address: 0, len: 0, buffer: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn slice(&self, range: Range<usize>) -> Result<View<'a, T>> {
        ensure!("View::slice", range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        let address = self.address + (range.start * size_of::<T>()) as sys::CUdeviceptr;
        Ok(View { address, len: range.len(), buffer: PhantomData })
    }

    /// Copies from pageable memory outside of any stream, and waits: for loading.
    pub(crate) fn write_bytes(&self, context: &Context, bytes: &[u8]) -> Result<()> {
        ensure!("View::write_bytes", bytes.len() == self.bytes(), "{} bytes for {}", bytes.len(), self.bytes());
        context.bind()?;
        // SAFETY: as many bytes on either side. The call has read them when it returns, but the last may still be on their way
        // through the driver's own buffer: waited for, so that every later stream sees them.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(self.address, bytes.as_ptr().cast(), bytes.len()) })?;
        context.synchronize()
    }

    /// The same bytes as other elements.
    pub(crate) fn cast<U: Element>(self) -> Result<View<'a, U>>
    where
        T: Element,
    {
        let fits = self.bytes().is_multiple_of(size_of::<U>());
        let is_aligned = self.address.is_multiple_of(align_of::<U>() as sys::CUdeviceptr);
        ensure!("View::cast", fits && is_aligned, "{} bytes at {:#x}", self.bytes(), self.address);
        Ok(View { address: self.address, len: self.bytes() / size_of::<U>(), buffer: PhantomData })
    }

    pub(crate) fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Kernels load 16 bytes at once.
    pub(crate) fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(16)
    }
}

/// bf16 from f32, for uploads.
pub fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}
