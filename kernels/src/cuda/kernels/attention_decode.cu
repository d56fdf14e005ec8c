// Attention of a step's decode rows over paged K/V: one launch serves entries of any lengths, read from device memory.
//
// The work is a line of quanta of keys: entry by entry, in an entry K/V head by K/V head, in a head from the first key
// to the last. Every block takes an equal piece of the line, whatever entries it cuts across, so the grid is the same
// for every step and all blocks end together. A (entry, head) cut into several pieces is merged by the block that is
// last to finish one, in the order of the keys (split K/V: Flash-Decoding; the even cut: Stream-K, arXiv:2301.03598).
//
// All query heads of a group share a warp's loads of K and V, as columns of the tensor cores' small dimension: a warp
// computes (K q^T) for 16 keys and up to 16 heads, and accumulates (V^T p^T). A warp has its own ring of 16-key tiles in
// shared memory, filled by asynchronous copies, and meets the other warps only at the end of a piece.
//
// Slots past the row's position are never read (the copy writes zeros), so what they hold does not matter.
//
// Launch: see the constant at the end; grid any number of blocks, best those that fit the device at once.
// partials: launch[2] floats a block, any content; counters: entries x num_kv_heads x SUBGROUPS zeros, left zero.

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define LARGE_SHARED 1
#else
#define LARGE_SHARED 0
#endif

#ifndef DECODE_WARPS
#define DECODE_WARPS (LARGE_SHARED || HEAD_DIM < 256 ? 4 : 2)
#endif
#ifndef DECODE_KV_HEADS
#define DECODE_KV_HEADS 1
#endif
#ifndef DECODE_STAGES
#define DECODE_STAGES (!LARGE_SHARED ? 2 : HEAD_DIM <= 64 ? 5 : HEAD_DIM <= 96 ? 4 : 3)
#endif
#ifndef DECODE_BLOCKS_PER_SM
#define DECODE_BLOCKS_PER_SM (LARGE_SHARED && HEAD_DIM < 256 ? 2 : 1)
#endif

constexpr int WARPS = DECODE_WARPS;
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int STAGES = DECODE_STAGES;
// K/V heads a block works on at a time, and the warps that share one, taking turns at its tiles.
constexpr int BLOCK_KV_HEADS = DECODE_KV_HEADS;
constexpr int HEAD_WARPS = WARPS / BLOCK_KV_HEADS;
constexpr int TILE_KEYS = 16;
constexpr int QUANTUM_KEYS = TILE_KEYS * HEAD_WARPS;
// Query heads go in columns of 8, at most two; larger groups are several subgroups, each of which reads K and V.
constexpr int COLUMNS = GROUP > 8 ? 2 : 1;
constexpr int SUBGROUPS = (GROUP + 15) / 16;
constexpr int HEADS = (GROUP + SUBGROUPS - 1) / SUBGROUPS;
constexpr int PIECES = HEAD_DIM / 8;
// An odd number of 16-byte pieces a row: eight rows lie in eight different groups of banks.
constexpr int ROW_BYTES = (PIECES + 1) * 16;
constexpr int PART_BYTES = TILE_KEYS * ROW_BYTES;
constexpr int RING_BYTES = STAGES * 2 * PART_BYTES;
constexpr int STEPS = HEAD_DIM / 16;
// Rows of sums in shared memory, padded against bank conflicts; of partials in memory: then maximum and sum.
constexpr int MERGE_ROW = HEAD_DIM + 4;
constexpr int PARTIAL_ROW = HEAD_DIM + 2;
constexpr int SLOT_HEADS = BLOCK_KV_HEADS * HEADS;
constexpr int MERGE_BYTES = WARPS * HEADS * (MERGE_ROW + 2) * 4;
constexpr int SHARED_BYTES = WARPS * RING_BYTES > MERGE_BYTES ? WARPS * RING_BYTES : MERGE_BYTES;
static_assert(PIECES % 2 == 0 && WARPS % BLOCK_KV_HEADS == 0, "shape");

struct Problem {
    const bf16* q;
    const bf16* kv;
    const u32* block_table;
    const Entry* entries;
    u32 num_entries;
    u32 num_kv_heads;
    float scale;
    bf16* out;
    float* partials;
    u32* counters;
};

// A block's share of the line, and where it begins.
struct Share {
    u32 begin, end;
    u32 total, blocks;
    u32 entry;        // that holds `begin`
    u32 entry_begin;  // quanta of one unit in the entries before it
};

DEVICE u32 entry_quanta(const Entry& entry) {
    return entry.num_rows == 0 ? 0 : entry.first_position / QUANTUM_KEYS + 1;
}

