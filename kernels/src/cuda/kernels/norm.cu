// RMS norm and layer norm of rows of the residual stream (f32), with what is added to the stream beforehand.
// One block a row, which stays in registers. Bytes a row: 4 dim read, 2 dim written; with a delta or bias 2 or 4 dim more
// read and 4 dim more written.

// Vectors of four that a thread holds: dim <= 4 * vectors * 1024. Two forms, since registers bound how many rows a
// multiprocessor takes at once.
constexpr int NARROW = 2;
constexpr int WIDE = 8;

// x[row] += delta[row] (bf16) and bias (f32), where given; both pointers may be null.
__device__ __forceinline__ F32x4 take(float* x, const u16* delta, const float* bias, int i) {
    F32x4 value = *reinterpret_cast<const F32x4*>(x + i);
    if (delta != nullptr) {
        const uint2 bits = *reinterpret_cast<const uint2*>(delta + i);
        value.at[0] += bf16_to_float(bits.x & 0xffff);
        value.at[1] += bf16_to_float(bits.x >> 16);
        value.at[2] += bf16_to_float(bits.y & 0xffff);
        value.at[3] += bf16_to_float(bits.y >> 16);
    }
    if (bias != nullptr) {
        const F32x4 add = *reinterpret_cast<const F32x4*>(bias + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            value.at[j] += add.at[j];
        }
    }
    if (delta != nullptr || bias != nullptr) {
        *reinterpret_cast<F32x4*>(x + i) = value;
    }
    return value;
}

__device__ __forceinline__ void put(u16* out, int i, const float (&values)[4]) {
    uint2 bits;
    bits.x = float_to_bf16(values[0]) | static_cast<u32>(float_to_bf16(values[1])) << 16;
    bits.y = float_to_bf16(values[2]) | static_cast<u32>(float_to_bf16(values[3])) << 16;
    *reinterpret_cast<uint2*>(out + i) = bits;
}

// out = x / sqrt(mean(x^2) + eps) * weight. dim is a multiple of 4.
template <int MAX_VECTORS>
__device__ __forceinline__ void rms_norm_row(float* x, const u16* delta, const float* bias, const float* weight,
                                             float eps, u32 dim, u16* out) {
    __shared__ float scratch[33];
    const size_t first = static_cast<size_t>(blockIdx.x) * dim;
    x += first;
    out += first;
    delta = delta == nullptr ? nullptr : delta + first;
    F32x4 values[MAX_VECTORS];
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; ++v) {
        const u32 i = (v * blockDim.x + threadIdx.x) * 4;
        if (i < dim) {
            values[v] = take(x, delta, bias, i);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                squares += values[v].at[j] * values[v].at[j];
            }
        }
    }
    const float factor = rsqrtf(block_sum(squares, scratch) / dim + eps);
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; ++v) {
        const u32 i = (v * blockDim.x + threadIdx.x) * 4;
        if (i < dim) {
            const F32x4 scale = *reinterpret_cast<const F32x4*>(weight + i);
            float normed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                normed[j] = values[v].at[j] * factor * scale.at[j];
            }
            put(out, i, normed);
        }
    }
}

// out = (x - mean) / sqrt(variance + eps) * weight + shift. dim is a multiple of 4.
template <int MAX_VECTORS>
__device__ __forceinline__ void layer_norm_row(float* x, const u16* delta, const float* bias, const float* weight,
                                               const float* shift, float eps, u32 dim, u16* out) {
    __shared__ float scratch[33];
    const size_t first = static_cast<size_t>(blockIdx.x) * dim;
    x += first;
    out += first;
    delta = delta == nullptr ? nullptr : delta + first;
    F32x4 values[MAX_VECTORS];
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; ++v) {
        const u32 i = (v * blockDim.x + threadIdx.x) * 4;
        if (i < dim) {
            values[v] = take(x, delta, bias, i);
            sum += (values[v].at[0] + values[v].at[1]) + (values[v].at[2] + values[v].at[3]);
        }
    }
    const float mean = block_sum(sum, scratch) / dim;
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; ++v) {
        if ((v * blockDim.x + threadIdx.x) * 4 < dim) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                values[v].at[j] -= mean;
                squares += values[v].at[j] * values[v].at[j];
            }
        }
    }
    const float factor = rsqrtf(block_sum(squares, scratch) / dim + eps);
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; ++v) {
        const u32 i = (v * blockDim.x + threadIdx.x) * 4;
        if (i < dim) {
            const F32x4 scale = *reinterpret_cast<const F32x4*>(weight + i);
            const F32x4 add = *reinterpret_cast<const F32x4*>(shift + i);
            float normed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                normed[j] = values[v].at[j] * factor * scale.at[j] + add.at[j];
            }
            put(out, i, normed);
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024, 2) rms_norm(
    float* x, const u16* delta, const float* bias, const float* weight, float eps, u32 dim, u16* out) {
    rms_norm_row<NARROW>(x, delta, bias, weight, eps, dim, out);
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm_wide(
    float* x, const u16* delta, const float* bias, const float* weight, float eps, u32 dim, u16* out) {
    rms_norm_row<WIDE>(x, delta, bias, weight, eps, dim, out);
}

extern "C" __global__ void __launch_bounds__(1024, 2) layer_norm(
    float* x, const u16* delta, const float* bias, const float* weight, const float* shift, float eps, u32 dim,
    u16* out) {
    layer_norm_row<NARROW>(x, delta, bias, weight, shift, eps, dim, out);
}

extern "C" __global__ void __launch_bounds__(1024) layer_norm_wide(
    float* x, const u16* delta, const float* bias, const float* weight, const float* shift, float eps, u32 dim,
    u16* out) {
    layer_norm_row<WIDE>(x, delta, bias, weight, shift, eps, dim, out);
}
