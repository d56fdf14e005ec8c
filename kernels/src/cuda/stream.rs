//! Queues of work on the device, and marks in them.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::call::{check, check_quietly};
use super::context::Context;
use super::memory::{Element, View};
use super::module::Function;
use super::pinned::PinnedBuffer;
use crate::error::{ensure, Result};

/// Work in order. Streams run beside each other.
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: a handle; the driver's calls on it are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A mark in a stream that other streams and the host can wait for.
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: as `Stream`.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

/// Size of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Launch {
    pub(crate) fn new(blocks: usize, threads: u32) -> Launch {
        Launch { grid: [blocks as u32, 1, 1], threads, shared_bytes: 0 }
    }
}

/// What a kernel takes by value, with the bits that its parameter has.
///
/// # Safety
/// The type is plain data laid out as the kernel's parameter.
pub(crate) unsafe trait Param {}

// SAFETY: plain numbers.
unsafe impl Param for u32 {}
// SAFETY: plain numbers.
unsafe impl Param for u64 {}
// SAFETY: plain numbers.
unsafe impl Param for f32 {}

impl Stream {
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the out pointer is ours.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream { context: context.clone(), raw })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits on the host for everything enqueued so far.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Marks what was enqueued so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both are alive and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    /// What is enqueued from here on starts after the event's last mark.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: as in `record`.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Copies from pageable memory. The values may change as soon as this returns.
    pub fn write<T: Element>(&self, to: View<T>, values: &[T]) -> Result<()> {
        ensure!("Stream::write", values.len() == to.len(), "{} values for {}", values.len(), to.len());
        self.context.bind()?;
        // SAFETY: as many bytes on either side; a copy from pageable memory has read it all when it returns.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), values.as_ptr().cast(), size_of_val(values), self.raw) };
        check("cuMemcpyHtoDAsync", copied)
    }

    /// Copies to the host and waits for it.
    pub fn read<T: Element>(&self, from: View<T>) -> Result<Vec<T>> {
        let mut values = vec![T::default(); from.len()];
        self.context.bind()?;
        // SAFETY: as many bytes on either side; waited for below, before anyone looks.
        let copied = unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                values.as_mut_ptr().cast(),
                from.address(),
                size_of_val(values.as_slice()),
                self.raw,
            )
        };
        check("cuMemcpyDtoHAsync", copied)?;
        self.synchronize()?;
        Ok(values)
    }

    /// Enqueues a copy from pinned memory, which must not change or go before the stream has passed it.
    pub fn upload<T: Element>(&self, from: &PinnedBuffer<T>, offset: usize, to: View<T>) -> Result<()> {
        let source = from.range_ptr(offset, to.len())?;
        self.context.bind()?;
        // SAFETY: both ranges were checked; the caller keeps the host's still (contract).
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), source.cast_const().cast(), to.bytes(), self.raw) };
        check("cuMemcpyHtoDAsync", copied)
    }

    /// Enqueues a copy to pinned memory, which nobody looks at before the stream has passed it.
    pub fn download<T: Element>(&self, from: View<T>, to: &PinnedBuffer<T>, offset: usize) -> Result<()> {
        let target = to.range_ptr(offset, from.len())?;
        self.context.bind()?;
        // SAFETY: as in `upload`.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), from.address(), from.bytes(), self.raw) };
        check("cuMemcpyDtoHAsync", copied)
    }

    /// Enqueues a copy of a view's bytes to the host: at full speed if that memory is pinned.
    ///
    /// # Safety
    /// `to` lives and is not looked at until the stream has been waited for.
    pub(crate) unsafe fn download_bytes<T>(&self, from: View<T>, to: &mut [u8]) -> Result<()> {
        ensure!("Stream::download_bytes", to.len() == from.bytes(), "{} bytes to {}", from.bytes(), to.len());
        self.context.bind()?;
        // SAFETY: as many bytes on either side; the caller keeps the host's still.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address(), to.len(), self.raw) };
        check("cuMemcpyDtoHAsync", copied)
    }

    /// Enqueues a copy of bytes from the host; as [`Stream::download_bytes`].
    ///
    /// # Safety
    /// `from` lives and does not change until the stream has been waited for.
    pub(crate) unsafe fn upload_bytes<T>(&self, from: &[u8], to: View<T>) -> Result<()> {
        ensure!("Stream::upload_bytes", from.len() == to.bytes(), "{} bytes to {}", from.len(), to.bytes());
        self.context.bind()?;
        // SAFETY: as above.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.as_ptr().cast(), from.len(), self.raw) };
        check("cuMemcpyHtoDAsync", copied)
    }

    /// Copies inside the device.
    pub fn copy<T: Element>(&self, from: View<T>, to: View<T>) -> Result<()> {
        ensure!("Stream::copy", from.len() == to.len(), "{} elements to {}", from.len(), to.len());
        self.context.bind()?;
        // SAFETY: as many bytes on either side, both on the device.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), from.bytes(), self.raw) };
        check("cuMemcpyDtoDAsync", copied)
    }

    /// Sets every byte.
    pub fn fill_bytes<T: Element>(&self, to: View<T>, byte: u8) -> Result<()> {
        self.context.bind()?;
        // SAFETY: inside an allocation; every bit pattern is a value of an element.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(to.address(), byte, to.bytes(), self.raw) })
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// # Safety
    /// The parameters are the kernel's, in number, order and layout, and what they point to is long enough.
    pub(crate) unsafe fn launch(&self, function: Function, launch: Launch, params: &[&dyn Param]) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        self.context.bind()?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_PARAMS];
        debug_assert!(params.len() <= MAX_PARAMS);
        for (pointer, param) in pointers.iter_mut().zip(params) {
            *pointer = std::ptr::from_ref(*param).cast::<c_void>().cast_mut();
        }
        let Launch { grid: [x, y, z], threads, shared_bytes } = launch;
        // SAFETY: by the caller's word; the driver copies the parameters before it returns.
        let launched = unsafe {
            sys::cuLaunchKernel(
                function.0,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared_bytes,
                self.raw,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", launched)
    }
}

/// More than any kernel takes.
const MAX_PARAMS: usize = 24;

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created once, destroyed once; the driver finishes what is enqueued.
            check_quietly(unsafe { sys::cuStreamDestroy_v2(self.raw) });
        }
    }
}

impl Event {
    /// A mark without a time.
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// A mark whose time can be asked for.
    pub fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Event> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current; the out pointer is ours.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { context: context.clone(), raw })
    }

    /// Whether the device has passed the last mark; true for an event that was never recorded.
    pub fn is_done(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits on the host for the last mark.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Seconds from this mark to a later one, both passed and timed.
    pub fn seconds_to(&self, later: &Event) -> Result<f64> {
        self.context.bind()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both are alive; the out pointer is ours.
        let got = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, self.raw, later.raw) };
        check("cuEventElapsedTime", got)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created once, destroyed once; the driver keeps it until its mark was passed.
            check_quietly(unsafe { sys::cuEventDestroy_v2(self.raw) });
        }
    }
}
