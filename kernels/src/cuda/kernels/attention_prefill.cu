// Causal attention of many rows over paged K/V, for any device from compute capability 8.0; 9.0 has its own form in
// attention_prefill_wgmma.cu, with the same tiles and results within rounding.
//
// One block computes a tile of 64 packed rows (see Tile) of one K/V head, 16 a warp, with mma.sync; K and V of the next
// keys come by asynchronous copies while these are worked on. The algorithm is FlashAttention-2's (arXiv:2307.08691).
// Slots past the tile's last key are never read: the copy writes zeros.
//
// Launch: see the constant at the end; grid (num_tiles, num_kv_heads). `parts` of a tile must be 1. Rows of no tile are left alone.

constexpr int WARPS = 4;
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int TILE_ROWS = 16 * WARPS;
constexpr int TILE_KEYS = HEAD_DIM > 128 ? 32 : 64;
constexpr int PIECES = HEAD_DIM / 8;
// An odd number of 16-byte pieces a row: eight rows lie in eight different groups of banks.
constexpr int ROW_BYTES = (PIECES + 1) * 16;
constexpr int K_OFFSET = TILE_ROWS * ROW_BYTES;
constexpr int PART_BYTES = TILE_KEYS * ROW_BYTES;
constexpr int SHARED_BYTES = K_OFFSET + 2 * 2 * PART_BYTES;
constexpr int STEPS = HEAD_DIM / 16;
constexpr int KEY_COLUMNS = TILE_KEYS / 8;

DEVICE void copy_q(const Tile& tile, u32 to, const bf16* q, u32 num_kv_heads) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE_ROWS * PIECES; i += NUM_THREADS) {
        const u32 row = i / PIECES;
        const u32 piece = i % PIECES;
        const bool live = row < tile.num_rows;
        copy_async_16(to + row * ROW_BYTES + piece * 16, q + (live ? row_element(tile, row, blockIdx.y, num_kv_heads) + piece * 8 : 0), live);
    }
}

DEVICE void copy_keys(u32 to, const bf16* kv, const u32* table, u32 first_key, u32 num_keys, u32 num_kv_heads) {
    const u64 token_len = (u64)num_kv_heads * HEAD_DIM;
#pragma unroll
    for (int i = threadIdx.x; i < TILE_KEYS * PIECES; i += NUM_THREADS) {
        const u32 row = i / PIECES;
        const u32 piece = i % PIECES;
        const u32 key = first_key + row;
        const bool live = key < num_keys;
        const u64 block = live ? __ldg(table + key / CHUNK_TOKENS) : 0;
        const bf16* k = kv + (block * 2 * CHUNK_TOKENS + key % CHUNK_TOKENS) * token_len + blockIdx.y * HEAD_DIM;
        copy_async_16(to + row * ROW_BYTES + piece * 16, k + piece * 8, live);
        copy_async_16(to + PART_BYTES + row * ROW_BYTES + piece * 16, k + CHUNK_TOKENS * token_len + piece * 8, live);
    }
}

DEVICE void scores(float (&s)[KEY_COLUMNS][4], u32 q_rows, u32 k) {
    const u32 lane = threadIdx.x % 32;
    const u32 q_row = q_rows + lane % 16 * ROW_BYTES + lane / 16 * 16;
    const u32 k_row = k + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < KEY_COLUMNS; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        load_matrix_x4(a, q_row + step * 32);
#pragma unroll
        for (int i = 0; i < KEY_COLUMNS; i += 2) {
            u32 b[4];
            load_matrix_x4(b, k_row + i * 8 * ROW_BYTES + step * 32);
            mma_16x8x16(s[i], a, b[0], b[1]);
            mma_16x8x16(s[i + 1], a, b[2], b[3]);
        }
    }
}

