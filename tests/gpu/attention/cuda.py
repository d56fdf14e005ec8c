"""The little of NVRTC and the CUDA driver that the harness needs, through ctypes."""

import ctypes
import glob
import hashlib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def kernel_folder():
    """Where the kernel sources lie: KERNELS, or the repository's folder."""
    return os.environ.get("KERNELS", os.path.join(HERE, "../../../kernels/src/cuda/kernels"))


def find_nvrtc():
    folders = [p for p in [os.environ.get("NVRTC_PATH")] if p]
    folders += [os.path.join(p, "nvidia/cu13/lib") for p in sys.path]
    folders += ["/usr/local/cuda/lib64"]
    for folder in folders:
        found = sorted(glob.glob(os.path.join(folder, "libnvrtc.so.1*")))
        if found:
            # NVRTC looks for its builtins by name: have them loaded.
            for builtins in glob.glob(os.path.join(folder, "libnvrtc-builtins.so.*")):
                ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(found[0])
    raise RuntimeError("libnvrtc is in none of " + ", ".join(folders))


_nvrtc = None


def compile_cubin(file, defines, arch, options=()):
    """Compiles the shared header and a kernel file; returns (cubin, log). Cached in CUBINS, if set."""
    global _nvrtc
    text = "".join(open(os.path.join(kernel_folder(), name)).read() for name in ("attention_common.cuh", file))
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "-lineinfo", *options]
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    key = hashlib.sha256("\0".join([text, *flags]).encode()).hexdigest()[:24]
    cache = os.environ.get("CUBINS")
    path = cache and os.path.join(cache, f"{os.path.splitext(file)[0]}-{key}.cubin")
    if path and os.path.exists(path):
        return open(path, "rb").read(), ""
    _nvrtc = _nvrtc or find_nvrtc()
    program = ctypes.c_void_p()
    check(_nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), 0, None, None))
    array = (ctypes.c_char_p * len(flags))(*[f.encode() for f in flags])
    status = _nvrtc.nvrtcCompileProgram(program, len(flags), array)
    size = ctypes.c_size_t()
    check(_nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check(_nvrtc.nvrtcGetProgramLog(program, log))
    log = log.value.decode()
    if status != 0:
        raise RuntimeError(f"{file} {defines}:\n{log}")
    check(_nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    cubin = ctypes.create_string_buffer(size.value)
    check(_nvrtc.nvrtcGetCUBIN(program, cubin))
    _nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if path:
        os.makedirs(cache, exist_ok=True)
        open(path + ".part%d" % os.getpid(), "wb").write(cubin.raw)
        os.replace(path + ".part%d" % os.getpid(), path)
    return cubin.raw, log


def check(status):
    if status != 0:
        raise RuntimeError(f"CUDA status {status}")


class Module:
    """A loaded cubin; needs a current context (PyTorch's)."""

    def __init__(self, cubin):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.handle = ctypes.c_void_p()
        check(self.driver.cuModuleLoadData(ctypes.byref(self.handle), cubin))

    def kernel(self, name):
        """Returns the kernel with its launch constants, its shared memory limit raised."""
        function = ctypes.c_void_p()
        check(self.driver.cuModuleGetFunction(ctypes.byref(function), self.handle, name.encode()))
        pointer, size = ctypes.c_uint64(), ctypes.c_size_t()
        symbol = (name + "_launch").encode()
        check(self.driver.cuModuleGetGlobal_v2(ctypes.byref(pointer), ctypes.byref(size), self.handle, symbol))
        launch = (ctypes.c_uint32 * 4)()
        check(self.driver.cuMemcpyDtoH_v2(launch, pointer, 16))
        max_dynamic_shared = 8
        check(self.driver.cuFuncSetAttribute(function, max_dynamic_shared, launch[1]))
        return Kernel(self, function, list(launch))


class Kernel:
    def __init__(self, module, function, launch):
        self.module, self.function, self.launch = module, function, launch

    def __call__(self, stream, grid, args):
        """`args` are ctypes values; a tensor counts as its data pointer."""
        values = [ctypes.c_uint64(a.data_ptr()) if hasattr(a, "data_ptr") else a for a in args]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        check(
            self.module.driver.cuLaunchKernel(
                self.function, *grid, self.launch[0], 1, 1, self.launch[1], ctypes.c_void_p(stream), pointers, None
            )
        )


class TensorMap(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


def kv_tensor_map(kv, head_dim, num_kv_heads, chunk_tokens, num_blocks):
    """The map of a layer's K/V that the wgmma form reads; returns it with the buffer that keeps it aligned."""
    buffer = (ctypes.c_uint8 * 256)()
    address = (ctypes.addressof(buffer) + 63) & ~63
    row = num_kv_heads * head_dim * 2
    dims = (ctypes.c_uint64 * 4)(head_dim, num_kv_heads, chunk_tokens, 2 * num_blocks)
    strides = (ctypes.c_uint64 * 3)(head_dim * 2, row, chunk_tokens * row)
    box = (ctypes.c_uint32 * 4)(64, 1, chunk_tokens, 1)
    ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    bf16, no_interleave, swizzle_128, promote_256, fill_zeros = 9, 0, 3, 3, 0
    driver = ctypes.CDLL("libcuda.so.1")
    check(
        driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(address), bf16, 4, ctypes.c_void_p(kv.data_ptr()), dims, strides, box, ones,
            no_interleave, swizzle_128, promote_256, fill_zeros,
        )
    )
    return TensorMap.from_address(address), buffer
