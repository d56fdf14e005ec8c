// Activations and sums element by element, eight bf16 a thread and step. Bound by memory: every byte is read and written
// once.

// out[row][i] = silu(x[row][i]) * x[row][dim + i]: gate and up lie side by side, as one product writes them.
// dim is a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) silu_mul(
    const u16* __restrict__ x, u32 rows, u32 dim, u16* __restrict__ out) {
    const u32 vectors = dim / 8;
    const u64 total = static_cast<u64>(rows) * vectors;
    for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
         at += static_cast<u64>(gridDim.x) * blockDim.x) {
        const u64 row = at / vectors;
        const u32 i = (at - row * vectors) * 8;
        const Bf16x8 gate = *reinterpret_cast<const Bf16x8*>(x + row * 2 * dim + i);
        const Bf16x8 up = *reinterpret_cast<const Bf16x8*>(x + row * 2 * dim + dim + i);
        Bf16x8 result;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            result.at[j] = float_to_bf16(silu(bf16_to_float(gate.at[j])) * bf16_to_float(up.at[j]));
        }
        *reinterpret_cast<Bf16x8*>(out + row * dim + i) = result;
    }
}

// The functions that `bias_activate` applies.
enum Activation : u32 { IDENTITY = 0, RELU = 1, GELU_ERF = 2, GELU_TANH = 3 };

__device__ __forceinline__ float activate(u32 activation, float x) {
    if (activation == RELU) {
        // Not fmaxf, which hides NaN.
        return x < 0.0f ? 0.0f : x;
    }
    if (activation == GELU_ERF) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    }
    if (activation == GELU_TANH) {
        return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    }
    return x;
}

// x = activation(x + bias), in place; bias may be null. dim is a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) bias_activate(
    u16* __restrict__ x, const float* __restrict__ bias, u32 activation, u32 rows, u32 dim) {
    const u32 vectors = dim / 8;
    const u64 total = static_cast<u64>(rows) * vectors;
    for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
         at += static_cast<u64>(gridDim.x) * blockDim.x) {
        const u32 i = (at % vectors) * 8;
        Bf16x8 value = *reinterpret_cast<const Bf16x8*>(x + at * 8);
        float add[8] = {};
        if (bias != nullptr) {
            const F32x4 low = *reinterpret_cast<const F32x4*>(bias + i);
            const F32x4 high = *reinterpret_cast<const F32x4*>(bias + i + 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                add[j] = low.at[j];
                add[4 + j] = high.at[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            value.at[j] = float_to_bf16(activate(activation, bf16_to_float(value.at[j]) + add[j]));
        }
        *reinterpret_cast<Bf16x8*>(x + at * 8) = value;
    }
}

// x[row] += bias, in the residual stream. dim is a multiple of 4.
extern "C" __global__ void __launch_bounds__(256) add_bias(
    float* __restrict__ x, const float* __restrict__ bias, u32 rows, u32 dim) {
    const u32 vectors = dim / 4;
    const u64 total = static_cast<u64>(rows) * vectors;
    for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
         at += static_cast<u64>(gridDim.x) * blockDim.x) {
        F32x4 value = *reinterpret_cast<const F32x4*>(x + at * 4);
        const F32x4 add = *reinterpret_cast<const F32x4*>(bias + (at % vectors) * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            value.at[j] += add.at[j];
        }
        *reinterpret_cast<F32x4*>(x + at * 4) = value;
    }
}

// out[i] = a uniform number in (-half_width, half_width) from SplitMix64's stream (Steele, Lea, Flood 2014), element i.
extern "C" __global__ void __launch_bounds__(256) fill_uniform(
    u64 seed, float half_width, u64 len, u16* __restrict__ out) {
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < len;
         i += static_cast<u64>(gridDim.x) * blockDim.x) {
        u64 z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        const float unit = __fsub_rn(static_cast<float>(z >> 40) / 8388608.0f, 1.0f);
        out[i] = float_to_bf16(__fmul_rn(unit, half_width));
    }
}
