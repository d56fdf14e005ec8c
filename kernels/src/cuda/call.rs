//! Results of driver calls as this crate's errors.

use std::ffi::CStr;

use cudarc::driver::sys;

use crate::error::{KernelError, Result};

/// `Err` with the call's name and the driver's words unless it succeeded.
pub(crate) fn check(call: &'static str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(KernelError::Cuda { call, reason: describe(error) }),
    }
}

/// As [`check`], for destructors: nobody can act on the error there, and it shows up again in the next call.
pub(crate) fn check_quietly(result: sys::CUresult) {
    let _ = result;
}

fn describe(error: sys::CUresult) -> String {
    let mut text: *const std::ffi::c_char = std::ptr::null();
    // SAFETY: the driver library is loaded (an error of it is at hand); it answers with a static string or refuses.
    let found = unsafe { sys::cuGetErrorString(error, &mut text) };
    if found != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{error:?}");
    }
    // SAFETY: a NUL-terminated static string of the driver.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{text} ({error:?})")
}