// The block that computes a quantum: the last whose begin, total * block / blocks, is at or before it.
DEVICE u32 owner(const Share& share, u32 quantum) {
    return (u32)(((u64)(quantum + 1) * share.blocks - 1) / share.total);
}

DEVICE Share find_share(const Problem& problem, u32 units) {
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
    Share share;
    share.total = quanta * units;
    share.blocks = min(gridDim.x, share.total);
    if (blockIdx.x >= share.blocks) {
        share.begin = share.end = 0;
        return share;
    }
    share.begin = (u32)((u64)share.total * blockIdx.x / share.blocks);
    share.end = (u32)((u64)share.total * (blockIdx.x + 1) / share.blocks);
    u32 before = up_to - mine;
    if (share.begin >= before * units && share.begin < up_to * units) {
        u32 i = from;
        for (u32 next = before; i < to; ++i, before = next) {
            next += entry_quanta(problem.entries[i]);
            if (share.begin < next * units) break;
        }
        found[0] = i;
        found[1] = before;
    }
    __syncthreads();
    share.entry = found[0];
    share.entry_begin = found[1];
    return share;
}

// --- A warp's tiles --------------------------------------------------------------------------------------------------

// What a warp sums over its keys, for the heads of columns 2 (lane % 4) and the next: maxima, sums of its own keys, and
// V^T p^T in the layout of the accumulators.
struct Sums {
    float maxima[COLUMNS][2];
    float sums[COLUMNS][2];
    float values[STEPS][COLUMNS][4];
};

struct Keys {
    u32 kv_head;
    u32 first;      // of the piece's keys, where it starts
    u32 end;        // past the last
    u32 first_tile; // the warp's first tile of the piece; then every HEAD_WARPS-th
    u32 num_tiles;
};

DEVICE void copy_tile(const Problem& problem, u32 ring, u32 tile, u32 key, u32 end, u32 block, u32 kv_head) {
    const u32 lane = threadIdx.x % 32;
    const u64 token_len = (u64)problem.num_kv_heads * HEAD_DIM;
    const bf16* k = problem.kv + ((u64)block * 2 * CHUNK_TOKENS + key % CHUNK_TOKENS) * token_len + kv_head * HEAD_DIM;
    const u32 to = ring + tile % STAGES * 2 * PART_BYTES;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < TILE_KEYS * PIECES / 32; ++i) {
            const u32 row = (i * 32 + lane) / PIECES;
            const u32 piece = (i * 32 + lane) % PIECES;
            copy_async_16(to + part * PART_BYTES + row * ROW_BYTES + piece * 16,
                          k + (part * CHUNK_TOKENS + row) * token_len + piece * 8, key + row < end);
        }
    }
}

DEVICE float max_of_keys(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

// An 8 x 8 matrix of pairs across the warp, transposed.
DEVICE u32 transpose(u32 x) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
    return d;
}

DEVICE void attend_tile(Sums& state, const u32 (&q)[STEPS][COLUMNS][2], u32 k, u32 key, u32 end, float scale) {
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
    const bool ragged = key + TILE_KEYS > end;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float score[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[i] = (s[0][c][i] + s[1][c][i]) * scale;
            if (ragged && key + lane / 4 + i / 2 * 8 >= end) score[i] = MINUS_INFINITY;
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

// Sums over the warp's tiles of a piece.
DEVICE void attend_keys(Sums& state, const Problem& problem, const Keys& keys, const u32 (&q)[STEPS][COLUMNS][2],
                        const u32* table, u32 ring) {
    const u32 lane = threadIdx.x % 32;
    const auto key_of = [&](u32 tile) { return keys.first + (keys.first_tile + tile * HEAD_WARPS) * TILE_KEYS; };
    // Lane i holds the block of the warp's tile i of the 32 at hand.
    u32 blocks = 0;
    const auto copy = [&](u32 tile) {
        if (tile < keys.num_tiles) {
            if (tile % 32 == 0) {
                blocks = tile + lane < keys.num_tiles ? __ldg(table + key_of(tile + lane) / CHUNK_TOKENS) : 0;
            }
            const u32 block = __shfl_sync(~0u, blocks, tile % 32);
            copy_tile(problem, ring, tile, key_of(tile), keys.end, block, keys.kv_head);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) copy(tile);
    for (u32 tile = 0; tile < keys.num_tiles; ++tile) {
        copy_async_wait<STAGES - 2>();
        // The tile is there for every lane, and every lane is done with the tile before it, whose place the copy takes.
        __syncwarp();
        copy(tile + STAGES - 1);
        attend_tile(state, q, ring + tile % STAGES * 2 * PART_BYTES, key_of(tile), keys.end, problem.scale);
    }
    copy_async_wait<0>();
}

// The group's queries as the second operand: zeros past the last head.
DEVICE void load_q(u32 (&q)[STEPS][COLUMNS][2], const bf16* from, u32 num_heads) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const u32 head = c * 8 + lane / 4;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bf16* at = from + head * HEAD_DIM + step * 16 + i * 8 + lane % 4 * 2;
                q[step][c][i] = head < num_heads ? __ldg(reinterpret_cast<const u32*>(at)) : 0;
            }
        }
    }
}

