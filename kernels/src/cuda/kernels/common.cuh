// Put in front of every kernel file: bf16 in 16-byte vectors, and sums over a warp or a block. No toolkit header is
// needed, so NVRTC alone compiles everything.
//
// bf16 numbers are kept as their 16 bits; arithmetic is in f32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Eight bf16.
struct alignas(16) Bf16x8 {
    u16 at[8];
};

// Four f32.
struct alignas(16) F32x4 {
    float at[4];
};

__device__ __forceinline__ float bf16_to_float(u16 bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
}

// Round to nearest even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + __expf(-x));
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

// The sum over a block of whole warps, in every thread. `scratch` holds 33 floats; a barrier lies before its reuse.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    value = warp_sum(value);
    __syncthreads();
    if (lane == 0) {
        scratch[warp] = value;
    }
    __syncthreads();
    if (warp == 0) {
        const int num_warps = blockDim.x / 32;
        const float total = warp_sum(lane < num_warps ? scratch[lane] : 0.0f);
        if (lane == 0) {
            scratch[32] = total;
        }
    }
    __syncthreads();
    return scratch[32];
}
