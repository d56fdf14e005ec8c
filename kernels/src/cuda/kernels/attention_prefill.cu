// Causal attention of many rows over paged K/V, for any device from compute capability 8.0; 9.0 has its own form in
// attention_prefill_wgmma.cu, with results that are the same within rounding.
//
// One block computes a tile of 128 packed rows (64 at head dim 256; see Tile) of one K/V head, 32 (16) a warp, with
// mma.sync. V comes by asynchronous copies while the scores of its keys are computed, the next K while V is multiplied.
// The algorithm is FlashAttention-2's (arXiv:2307.08691). Slots past the tile's last key are never read: the copy
// writes zeros.
//
// Launch: see the constant at the end; grid (num_tiles, num_kv_heads). `parts` of a tile must be 1. Rows of no tile are
// left alone.

constexpr int WARPS = 4;
constexpr int NUM_THREADS = 32 * WARPS;
// Blocks of 16 rows a warp: two share what is loaded of K and V, where registers last.
constexpr int ROW_BLOCKS = HEAD_DIM > 128 ? 1 : 2;
constexpr int WARP_ROWS = 16 * ROW_BLOCKS;
constexpr int TILE_ROWS = WARPS * WARP_ROWS;
constexpr int TILE_KEYS = 64;
constexpr int PAGES = TILE_KEYS / CHUNK_TOKENS;
constexpr int PIECES = HEAD_DIM / 8;
// An odd number of 16-byte pieces a row: eight rows lie in eight different groups of banks.
constexpr int ROW_BYTES = (PIECES + 1) * 16;
constexpr int K_AT = TILE_ROWS * ROW_BYTES;
constexpr int V_AT = K_AT + TILE_KEYS * ROW_BYTES;
constexpr int SHARED_BYTES = V_AT + TILE_KEYS * ROW_BYTES;
constexpr int STEPS = HEAD_DIM / 16;
constexpr int KEY_COLUMNS = TILE_KEYS / 8;

DEVICE void copy_q(const Tile& tile, u32 to, const bf16* q, u32 num_kv_heads) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE_ROWS * PIECES; i += NUM_THREADS) {
        const u32 row = i / PIECES;
        const u32 piece = i % PIECES;
        const bool live = row < tile.num_rows;
        const u64 from = live ? row_element(tile, row, blockIdx.y, num_kv_heads) + piece * 8 : 0;
        copy_async_16(to + row * ROW_BYTES + piece * 16, q + from, live);
    }
}

// Copies K (part 0) or V (part 1) of a step's keys from its pages.
DEVICE void copy_part(u32 to, const bf16* kv, const u32 (&blocks)[PAGES], u32 part, u32 first_key, u32 num_keys,
                      u32 num_kv_heads) {
    const u64 token_len = (u64)num_kv_heads * HEAD_DIM;
#pragma unroll
    for (int page = 0; page < PAGES; ++page) {
        const bf16* from = kv + ((u64)blocks[page] * 2 + part) * CHUNK_TOKENS * token_len + blockIdx.y * HEAD_DIM;
#pragma unroll
        for (int i = threadIdx.x; i < CHUNK_TOKENS * PIECES; i += NUM_THREADS) {
            const u32 token = i / PIECES;
            const u32 piece = i % PIECES;
            const u32 row = page * CHUNK_TOKENS + token;
            copy_async_16(to + row * ROW_BYTES + piece * 16, from + token * token_len + piece * 8,
                          first_key + row < num_keys);
        }
    }
}

DEVICE void load_blocks(u32 (&blocks)[PAGES], const u32* table, u32 first_key, u32 num_keys) {
#pragma unroll
    for (int page = 0; page < PAGES; ++page) {
        const u32 key = first_key + page * CHUNK_TOKENS;
        blocks[page] = key < num_keys ? __ldg(table + key / CHUNK_TOKENS) : 0;
    }
}

DEVICE void compute_scores(float (&s)[ROW_BLOCKS][KEY_COLUMNS][4], u32 q, u32 k) {
    const u32 lane = threadIdx.x % 32;
    const u32 q_row = q + lane % 16 * ROW_BYTES + lane / 16 * 16;
    const u32 k_row = k + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS * KEY_COLUMNS * 4; ++i) s[i / 4 / KEY_COLUMNS][i / 4 % KEY_COLUMNS][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[ROW_BLOCKS][4];
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; ++m) load_matrix_x4(a[m], q_row + m * 16 * ROW_BYTES + step * 32);
#pragma unroll
        for (int i = 0; i < KEY_COLUMNS; i += 2) {
            u32 b[4];
            load_matrix_x4(b, k_row + i * 8 * ROW_BYTES + step * 32);
#pragma unroll
            for (int m = 0; m < ROW_BLOCKS; ++m) {
                mma_16x8x16(s[m][i], a[m], b[0], b[1]);
                mma_16x8x16(s[m][i + 1], a[m], b[2], b[3]);
            }
        }
    }
}

DEVICE void add_values(float (&o)[ROW_BLOCKS][PIECES][4], const float (&s)[ROW_BLOCKS][KEY_COLUMNS][4], u32 v) {
    const u32 lane = threadIdx.x % 32;
    const u32 v_row = v + lane % 16 * ROW_BYTES + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < TILE_KEYS / 16; ++step) {
        // The accumulator's layout of scores is the operand's layout of probabilities.
        u32 p[ROW_BLOCKS][4];
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&column)[4] = s[m][2 * step + i / 2];
                p[m][i] = pack_bf16(column[i % 2 * 2], column[i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < PIECES; i += 2) {
            u32 b[4];
            load_matrix_x4_transposed(b, v_row + step * 16 * ROW_BYTES + i * 16);
#pragma unroll
            for (int m = 0; m < ROW_BLOCKS; ++m) {
                mma_16x8x16(o[m][i], p[m], b[0], b[1]);
                mma_16x8x16(o[m][i + 1], p[m], b[2], b[3]);
            }
        }
    }
}

