// Attention of a step's decode rows over paged K/V: one launch serves entries of any lengths, read from device memory.
//
// The work is a line of quanta of keys: entry by entry, in an entry K/V head by K/V head, in a head from the first key
// to the last. Every block takes an equal piece of the line, whatever entries it cuts across, so the grid is the same
// for every step and all blocks end together. A (entry, head) cut into several pieces is merged by the block that is
// last to finish one, in the order of the keys (split K/V: Flash-Decoding; the even cut: Stream-K, arXiv:2301.03598).
//
// All query heads of a group share a warp's loads of K and V, as columns of the tensor cores' small dimension: a warp
// computes K q^T for 16 keys and up to 16 heads, and accumulates V^T p^T. A warp has its own ring of 16-key tiles in
// shared memory, filled by asynchronous copies. The copies run on across the ends of pieces, so memory stays busy while
// the block's warps meet there to add up.
//
// K and V are read once, so they are the first to leave the L2 cache: entries and block table, which every layer reads,
// stay (64 rows of 1,024 keys, 8 K/V heads, on an H200: 74.0 us without, 71.3 us with).
//
// Slots past the row's position are never read (the copy writes zeros), so what they hold does not matter.
//
// Launch: see the constant at the end; grid any number of blocks, best those that fit the device at once.
// partials: launch[2] floats a block, any content; counters: entries x num_kv_heads x SUBGROUPS zeros, left zero.

// Shared memory of a multiprocessor, of which a block may take all but 1 KiB.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 100 == 10
#define SM_SHARED_KIB 228
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
#define SM_SHARED_KIB 164
#else
#define SM_SHARED_KIB 100
#endif

// Warps that share a piece, taking turns at its tiles, and stages of a warp's ring.
#ifndef DECODE_WARPS
#define DECODE_WARPS (SM_SHARED_KIB == 228 || HEAD_DIM < 256 ? 4 : 2)
#endif
#ifndef DECODE_STAGES
#define DECODE_STAGES (SM_SHARED_KIB < 228 ? 2 : HEAD_DIM <= 64 ? 5 : HEAD_DIM <= 96 ? 4 : 3)
#endif

constexpr int WARPS = DECODE_WARPS;
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int STAGES = DECODE_STAGES;
constexpr int TILE_KEYS = 16;
constexpr int QUANTUM_KEYS = TILE_KEYS * WARPS;
// Query heads go in columns of 8, at most two; larger groups are several subgroups, each of which reads K and V.
constexpr int COLUMNS = GROUP > 8 ? 2 : 1;
constexpr int SUBGROUPS = (GROUP + 15) / 16;
constexpr int HEADS = (GROUP + SUBGROUPS - 1) / SUBGROUPS;
constexpr int PIECES = HEAD_DIM / 8;
// An odd number of 16-byte pieces a row: eight rows lie in eight different groups of banks.
constexpr int ROW_BYTES = (PIECES + 1) * 16;
constexpr int PART_BYTES = TILE_KEYS * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * PART_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int STEPS = HEAD_DIM / 16;
// The warps' sums meet in shared memory, some heads at a time, in rows padded against bank conflicts. Rows of partial
// sums in memory end with their maximum and their sum of probabilities.
constexpr int MERGE_HEADS = HEADS < 4 ? HEADS : 4;
constexpr int MERGE_ROW = HEAD_DIM + 4;
constexpr int PARTIAL_ROW = HEAD_DIM + 4;
constexpr int MERGE_OFFSET = WARPS * RING_BYTES;
constexpr int SHARED_BYTES = MERGE_OFFSET + WARPS * MERGE_HEADS * (MERGE_ROW + 2) * 4;
// A block takes 1 KiB more, and some variables.
constexpr int BLOCKS_PER_SM = 2 * (SHARED_BYTES + 1280) <= SM_SHARED_KIB * 1024 ? 2 : 1;
static_assert(SHARED_BYTES + 256 <= (SM_SHARED_KIB - 1) * 1024, "shared memory");

struct Problem {
    const bf16* q;
    const bf16* kv;
    const u32* block_table;
    const Entry* entries;
    u32 num_entries;
    u32 num_kv_heads;
    u32 units;  // (K/V head, subgroup) pairs
    float scale;
    bf16* out;
    float* partials;
    u32* counters;
};

// A block's share of the line of quanta, and where it begins.
struct Share {
    u32 begin, end;
    u32 total, blocks;  // of the whole launch
    u32 entry;          // that holds `begin`
    u32 entry_begin;    // that entry's first quantum in the line
};