// --- A piece: some of the keys of an entry for a unit of heads ---------------------------------------------------------

DEVICE void attend_piece(const Problem& problem, const Share& share, const Entry& entry, u32 pair, u32 unit,
                         u32 pair_begin, u32 pair_quanta, u32 first_quantum, u32 num_quanta, char* shared) {
    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    const u32 subgroup = unit % SUBGROUPS;
    const u32 num_heads = min(HEADS, GROUP - subgroup * HEADS);
    const u32 first_kv_head = unit / SUBGROUPS * BLOCK_KV_HEADS;
    const u32 kv_heads = min(BLOCK_KV_HEADS, problem.num_kv_heads - first_kv_head);
    const u32 warp_kv_head = warp / HEAD_WARPS;

    Sums state;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) state.maxima[c][i] = MINUS_INFINITY, state.sums[c][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state.values[step][c][i] = 0.0f;
        }
    }
    if (warp_kv_head < kv_heads) {
        Keys keys;
        keys.kv_head = first_kv_head + warp_kv_head;
        keys.first = first_quantum * QUANTUM_KEYS;
        keys.end = min(entry.first_position + 1, keys.first + num_quanta * QUANTUM_KEYS);
        keys.first_tile = warp % HEAD_WARPS;
        const u32 tiles = (keys.end - keys.first + TILE_KEYS - 1) / TILE_KEYS;
        keys.num_tiles = tiles > keys.first_tile ? (tiles - keys.first_tile + HEAD_WARPS - 1) / HEAD_WARPS : 0;
        u32 q[STEPS][COLUMNS][2];
        const u64 head_row = (u64)entry.first_row * problem.num_kv_heads * GROUP + keys.kv_head * GROUP + subgroup * HEADS;
        load_q(q, problem.q + head_row * HEAD_DIM, num_heads);
        attend_keys(state, problem, keys, q, problem.block_table + entry.first_block,
                    shared_address(shared) + warp * RING_BYTES);
    }
    __syncthreads();

    // The rings are idle: the warps' sums meet there, `[warp][head][dim]`, then `[warp][head]` maxima and sums.
    float* values = reinterpret_cast<float*>(shared);
    float* maxima = values + WARPS * HEADS * MERGE_ROW;
    float* sums = maxima + WARPS * HEADS;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = state.sums[c][i];
            sum += __shfl_xor_sync(~0u, sum, 4);
            sum += __shfl_xor_sync(~0u, sum, 8);
            sum += __shfl_xor_sync(~0u, sum, 16);
            const u32 head = c * 8 + lane % 4 * 2 + i;
            if (head >= num_heads) continue;
            const u32 row = warp * HEADS + head;
            if (lane / 4 == 0) maxima[row] = state.maxima[c][i], sums[row] = sum;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                values[row * MERGE_ROW + step * 16 + lane / 4] = state.values[step][c][i];
                values[row * MERGE_ROW + step * 16 + lane / 4 + 8] = state.values[step][c][i + 2];
            }
        }
    }
    __syncthreads();

    const u32 first_block = owner(share, pair_begin);
    const u32 last_block = owner(share, pair_begin + pair_quanta - 1);
    const bool whole = first_block == last_block;
    // A block's slot 0 is for a pair that began in a block before it, slot 1 for one that begins in it.
    const auto slot = [&](u32 block) {
        return problem.partials + (u64)(block * 2 + (block == first_block)) * SLOT_HEADS * PARTIAL_ROW;
    };
    const auto out_at = [&](u32 kv_head, u32 head) {
        const u64 heads = (u64)problem.num_kv_heads * GROUP;
        const u64 of_group = (u64)(first_kv_head + kv_head) * GROUP + subgroup * HEADS + head;
        return problem.out + (entry.first_row * heads + of_group) * HEAD_DIM;
    };
    for (u32 i = threadIdx.x; i < kv_heads * num_heads * (HEAD_DIM / 2); i += NUM_THREADS) {
        const u32 dim = i % (HEAD_DIM / 2) * 2;
        const u32 head = i / (HEAD_DIM / 2) % num_heads;
        const u32 kv_head = i / (HEAD_DIM / 2) / num_heads;
        const u32 first_row = kv_head * HEAD_WARPS * HEADS + head;
        float maximum = maxima[first_row];
#pragma unroll
        for (int w = 1; w < HEAD_WARPS; ++w) maximum = fmaxf(maximum, maxima[first_row + w * HEADS]);
        float sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
        for (int w = 0; w < HEAD_WARPS; ++w) {
            const u32 row = first_row + w * HEADS;
            const float weight = exp2_approx(maxima[row] - maximum);
            sum += weight * sums[row];
            x += weight * values[row * MERGE_ROW + dim];
            y += weight * values[row * MERGE_ROW + dim + 1];
        }
        if (whole) {
            const float factor = 1.0f / sum;
            *reinterpret_cast<u32*>(out_at(kv_head, head) + dim) = pack_bf16(x * factor, y * factor);
        } else {
            float* to = slot(blockIdx.x) + (kv_head * HEADS + head) * PARTIAL_ROW;
            *reinterpret_cast<float2*>(to + dim) = make_float2(x, y);
            if (dim == 0) *reinterpret_cast<float2*>(to + HEAD_DIM) = make_float2(maximum, sum);
        }
    }
    if (whole) {
        __syncthreads();
        return;
    }

    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 pieces = last_block - first_block + 1;
        is_last = atomicAdd(problem.counters + pair, 1) == pieces - 1;
        // The next launch finds it as this one did.
        if (is_last) problem.counters[pair] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (u32 i = threadIdx.x; i < kv_heads * num_heads * (HEAD_DIM / 2); i += NUM_THREADS) {
        const u32 dim = i % (HEAD_DIM / 2) * 2;
        const u32 head = i / (HEAD_DIM / 2) % num_heads;
        const u32 kv_head = i / (HEAD_DIM / 2) / num_heads;
        const u32 row = (kv_head * HEADS + head) * PARTIAL_ROW;
        float maximum = MINUS_INFINITY, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 4
        for (u32 block = first_block; block <= last_block; ++block) {
            const float* from = slot(block) + row;
            const float2 piece = __ldcg(reinterpret_cast<const float2*>(from + HEAD_DIM));
            const float2 xy = __ldcg(reinterpret_cast<const float2*>(from + dim));
            const float now = fmaxf(maximum, piece.x);
            const float old_weight = exp2_approx(maximum - now);
            const float weight = exp2_approx(piece.x - now);
            maximum = now;
            sum = sum * old_weight + piece.y * weight;
            x = x * old_weight + xy.x * weight;
            y = y * old_weight + xy.y * weight;
        }
        const float factor = 1.0f / sum;
        *reinterpret_cast<u32*>(out_at(kv_head, head) + dim) = pack_bf16(x * factor, y * factor);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, DECODE_BLOCKS_PER_SM)
