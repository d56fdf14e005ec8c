// Rotation of q and k and the write of new K and V to their slots, in one pass over the output of the q, k, v product.
//
// A head is head_dim / 16 neighbouring lanes of a warp. A lane holds two vectors of eight: elements 8u.. of the rotated
// extent's first half and their partners half an extent further, so that a rotation needs no exchange; behind the rotated
// extent, two vectors that pass through. Bytes a row: the row of q, k, v is read and written once.

struct RopeShape {
    u32 rows;
    u32 num_heads;
    u32 num_kv_heads;
    // A multiple of 16, at most 256.
    u32 head_dim;
    // Half of the rotated extent, a multiple of 8; 0: nothing rotates.
    u32 half;
    u32 chunk_tokens;
    u32 num_slots;
    u32 max_positions;
    float norm_eps;
};

__device__ __forceinline__ void load(const u16* from, float (&to)[8]) {
    const Bf16x8 bits = *reinterpret_cast<const Bf16x8*>(from);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        to[j] = bf16_to_float(bits.at[j]);
    }
}

__device__ __forceinline__ void load(const float* from, float (&to)[8]) {
    const F32x4 low = *reinterpret_cast<const F32x4*>(from);
    const F32x4 high = *reinterpret_cast<const F32x4*>(from + 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        to[j] = low.at[j];
        to[4 + j] = high.at[j];
    }
}

__device__ __forceinline__ void store(u16* to, const float (&from)[8]) {
    Bf16x8 bits;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        bits.at[j] = float_to_bf16(from[j]);
    }
    *reinterpret_cast<Bf16x8*>(to) = bits;
}

// qkv: [row][num_heads + 2 num_kv_heads][head_dim] bf16. q: [row][num_heads][head_dim], may not overlap qkv.
// bias: one a column of qkv, or null. q_weight, k_weight: RMS norm over each head before its rotation, or null.
// table: [position][cos.. sin..] f32. kv: [block][K|V][token][kv_head][head_dim], slot = block * chunk_tokens + token.
// A row whose slot or position is out of range writes NaN to q and nothing to kv.
extern "C" __global__ void __launch_bounds__(256) rope_and_write(
    const u16* __restrict__ qkv, const float* __restrict__ bias, const float* __restrict__ q_weight,
    const float* __restrict__ k_weight, const u32* __restrict__ positions, const u32* __restrict__ slots,
    const float* __restrict__ table, u16* __restrict__ q, u16* __restrict__ kv, const RopeShape shape) {
    const u32 dim = shape.head_dim;
    const u32 lanes = dim / 16;
    const u32 lane = threadIdx.x % 32;
    const u32 heads_per_warp = 32 / lanes;
    const u32 unit = lane % lanes;
    const u32 row_heads = shape.num_heads + 2 * shape.num_kv_heads;
    const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 task = warp * heads_per_warp + lane / lanes;
    const u32 row = task / row_heads;
    const u32 head = task - row * row_heads;
    // All lanes stay for the sums over heads.
    const bool is_live = lane < heads_per_warp * lanes && row < shape.rows;
    const bool is_q = head < shape.num_heads;
    const bool is_v = head >= shape.num_heads + shape.num_kv_heads;
    // Of V and of what lies behind the rotated extent nothing rotates.
    const bool in_extent = unit * 8 < shape.half;
    const u32 low_at = in_extent ? unit * 8 : 2 * shape.half + (unit - shape.half / 8) * 16;
    const u32 high_at = in_extent ? shape.half + unit * 8 : low_at + 8;

    float low[8] = {};
    float high[8] = {};
    if (is_live) {
        const u16* from = qkv + (static_cast<size_t>(row) * row_heads + head) * dim;
        load(from + low_at, low);
        load(from + high_at, high);
        if (bias != nullptr) {
            float add[8];
            load(bias + head * dim + low_at, add);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                low[j] += add[j];
            }
            load(bias + head * dim + high_at, add);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                high[j] += add[j];
            }
        }
    }
    if (q_weight != nullptr || k_weight != nullptr) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            squares += low[j] * low[j] + high[j] * high[j];
        }
        float sum = 0.0f;
        for (u32 i = 0; i < lanes; ++i) {
            sum += __shfl_sync(0xffffffffu, squares, (lane - unit + i) % 32);
        }
        const float* weight = is_q ? q_weight : is_v ? nullptr : k_weight;
        if (weight != nullptr && is_live) {
            const float factor = rsqrtf(sum / dim + shape.norm_eps);
            float scale[8];
            load(weight + low_at, scale);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                low[j] *= factor * scale[j];
            }
            load(weight + high_at, scale);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                high[j] *= factor * scale[j];
            }
        }
    }
    if (!is_live) {
        return;
    }
    const u32 position = positions[row];
    const u32 slot = slots[row];
    const bool is_inside = slot < shape.num_slots && position < shape.max_positions;
    if (is_inside && in_extent && !is_v) {
        const float* angles = table + static_cast<size_t>(position) * 2 * shape.half + low_at;
        float cosines[8];
        float sines[8];
        load(angles, cosines);
        load(angles + shape.half, sines);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float first = low[j] * cosines[j] - high[j] * sines[j];
            high[j] = high[j] * cosines[j] + low[j] * sines[j];
            low[j] = first;
        }
    }
    u16* to;
    if (is_q) {
        to = q + (static_cast<size_t>(row) * shape.num_heads + head) * dim;
        if (!is_inside) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                low[j] = high[j] = __uint_as_float(0x7fc00000u);
            }
        }
    } else {
        if (!is_inside) {
            return;
        }
        const u32 kv_head = is_v ? head - shape.num_heads - shape.num_kv_heads : head - shape.num_heads;
        const size_t block = slot / shape.chunk_tokens;
        const u32 token = slot % shape.chunk_tokens + (is_v ? shape.chunk_tokens : 0);
        to = kv + ((block * 2 * shape.chunk_tokens + token) * shape.num_kv_heads + kv_head) * dim;
    }
    store(to + low_at, low);
    store(to + high_at, high);
}