DEVICE u32 entry_quanta(const Entry& entry) {
    return entry.num_rows == 0 ? 0 : entry.first_position / QUANTUM_KEYS + 1;
}

// The block that computes a quantum: the last whose begin, total * block / blocks, is at or before it.
DEVICE u32 owner(const Share& share, u32 quantum) {
    return (u32)(((u64)(quantum + 1) * share.blocks - 1) / share.total);
}

DEVICE Share find_share(const Problem& problem) {
    __shared__ u32 warp_sums[WARPS];
    __shared__ u32 found[2];
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 each = (problem.num_entries + NUM_THREADS - 1) / NUM_THREADS;
    const u32 from = min(threadIdx.x * each, problem.num_entries);
    const u32 to = min(from + each, problem.num_entries);
    u32 mine = 0;
    for (u32 i = from; i < to; ++i) mine += entry_quanta(problem.entries[i]);
    u32 up_to = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
    }
    if (lane == 31) warp_sums[warp] = up_to;
    __syncthreads();
    u32 quanta = 0;
    for (u32 i = 0; i < WARPS; ++i) {
        if (i == warp) up_to += quanta;
        quanta += warp_sums[i];
    }
    Share share = {};
    share.total = quanta * problem.units;
    share.blocks = min(gridDim.x, share.total);
    if (blockIdx.x >= share.blocks) return share;
    share.begin = (u32)((u64)share.total * blockIdx.x / share.blocks);
    share.end = (u32)((u64)share.total * (blockIdx.x + 1) / share.blocks);
    u32 before = (up_to - mine) * problem.units;
    if (share.begin >= before && share.begin < up_to * problem.units) {
        u32 i = from;
        for (u32 next = before; i < to; ++i, before = next) {
            next += entry_quanta(problem.entries[i]) * problem.units;
            if (share.begin < next) break;
        }
        found[0] = i;
        found[1] = before;
    }
    __syncthreads();
    share.entry = found[0];
    share.entry_begin = found[1];
    return share;
}

// --- Pieces: runs of quanta of one (entry, unit) ---------------------------------------------------------------------

struct Piece {
    u32 pair;            // counter of the (entry, unit)
    u32 pair_begin;      // its quanta in the line
    u32 pair_quanta;
    u32 first_row;
    const u32* table;    // the entry's blocks
    u32 unit;
    u32 first_key, end_key;
};

// What is left of a share.
struct Line {
    u32 at, end;
    u32 entry, entry_begin;
};

DEVICE Piece take_piece(Line& line, const Problem& problem) {
    Entry entry = problem.entries[line.entry];
    u32 quanta = entry_quanta(entry);
    while (line.at == line.entry_begin + quanta * problem.units) {
        line.entry_begin = line.at;
        entry = problem.entries[++line.entry];
        quanta = entry_quanta(entry);
    }
    Piece piece;
    piece.unit = (line.at - line.entry_begin) / quanta;
    piece.pair = line.entry * problem.units + piece.unit;
    piece.pair_begin = line.entry_begin + piece.unit * quanta;
    piece.pair_quanta = quanta;
    piece.first_row = entry.first_row;
    piece.table = problem.block_table + entry.first_block;
    const u32 first = line.at - piece.pair_begin;
    const u32 count = min(quanta - first, line.end - line.at);
    piece.first_key = first * QUANTUM_KEYS;
    piece.end_key = min(entry.first_position + 1, (first + count) * QUANTUM_KEYS);
    line.at += count;
    return piece;
}

// A piece's tiles go round the warps.
DEVICE u32 warp_tiles(const Piece& piece, u32 warp) {
    const u32 tiles = (piece.end_key - piece.first_key + TILE_KEYS - 1) / TILE_KEYS;
    return tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;
}

DEVICE u32 tile_key(const Piece& piece, u32 warp, u32 tile) {
    return piece.first_key + (warp + tile * WARPS) * TILE_KEYS;
}

// --- A warp's copies -------------------------------------------------------------------------------------------------

// The tiles of all the share's pieces, in order, into the warp's ring.
struct Copies {
    Line line;
    Piece piece;
    u32 tile, num_tiles;
    u32 blocks;  // lane i: the block of tile i of the 32 at hand
    u32 stage;
};