attention_decode(const bf16* __restrict__ q, const bf16* __restrict__ kv, const u32* __restrict__ block_table,
                 const Entry* __restrict__ entries, u32 num_entries, u32 num_kv_heads, float scale,
                 bf16* __restrict__ out, float* partials, u32* counters) {
    extern __shared__ __align__(128) char shared[];
    const Problem problem = {q,   kv,       block_table, entries, num_entries, num_kv_heads, scale * LOG2_E,
                             out, partials, counters};
    const u32 units = (num_kv_heads + BLOCK_KV_HEADS - 1) / BLOCK_KV_HEADS * SUBGROUPS;
    const Share share = find_share(problem, units);
    if (share.begin == share.end) return;
    u32 index = share.entry;
    u32 entry_begin = share.entry_begin * units;
    for (u32 at = share.begin; at < share.end;) {
        const Entry entry = entries[index];
        const u32 quanta = entry_quanta(entry);
        if (at == entry_begin + quanta * units) {
            entry_begin = at;
            ++index;
            continue;
        }
        const u32 unit = (at - entry_begin) / quanta;
        const u32 pair_begin = entry_begin + unit * quanta;
        const u32 first = at - pair_begin;
        const u32 count = min(quanta - first, share.end - at);
        attend_piece(problem, share, entry, index * units + unit, unit, pair_begin, quanta, first, count, shared);
        at += count;
    }
}

// Threads a block, dynamic shared bytes, floats of `partials` a block, blocks a multiprocessor.
extern "C" __constant__ u32 attention_decode_launch[4] = {NUM_THREADS, SHARED_BYTES, 2 * SLOT_HEADS * PARTIAL_ROW,
                                                          DECODE_BLOCKS_PER_SM};
