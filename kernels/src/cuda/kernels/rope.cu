// Rotation of q and k and the write of new K and V to their slots, in one pass over the output of the q, k, v product.
//
// A warp takes one head of one row. Lane l holds elements 2l and 2l + 1 of the head's first half (of what rotates) and
// their partners half an extent further, so that a rotation needs no exchange; heads wider than 128 take two steps.
// Bytes a row: the row of q, k, v is read and written once.

// Steps over a half of up to 128 elements.
constexpr int STEPS = 2;

struct RopeShape {
    u32 rows;
    u32 num_heads;
    u32 num_kv_heads;
    u32 head_dim;
    // Half of the rotated extent, even; 0: nothing rotates.
    u32 half;
    u32 chunk_tokens;
    u32 num_slots;
    u32 max_positions;
    float norm_eps;
};

__device__ __forceinline__ u32 pack(float low, float high) {
    return float_to_bf16(low) | static_cast<u32>(float_to_bf16(high)) << 16;
}

// qkv: [row][num_heads + 2 num_kv_heads][head_dim] bf16. q: [row][num_heads][head_dim], may not overlap qkv.
// bias: one a column of qkv, or null. q_weight, k_weight: RMS norm over each head before its rotation, or null.
// table: [position][cos.. sin..] f32. kv: [block][K|V][token][kv_head][head_dim], slot = block * chunk_tokens + token.
// A row whose slot or position is out of range writes NaN to q and nothing to kv.
extern "C" __global__ void __launch_bounds__(256) rope_and_write(
    const u16* __restrict__ qkv, const float* __restrict__ bias, const float* __restrict__ q_weight,
    const float* __restrict__ k_weight, const u32* __restrict__ positions, const u32* __restrict__ slots,
    const float* __restrict__ table, u16* __restrict__ q, u16* __restrict__ kv, const RopeShape shape) {
    const u32 lane = threadIdx.x % 32;
    const u32 row_heads = shape.num_heads + 2 * shape.num_kv_heads;
    const u32 task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 row = task / row_heads;
    const u32 head = task - row * row_heads;
    if (row >= shape.rows) {
        return;
    }
    const bool is_q = head < shape.num_heads;
    const bool is_v = head >= shape.num_heads + shape.num_kv_heads;
    const u32 dim = shape.head_dim;
    const u32 half = is_v ? dim / 2 : shape.half == 0 ? dim / 2 : shape.half;
    const u32 position = positions[row];
    const u32 slot = slots[row];
    const bool is_inside = slot < shape.num_slots && position < shape.max_positions;
    const u16* from = qkv + (static_cast<size_t>(row) * row_heads + head) * dim;

    u16* to;
    if (is_q) {
        to = q + (static_cast<size_t>(row) * shape.num_heads + head) * dim;
    } else {
        if (!is_inside) {
            return;
        }
        const u32 kv_head = is_v ? head - shape.num_heads - shape.num_kv_heads : head - shape.num_heads;
        const size_t block = slot / shape.chunk_tokens;
        const u32 token = slot % shape.chunk_tokens + (is_v ? shape.chunk_tokens : 0);
        to = kv + ((block * 2 * shape.chunk_tokens + token) * shape.num_kv_heads + kv_head) * dim;
    }

    float low[STEPS][2];
    float high[STEPS][2];
    // What lies behind the rotated extent passes through.
    float rest[STEPS * 2][2];
    const float* head_bias = bias == nullptr ? nullptr : bias + head * dim;
    auto load = [&](u32 i, float (&pair)[2]) {
        const u32 bits = *reinterpret_cast<const u32*>(from + i);
        pair[0] = bf16_to_float(bits & 0xffff);
        pair[1] = bf16_to_float(bits >> 16);
        if (head_bias != nullptr) {
            pair[0] += head_bias[i];
            pair[1] += head_bias[i + 1];
        }
    };
    float squares = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32 i = step * 64 + lane * 2;
        if (i < half) {
            load(i, low[step]);
            load(half + i, high[step]);
            squares += low[step][0] * low[step][0] + low[step][1] * low[step][1];
            squares += high[step][0] * high[step][0] + high[step][1] * high[step][1];
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS * 2; ++step) {
        const u32 i = 2 * half + step * 64 + lane * 2;
        if (i < dim) {
            load(i, rest[step]);
            squares += rest[step][0] * rest[step][0] + rest[step][1] * rest[step][1];
        }
    }
    const float* weight = is_q ? q_weight : is_v ? nullptr : k_weight;
    if (weight != nullptr) {
        const float factor = rsqrtf(warp_sum(squares) / dim + shape.norm_eps);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const u32 i = step * 64 + lane * 2;
            if (i < half) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    low[step][j] *= factor * weight[i + j];
                    high[step][j] *= factor * weight[half + i + j];
                }
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS * 2; ++step) {
            const u32 i = 2 * half + step * 64 + lane * 2;
            if (i < dim) {
                rest[step][0] *= factor * weight[i];
                rest[step][1] *= factor * weight[i + 1];
            }
        }
    }
    const bool is_rotated = !is_v && shape.half > 0 && is_inside;
    const float* cosines = table + static_cast<size_t>(is_rotated ? position : 0) * 2 * shape.half;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32 i = step * 64 + lane * 2;
        if (i >= half) {
            continue;
        }
        if (is_rotated) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float cosine = cosines[i + j];
                const float sine = cosines[shape.half + i + j];
                const float first = low[step][j] * cosine - high[step][j] * sine;
                high[step][j] = high[step][j] * cosine + low[step][j] * sine;
                low[step][j] = first;
            }
        }
        if (!is_inside) {
            low[step][0] = low[step][1] = high[step][0] = high[step][1] = __uint_as_float(0x7fc00000u);
        }
        *reinterpret_cast<u32*>(to + i) = pack(low[step][0], low[step][1]);
        *reinterpret_cast<u32*>(to + half + i) = pack(high[step][0], high[step][1]);
    }
#pragma unroll
    for (int step = 0; step < STEPS * 2; ++step) {
        const u32 i = 2 * half + step * 64 + lane * 2;
        if (i < dim) {
            *reinterpret_cast<u32*>(to + i) = pack(rest[step][0], rest[step][1]);
        }
    }
}