DEVICE void copy_tile(const Problem& problem, u32 to, u32 block, u32 key, u32 end_key, u32 kv_head) {
    const u32 lane = threadIdx.x % 32;
    const u64 token_len = (u64)problem.num_kv_heads * HEAD_DIM;
    const u64 policy = evict_first_policy();
    const bf16* k = problem.kv + ((u64)block * 2 * CHUNK_TOKENS + key % CHUNK_TOKENS) * token_len + kv_head * HEAD_DIM;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < TILE_KEYS * PIECES / 32; ++i) {
            const u32 row = (i * 32 + lane) / PIECES;
            const u32 piece = (i * 32 + lane) % PIECES;
            copy_async_16_once(to + part * PART_BYTES + row * ROW_BYTES + piece * 16,
                               k + (part * CHUNK_TOKENS + row) * token_len + piece * 8, key + row < end_key, policy);
        }
    }
}

// Starts the copy of the next tile, if there is one; commits a group in any case, so that groups count tiles.
DEVICE void copy_next(Copies& copies, const Problem& problem, u32 ring) {
    const u32 warp = threadIdx.x / 32;
    while (copies.tile == copies.num_tiles && copies.line.at < copies.line.end) {
        copies.piece = take_piece(copies.line, problem);
        copies.tile = 0;
        copies.num_tiles = warp_tiles(copies.piece, warp);
    }
    if (copies.tile < copies.num_tiles) {
        if (copies.tile % 32 == 0) {
            const u32 mine = copies.tile + threadIdx.x % 32;
            const u32 key = tile_key(copies.piece, warp, mine);
            copies.blocks = mine < copies.num_tiles ? __ldg(copies.piece.table + key / CHUNK_TOKENS) : 0;
        }
        const u32 block = __shfl_sync(~0u, copies.blocks, copies.tile % 32);
        copy_tile(problem, ring + copies.stage * STAGE_BYTES, block, tile_key(copies.piece, warp, copies.tile),
                  copies.piece.end_key, copies.piece.unit / SUBGROUPS);
        ++copies.tile;
        copies.stage = copies.stage + 1 == STAGES ? 0 : copies.stage + 1;
    }
    copy_async_commit();
}

// --- A warp's sums ---------------------------------------------------------------------------------------------------

// Over a warp's keys of a piece, for the heads of columns 2 (lane % 4) and the next: maxima of the scores (in powers of
// two), sums of this lane's probabilities, and V^T p^T in the layout of the accumulators.
struct Sums {
    float maxima[COLUMNS][2];
    float sums[COLUMNS][2];
    float values[STEPS][COLUMNS][4];
};

DEVICE void clear(Sums& state) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            state.maxima[c][i] = MINUS_INFINITY;
            state.sums[c][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < STEPS * 4; ++i) state.values[i / 4][c][i % 4] = 0.0f;
    }
}

DEVICE float max_of_keys(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

DEVICE float sum_of_keys(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

// An 8 x 8 matrix across the warp, transposed.
DEVICE u32 transpose(u32 x) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
    return d;
}

// The group's queries as the second operand: zeros past the last head.
DEVICE void load_q(u32 (&q)[STEPS][COLUMNS][2], const bf16* from, u32 num_heads) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const u32 head = c * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < STEPS * 2; ++i) {
            const bf16* at = from + head * HEAD_DIM + i * 8 + lane % 4 * 2;
            q[i / 2][c][i % 2] = head < num_heads ? __ldg(reinterpret_cast<const u32*>(at)) : 0;
        }
    }
}

// Adds a tile, in shared memory at `k`, whose keys are `key`.. but not past `end_key`.
DEVICE void attend_tile(Sums& state, const u32 (&q)[STEPS][COLUMNS][2], u32 k, u32 key, u32 end_key, float scale) {
    const u32 lane = threadIdx.x % 32;
    // Two chains of dependent products, for latency.
    float s[2][COLUMNS][4] = {};
    const u32 k_row = k + lane % 16 * ROW_BYTES + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        load_matrix_x4(a, k_row + step * 32);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) mma_16x8x16(s[step % 2][c], a, q[step][c][0], q[step][c][1]);
    }
    u32 p[COLUMNS][2];
    float shrink[COLUMNS][2];
    const bool ragged = key + TILE_KEYS > end_key;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float score[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[i] = (s[0][c][i] + s[1][c][i]) * scale;
            if (ragged && key + lane / 4 + i / 2 * 8 >= end_key) score[i] = MINUS_INFINITY;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float now = fmaxf(state.maxima[c][i], max_of_keys(fmaxf(score[i], score[i + 2])));
            shrink[c][i] = exp2_approx(state.maxima[c][i] - now);
            state.maxima[c][i] = now;
            score[i] = exp2_approx(score[i] - now);
            score[i + 2] = exp2_approx(score[i + 2] - now);
            state.sums[c][i] = state.sums[c][i] * shrink[c][i] + score[i] + score[i + 2];
        }
        p[c][0] = transpose(pack_bf16(score[0], score[1]));
        p[c][1] = transpose(pack_bf16(score[2], score[3]));
    }
    const u32 v_row = k + PART_BYTES + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        load_matrix_x4_transposed(a, v_row + step * 32);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state.values[step][c][i] *= shrink[c][i % 2];
            mma_16x8x16(state.values[step][c], a, p[c][0], p[c][1]);
        }
    }
}

