//! Loaded machine code and the kernels in it.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use cudarc::driver::sys;

use super::call::{check, check_quietly};
use crate::error::Result;

/// A kernel. Valid as long as the context it came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function(pub(crate) sys::CUfunction);

// SAFETY: a handle; the driver's calls on it are thread-safe.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Machine code on the device.
pub(crate) struct Module {
    raw: sys::CUmodule,
    functions: HashMap<String, Function>,
}

// SAFETY: as `Function`.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// The caller has bound the context. Every kernel may use as much shared memory as the device offers.
    pub(crate) fn load(cubin: &[u8], max_shared_bytes: u32) -> Result<Module> {
        let mut module = Module { raw: std::ptr::null_mut(), functions: HashMap::new() };
        // SAFETY: a whole cubin, which states its own length; the out pointer is ours.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module.raw, cubin.as_ptr().cast()) })?;
        let mut count = 0;
        // SAFETY: the module is loaded; the array is as long as counted.
        check("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&mut count, module.raw) })?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: as above.
        let listed = unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module.raw) };
        check("cuModuleEnumerateFunctions", listed)?;
        for function in functions {
            let mut name = std::ptr::null();
            // SAFETY: a function of the module; its name lives as long as the module.
            check("cuFuncGetName", unsafe { sys::cuFuncGetName(&mut name, function) })?;
            // SAFETY: as above, NUL-terminated.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            allow_shared_memory(function, max_shared_bytes)?;
            module.functions.insert(name, Function(function));
        }
        Ok(module)
    }

    pub(crate) fn functions(&self) -> impl Iterator<Item = (&str, Function)> {
        self.functions.iter().map(|(name, function)| (name.as_str(), *function))
    }

    pub(crate) fn function(&self, name: &str) -> Option<Function> {
        self.functions.get(name).copied()
    }

    /// The value of a `__constant__` array of the module.
    pub(crate) fn constants<const N: usize>(&self, name: &str) -> Result<[u32; N]> {
        let symbol = CString::new(name).expect("names hold no NUL");
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the module is loaded; out pointers of ours.
        let found = unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.raw, symbol.as_ptr()) };
        check("cuModuleGetGlobal", found)?;
        let mut values = [0u32; N];
        crate::error::ensure!("Module::constants", bytes == size_of_val(&values), "{name} has {bytes} bytes");
        // SAFETY: the symbol has as many bytes as the array.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), address, bytes) })?;
        Ok(values)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: loaded once, unloaded once; the context is current (`Context::drop`).
            check_quietly(unsafe { sys::cuModuleUnload(self.raw) });
        }
    }
}

fn allow_shared_memory(function: sys::CUfunction, max_shared_bytes: u32) -> Result<()> {
    let mut fixed = 0;
    // SAFETY: a function of a loaded module; the out pointer is ours.
    let got = unsafe {
        let shared = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        sys::cuFuncGetAttribute(&mut fixed, shared, function)
    };
    check("cuFuncGetAttribute", got)?;
    let dynamic = max_shared_bytes as i32 - fixed;
    // SAFETY: as above; static and dynamic shared memory together stay inside the device's limit.
    let set = unsafe {
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        sys::cuFuncSetAttribute(function, limit, dynamic)
    };
    check("cuFuncSetAttribute", set)
}
