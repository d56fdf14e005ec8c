// Copies of many pages in one launch. Source and destination are device memory or pinned host memory mapped into the
// device's address space; 16 bytes a thread, four loads in flight. Two grid dimensions: parts of a page, pages.

// As many pages as fit into a launch's parameters.
constexpr int MAX_PAGES = 120;

struct Pages {
    u64 from[MAX_PAGES];
    u64 to[MAX_PAGES];
};

// `vectors` times 16 bytes a page.
extern "C" __global__ void __launch_bounds__(256) copy_pages(const __grid_constant__ Pages pages, u32 vectors) {
    const uint4* from = reinterpret_cast<const uint4*>(pages.from[blockIdx.y]);
    uint4* to = reinterpret_cast<uint4*>(pages.to[blockIdx.y]);
    const u32 stride = gridDim.x * blockDim.x;
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < vectors; i += 4 * stride) {
        uint4 value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            value[j] = __ldcs(from + i + j * stride);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            __stcs(to + i + j * stride, value[j]);
        }
    }
    for (; i < vectors; i += stride) {
        __stcs(to + i, __ldcs(from + i));
    }
}