// --- Adding up -------------------------------------------------------------------------------------------------------

DEVICE void store_out(const Problem& problem, const Piece& piece, u32 head, u32 dim, const float4& x, float factor) {
    const u64 of_row = piece.unit / SUBGROUPS * GROUP + piece.unit % SUBGROUPS * HEADS + head;
    const u64 at = ((u64)piece.first_row * problem.num_kv_heads * GROUP + of_row) * HEAD_DIM + dim;
    const uint2 pairs = {pack_bf16(x.x * factor, x.y * factor), pack_bf16(x.z * factor, x.w * factor)};
    *reinterpret_cast<uint2*>(problem.out + at) = pairs;
}

// A block's partial sums: slot 0 for a pair that an earlier block began, slot 1 for one that it begins itself.
DEVICE float* partial(const Problem& problem, u32 block, u32 first_block, u32 head) {
    return problem.partials + ((u64)(block * 2 + (block == first_block)) * HEADS + head) * PARTIAL_ROW;
}

// Adds up the warps' sums of a piece: to `out` if it is the whole of its pair, else to the block's partial sums.
DEVICE void merge_warps(const Problem& problem, const Piece& piece, const Sums& state, u32 num_heads, u32 first_block,
                        bool whole, char* shared) {
    float* values = reinterpret_cast<float*>(shared + MERGE_OFFSET);
    float* maxima = values + WARPS * MERGE_HEADS * MERGE_ROW;
    float* sums = maxima + WARPS * MERGE_HEADS;
    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int first_head = 0; first_head < HEADS; first_head += MERGE_HEADS) {
        const u32 heads = min(MERGE_HEADS, num_heads - min(num_heads, first_head));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int c = first_head / 8;
            const float sum = sum_of_keys(state.sums[c][i]);
            const u32 head = c * 8 + lane % 4 * 2 + i - first_head;
            if (head >= heads) continue;
            const u32 row = warp * MERGE_HEADS + head;
            if (lane < 4) {
                maxima[row] = state.maxima[c][i];
                sums[row] = sum;
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                values[row * MERGE_ROW + step * 16 + lane / 4] = state.values[step][c][i];
                values[row * MERGE_ROW + step * 16 + lane / 4 + 8] = state.values[step][c][i + 2];
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < heads * (HEAD_DIM / 4); i += NUM_THREADS) {
            const u32 head = i / (HEAD_DIM / 4);
            const u32 dim = i % (HEAD_DIM / 4) * 4;
            float maximum = maxima[head];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) maximum = fmaxf(maximum, maxima[w * MERGE_HEADS + head]);
            float sum = 0.0f;
            float4 x = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const u32 row = w * MERGE_HEADS + head;
                const float weight = exp2_approx(maxima[row] - maximum);
                const float4 y = *reinterpret_cast<const float4*>(values + row * MERGE_ROW + dim);
                sum += weight * sums[row];
                x = {x.x + weight * y.x, x.y + weight * y.y, x.z + weight * y.z, x.w + weight * y.w};
            }
            if (whole) {
                store_out(problem, piece, first_head + head, dim, x, 1.0f / sum);
            } else {
                float* to = partial(problem, blockIdx.x, first_block, first_head + head);
                *reinterpret_cast<float4*>(to + dim) = x;
                if (dim == 0) *reinterpret_cast<float2*>(to + HEAD_DIM) = make_float2(maximum, sum);
            }
        }
        __syncthreads();
    }
}