// Leaves of a thread's scores those whose key the row attends.
DEVICE void mask(float (&s)[KEY_COLUMNS][4], u32 first_key, const u32 (&positions)[2]) {
#pragma unroll
    for (int i = 0; i < KEY_COLUMNS * 4; ++i) {
        const u32 key = first_key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (key > positions[i / 2 % 2]) s[i / 4][i % 4] = MINUS_INFINITY;
    }
}

// How far, in powers of two, scores may exceed the maximum that they are taken relative to: far less than a float
// holds.
constexpr float SLACK = 8.0f;

// Turns the scores of 16 rows into probabilities, not yet divided by their sum and relative to maxima of the scores so
// far, or less by SLACK at most; when these move, scales what was summed.
DEVICE void softmax(float (&s)[KEY_COLUMNS][4], float (&o)[PIECES][4], float (&maxima)[2], float (&sums)[2],
                    float scale) {
    float now[2] = {maxima[0], maxima[1]};
#pragma unroll
    for (int i = 0; i < KEY_COLUMNS * 4; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i / 4][i % 4]);
#pragma unroll
    for (int r = 0; r < 2; ++r) now[r] = max_of_quad(now[r]);
    const float rise = fmaxf((now[0] - maxima[0]) * scale, (now[1] - maxima[1]) * scale);
    if (!__all_sync(~0u, rise <= SLACK)) {
        float shrink[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            shrink[r] = exp2_approx((maxima[r] - now[r]) * scale);
            maxima[r] = now[r];
            sums[r] *= shrink[r];
        }
#pragma unroll
        for (int i = 0; i < PIECES * 4; ++i) o[i / 4][i % 4] *= shrink[i / 2 % 2];
    }
    const float offset[2] = {maxima[0] * scale, maxima[1] * scale};
#pragma unroll
    for (int i = 0; i < KEY_COLUMNS * 4; ++i) {
        s[i / 4][i % 4] = exp2_approx(s[i / 4][i % 4] * scale - offset[i / 2 % 2]);
        sums[i / 2 % 2] += s[i / 4][i % 4];
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

    u32 blocks[PAGES];
    load_blocks(blocks, table, 0, num_keys);
    copy_q(tile, base, q, num_kv_heads);
    copy_part(base + K_AT, kv, blocks, 0, 0, num_keys, num_kv_heads);
    copy_async_commit();

    // Rows past the tile's last attend what that one does; nobody reads them.
    u32 positions[ROW_BLOCKS][2];
    float o[ROW_BLOCKS][PIECES][4];
    float maxima[ROW_BLOCKS][2];
    float sums[ROW_BLOCKS][2];
#pragma unroll
    for (int m = 0; m < ROW_BLOCKS; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 row = warp * WARP_ROWS + m * 16 + lane / 4 + 8 * r;
            positions[m][r] = row_position(tile, min(row, tile.num_rows - 1));
            maxima[m][r] = MINUS_INFINITY;
            sums[m][r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < PIECES * 4; ++i) o[m][i / 4][i % 4] = 0.0f;
    }
    const u32 top_position = row_position(tile, min(warp * WARP_ROWS, tile.num_rows - 1));

    for (u32 key = 0; key < num_keys; key += TILE_KEYS) {
        // K is there, and all are done with the V before.
        copy_async_wait<0>();
        __syncthreads();
        copy_part(base + V_AT, kv, blocks, 1, key, num_keys, num_kv_heads);
        copy_async_commit();
        u32 next_blocks[PAGES];
        load_blocks(next_blocks, table, key + TILE_KEYS, num_keys);
        float s[ROW_BLOCKS][KEY_COLUMNS][4];
        compute_scores(s, base + warp * WARP_ROWS * ROW_BYTES, base + K_AT);
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; ++m) {
            if (key + TILE_KEYS > top_position + 1) mask(s[m], key, positions[m]);
            softmax(s[m], o[m], maxima[m], sums[m], scale);
        }
        // V is there, and all are done with K.
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int page = 0; page < PAGES; ++page) blocks[page] = next_blocks[page];
        if (key + TILE_KEYS < num_keys) {
            copy_part(base + K_AT, kv, blocks, 0, key + TILE_KEYS, num_keys, num_kv_heads);
        }
        copy_async_commit();
        add_values(o, s, base + V_AT);
    }

#pragma unroll
    for (int i = 0; i < ROW_BLOCKS * 2; ++i) {
        const int m = i / 2;
        const int r = i % 2;
        const float factor = 1.0f / sum_of_quad(sums[m][r]);
        const u32 row = warp * WARP_ROWS + m * 16 + lane / 4 + 8 * r;
        if (row >= tile.num_rows) continue;
        bf16* to = out + row_element(tile, row, blockIdx.y, num_kv_heads) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            *reinterpret_cast<u32*>(to + n * 8) = pack_bf16(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
        }
    }
}

// Threads a block, dynamic shared bytes, packed rows a tile, unused.
extern "C" __constant__ u32 attention_prefill_mma_launch[4] = {NUM_THREADS, SHARED_BYTES, TILE_ROWS, 0};
