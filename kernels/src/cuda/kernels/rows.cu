// Rows picked by index: embeddings and gathers. Every byte is read and written once; one block a row.

// out[row] = table[tokens[row]] + positions_table[positions[row] + offset], f32; the second table may be null.
// An index past its table gives NaN, which no test lets pass. dim is a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) embedding(
    const u16* __restrict__ table, u32 num_tokens, const u32* __restrict__ tokens,
    const u16* __restrict__ positions_table, u32 num_positions, const u32* __restrict__ positions, u32 offset,
    u32 dim, float* __restrict__ out) {
    const u32 row = blockIdx.x;
    const u32 token = tokens[row];
    const u32 position = positions_table == nullptr ? 0 : positions[row] + offset;
    const bool is_inside = token < num_tokens && (positions_table == nullptr || position < num_positions);
    out += static_cast<size_t>(row) * dim;
    for (u32 i = threadIdx.x * 8; i < dim; i += blockDim.x * 8) {
        F32x4 result[2];
        if (is_inside) {
            const Bf16x8 value = *reinterpret_cast<const Bf16x8*>(table + static_cast<size_t>(token) * dim + i);
            Bf16x8 add = {};
            if (positions_table != nullptr) {
                add = *reinterpret_cast<const Bf16x8*>(positions_table + static_cast<size_t>(position) * dim + i);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                result[j / 4].at[j % 4] = bf16_to_float(value.at[j]) + bf16_to_float(add.at[j]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                result[j / 4].at[j % 4] = __uint_as_float(0x7fc00000u);
            }
        }
        *reinterpret_cast<F32x4*>(out + i) = result[0];
        *reinterpret_cast<F32x4*>(out + i + 4) = result[1];
    }
}

// out[row] = x[indices[row]], rows of `row_vectors` times 16 bytes of any type. An index past the end gives NaN.
extern "C" __global__ void __launch_bounds__(256) gather_rows(
    const uint4* __restrict__ x, u32 num_rows, const u32* __restrict__ indices, u32 row_vectors,
    uint4* __restrict__ out) {
    const u32 index = indices[blockIdx.x];
    out += static_cast<size_t>(blockIdx.x) * row_vectors;
    if (index >= num_rows) {
        for (u32 i = threadIdx.x; i < row_vectors; i += blockDim.x) {
            out[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
        }
        return;
    }
    x += static_cast<size_t>(index) * row_vectors;
    for (u32 i = threadIdx.x; i < row_vectors; i += blockDim.x) {
        out[i] = x[i];
    }
}

// tokens[row] = previous[from[row]] where from[row] is not ~0: rows whose token an earlier step on this stream drew. An index
// past the end gives ~0, which no embedding has.
extern "C" __global__ void __launch_bounds__(256) take_tokens(
    const u32* __restrict__ previous, u32 num_previous, const u32* __restrict__ from, u32 rows,
    u32* __restrict__ tokens) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && from[row] != ~0u) {
        tokens[row] = from[row] < num_previous ? previous[from[row]] : ~0u;
    }
}