// Adds up the blocks' partial sums of a pair, in the order of the keys.
DEVICE void merge_blocks(const Problem& problem, const Piece& piece, u32 num_heads, u32 first_block, u32 last_block) {
    constexpr int BATCH = 8;
    for (u32 i = threadIdx.x; i < num_heads * (HEAD_DIM / 4); i += NUM_THREADS) {
        const u32 head = i / (HEAD_DIM / 4);
        const u32 dim = i % (HEAD_DIM / 4) * 4;
        float maximum = MINUS_INFINITY, sum = 0.0f;
        float4 x = {};
        for (u32 first = first_block; first <= last_block; first += BATCH) {
            // All loads of a batch are on their way before the first is used.
            float2 weights[BATCH];
            float4 y[BATCH];
            float now = maximum;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const float* from = partial(problem, min(first + b, last_block), first_block, head);
                weights[b] = __ldcg(reinterpret_cast<const float2*>(from + HEAD_DIM));
                y[b] = __ldcg(reinterpret_cast<const float4*>(from + dim));
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (first + b > last_block) weights[b] = make_float2(MINUS_INFINITY, 0.0f);
                now = fmaxf(now, weights[b].x);
            }
            const float shrink = exp2_approx(maximum - now);
            maximum = now;
            sum *= shrink;
            x = {x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink};
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const float weight = exp2_approx(weights[b].x - now);
                sum += weight * weights[b].y;
                x = {x.x + weight * y[b].x, x.y + weight * y[b].y, x.z + weight * y[b].z, x.w + weight * y[b].w};
            }
        }
        store_out(problem, piece, head, dim, x, 1.0f / sum);
    }
}

// Ends a piece: every warp's sums of it are in `state`.
DEVICE void finish_piece(const Problem& problem, const Share& share, const Piece& piece, const Sums& state,
                         u32 num_heads, char* shared) {
    __shared__ bool is_last;
    const u32 first_block = owner(share, piece.pair_begin);
    const u32 last_block = owner(share, piece.pair_begin + piece.pair_quanta - 1);
    const bool whole = first_block == last_block;
    merge_warps(problem, piece, state, num_heads, first_block, whole, shared);
    if (whole) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(problem.counters + piece.pair, 1) == last_block - first_block;
        // The next launch finds it as this one did.
        if (is_last) problem.counters[piece.pair] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    merge_blocks(problem, piece, num_heads, first_block, last_block);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
attention_decode(const bf16* __restrict__ q, const bf16* __restrict__ kv, const u32* __restrict__ block_table,
                 const Entry* __restrict__ entries, u32 num_entries, u32 num_kv_heads, float scale,
                 bf16* __restrict__ out, float* partials, u32* counters) {
    extern __shared__ __align__(128) char shared[];
    const Problem problem = {q,     kv,  block_table, entries, num_entries, num_kv_heads, num_kv_heads * SUBGROUPS,
                             scale * LOG2_E, out, partials,    counters};
    const Share share = find_share(problem);
    if (share.begin == share.end) return;

    const u32 warp = threadIdx.x / 32;
    const u32 ring = shared_address(shared) + warp * RING_BYTES;
    Line line = {share.begin, share.end, share.entry, share.entry_begin};
    Copies copies = {};
    copies.line = line;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_next(copies, problem, ring);

    u32 stage = 0;
    while (line.at < line.end) {
        const Piece piece = take_piece(line, problem);
        const u32 first_head = piece.unit / SUBGROUPS * GROUP + piece.unit % SUBGROUPS * HEADS;
        const u32 num_heads = min(HEADS, GROUP - piece.unit % SUBGROUPS * HEADS);
        u32 group[STEPS][COLUMNS][2];
        load_q(group, q + ((u64)piece.first_row * num_kv_heads * GROUP + first_head) * HEAD_DIM, num_heads);
        Sums state;
        clear(state);
        const u32 num_tiles = warp_tiles(piece, warp);
        for (u32 tile = 0; tile < num_tiles; ++tile) {
            copy_async_wait<STAGES - 2>();
            // The tile is there for every lane, and every lane is done with the one before, whose place is copied to.
            __syncwarp();
            copy_next(copies, problem, ring);
            attend_tile(state, group, ring + stage * STAGE_BYTES, tile_key(piece, warp, tile), piece.end_key,
                        problem.scale);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        finish_piece(problem, share, piece, state, num_heads, shared);
    }
    copy_async_wait<0>();
}

// Threads a block, dynamic shared bytes, floats of `partials` a block, blocks a multiprocessor.
extern "C" __constant__ u32 attention_decode_launch[4] = {NUM_THREADS, SHARED_BYTES, 2 * HEADS * PARTIAL_ROW,
                                                          BLOCKS_PER_SM};