DEVICE void add_values(float (&o)[PIECES][4], const float (&s)[KEY_COLUMNS][4], u32 v) {
    const u32 lane = threadIdx.x % 32;
    const u32 v_row = v + lane % 16 * ROW_BYTES + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < TILE_KEYS / 16; ++step) {
        const float(&left)[4] = s[2 * step];
        const float(&right)[4] = s[2 * step + 1];
        const u32 p[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
                          pack_bf16(right[2], right[3])};
#pragma unroll
        for (int i = 0; i < PIECES; i += 2) {
            u32 b[4];
            load_matrix_x4_transposed(b, v_row + step * 16 * ROW_BYTES + i * 16);
            mma_16x8x16(o[i], p, b[0], b[1]);
            mma_16x8x16(o[i + 1], p, b[2], b[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
attention_prefill_mma(const bf16* __restrict__ kv, const bf16* __restrict__ q, const u32* __restrict__ block_table,
                      const Tile* __restrict__ tiles, u32 num_tiles, u32 num_kv_heads, float scale,
                      bf16* __restrict__ out) {
    extern __shared__ __align__(128) char shared[];
    const u32 base = shared_address(shared);
    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    const Tile tile = tiles[blockIdx.x];
    const u32 num_keys = row_position(tile, tile.num_rows - 1) + 1;
    const u32* table = block_table + tile.first_block;
    scale *= LOG2_E;

    copy_q(tile, base, q, num_kv_heads);
    copy_keys(base + K_OFFSET, kv, table, 0, num_keys, num_kv_heads);
    copy_async_commit();

    // Rows past the tile's last attend what that one does; nobody reads them.
    u32 positions[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = min(warp * 16 + lane / 4 + 8 * r, tile.num_rows - 1);
        positions[r] = row_position(tile, row);
    }
    const u32 top_position = row_position(tile, 0);

    float o[PIECES][4];
    float maxima[2] = {MINUS_INFINITY, MINUS_INFINITY};
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < PIECES; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;

    for (u32 key = 0, stage = 0; key < num_keys; key += TILE_KEYS, stage ^= 1) {
        if (key + TILE_KEYS < num_keys) {
            copy_keys(base + K_OFFSET + (stage ^ 1) * 2 * PART_BYTES, kv, table, key + TILE_KEYS, num_keys, num_kv_heads);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const u32 k = base + K_OFFSET + stage * 2 * PART_BYTES;
        float s[KEY_COLUMNS][4];
        scores(s, base + warp * 16 * ROW_BYTES, k);
        if (key + TILE_KEYS > top_position + 1) {
#pragma unroll
            for (int i = 0; i < KEY_COLUMNS * 4; ++i) {
                const u32 mine = key + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (mine > positions[i / 2 % 2]) s[i / 4][i % 4] = MINUS_INFINITY;
            }
        }
        float now[2] = {maxima[0], maxima[1]};
#pragma unroll
        for (int i = 0; i < KEY_COLUMNS * 4; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i / 4][i % 4]);
        float shrink[2], offset[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            now[r] = max_of_quad(now[r]);
            offset[r] = now[r] * scale;
            shrink[r] = exp2_approx(maxima[r] * scale - offset[r]);
            maxima[r] = now[r];
        }
#pragma unroll
        for (int i = 0; i < KEY_COLUMNS * 4; ++i) {
            const int r = i / 2 % 2;
            s[i / 4][i % 4] = exp2_approx(s[i / 4][i % 4] * scale - offset[r]);
            sum[r] += s[i / 4][i % 4];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sums[r] = sums[r] * shrink[r] + sum[r];
#pragma unroll
        for (int i = 0; i < PIECES * 4; ++i) o[i / 4][i % 4] *= shrink[i / 2 % 2];
        add_values(o, s, k + PART_BYTES);
        // The next turn's copy overwrites this tile.
        __syncthreads();
    }

    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = 1.0f / sum_of_quad(sums[r]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = warp * 16 + lane / 4 + 8 * r;
        if (row >= tile.num_rows) continue;
        bf16* to = out + row_element(tile, row, blockIdx.y, num_kv_heads) + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            *reinterpret_cast<u32*>(to + i * 8) = pack_bf16(o[i][2 * r] * factor[r], o[i][2 * r + 1] * factor[r]);
        }
    }
}

// Threads a block, dynamic shared bytes, packed rows a tile, unused.
extern "C" __constant__ u32 attention_prefill_mma_launch[4] = {NUM_THREADS, SHARED_BYTES, TILE_ROWS, 0};
