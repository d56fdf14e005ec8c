// Causal attention of many rows over paged K/V, for compute capability 9.0 (built for sm_90a).
//
// One block computes a tile of 128 packed rows (see Tile) of one K/V head. A producer warp brings K and V of 128 keys (64
// at head dim 256) at a time to shared memory with the bulk tensor copy, a page a box; two warpgroups of 64 rows each
// multiply with wgmma, K and V read from shared memory, probabilities from registers. A warpgroup issues the scores of
// the next keys before the values of these, so its softmax runs under its own matrix work, and the two take turns
// issuing, so one's softmax also runs under the other's. The algorithm is FlashAttention's (arXiv:2205.14135), the overlap
// that of FlashAttention-3 (arXiv:2407.08608, section 3).
//
// Slots past a tile's last key are never read: the copy of the last page starts before the page's first token, which
// fills the front of its box with zeros, and pages past it are copied from outside the tensor, which gives zeros only.
//
// Launch: see the constant at the end; grid (number of tiles, num_kv_heads). Rows of no tile are left alone.

constexpr int TILE_ROWS = 128;
constexpr int CONSUMERS = 2;
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int TILE_KEYS = HEAD_DIM > 128 ? 64 : 128;
constexpr int STAGES = 2;
// Columns of 64 dims: 128 bytes, the width of the swizzle.
constexpr int COLUMNS = (HEAD_DIM + 63) / 64;
constexpr int Q_COLUMN_BYTES = TILE_ROWS * 128;
constexpr int KV_COLUMN_BYTES = TILE_KEYS * 128;
constexpr int KV_BYTES = COLUMNS * KV_COLUMN_BYTES;
constexpr int K_OFFSET = COLUMNS * Q_COLUMN_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KV_BYTES;
constexpr int BARRIER_OFFSET = V_OFFSET + STAGES * KV_BYTES;
constexpr int PAGES = TILE_KEYS / CHUNK_TOKENS;
// 1,024 more than is used, to align the base to the swizzle's period.
constexpr int SHARED_BYTES = BARRIER_OFFSET + 4 * STAGES * 8 + 1024;
static_assert(COLUMNS * PAGES <= 32, "a lane of the producer copies a box");

// CUtensorMap over a layer's K/V: { head_dim, kv_head, token, 2 * block + (0 for K, 1 for V) }, boxes of
// { 64, 1, CHUNK_TOKENS, 1 }, 128-byte swizzle.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// --- Barriers and copies ---------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra through;\n"
        "bra again;\n"
        "through:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE void copy_box(u32 to, const TensorMap* map, int dim, int head, int token, int part, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(to),
        "l"(map), "r"(dim), "r"(head), "r"(token), "r"(part), "r"(barrier)
        : "memory");
}

DEVICE void named_barrier_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void named_barrier_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- wgmma -----------------------------------------------------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers that a wgmma writes or reads are not to be used before its wait: the compiler sees no dependency otherwise.
template <int N>
DEVICE void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Matrix descriptor of shared memory in the 128-byte swizzle: eight rows of 128 bytes are 1,024 bytes, then come the next
// eight rows. `column_bytes`: from a column of 64 to the next, where the columns are the operand's rows (V); else unused.
DEVICE u64 matrix_descriptor(u32 address, u32 column_bytes) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(column_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#define REGS_AT_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGS_AT_8 "%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS_AT_16 "%16,%17,%18,%19,%20,%21,%22,%23"
#define REGS_AT_24 "%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS_AT_32 "%32,%33,%34,%35,%36,%37,%38,%39"
#define REGS_AT_40 "%40,%41,%42,%43,%44,%45,%46,%47"
#define REGS_AT_48 "%48,%49,%50,%51,%52,%53,%54,%55"
#define REGS_AT_56 "%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS_AT_64 "%64,%65,%66,%67,%68,%69,%70,%71"
#define REGS_AT_72 "%72,%73,%74,%75,%76,%77,%78,%79"
#define REGS_AT_80 "%80,%81,%82,%83,%84,%85,%86,%87"
#define REGS_AT_88 "%88,%89,%90,%91,%92,%93,%94,%95"
#define REGS_AT_96 "%96,%97,%98,%99,%100,%101,%102,%103"
#define REGS_AT_104 "%104,%105,%106,%107,%108,%109,%110,%111"
#define REGS_AT_112 "%112,%113,%114,%115,%116,%117,%118,%119"
#define REGS_AT_120 "%120,%121,%122,%123,%124,%125,%126,%127"
#define REGS_32 REGS_AT_0 "," REGS_AT_8 "," REGS_AT_16 "," REGS_AT_24
#define REGS_64 REGS_32 "," REGS_AT_32 "," REGS_AT_40 "," REGS_AT_48 "," REGS_AT_56
#define REGS_128                                                                                            \
    REGS_64 "," REGS_AT_64 "," REGS_AT_72 "," REGS_AT_80 "," REGS_AT_88 "," REGS_AT_96 "," REGS_AT_104 "," \
        REGS_AT_112 "," REGS_AT_120
#define BIND_8(x, i)                                                                                        \
    "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), \
        "+f"(x[i + 7])
#define BIND_32(x, i) BIND_8(x, i), BIND_8(x, i + 8), BIND_8(x, i + 16), BIND_8(x, i + 24)

// d = a b, or d += a b: a 64 x 16 and b 16 x N both in shared memory, contiguous along k.
#define WGMMA_SHARED(N, REGS, A, B, ADD, ...)                                                       \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                               \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, " A ", " B   \
                 ", add, 1, 1, 0, 0;\n}\n"                                                          \
                 : __VA_ARGS__                                                                      \
                 : "l"(a), "l"(b), "r"(add))

// d += a b: a 64 x 16 in registers, b 16 x N in shared memory, contiguous along n.
#define WGMMA_REGISTERS(N, REGS, A0, A1, A2, A3, B, ...)                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, {" A0 "," A1 \
                 "," A2 "," A3 "}, " B ", 1, 1, 1, 1;\n"                                            \
                 : __VA_ARGS__                                                                      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))

#if HEAD_DIM > 128
DEVICE void wgmma_scores(float (&d)[32], u64 a, u64 b, int add) {
    WGMMA_SHARED(64, REGS_32, "%32", "%33", "%34", BIND_32(d, 0));
}
#else
DEVICE void wgmma_scores(float (&d)[64], u64 a, u64 b, int add) {
    WGMMA_SHARED(128, REGS_64, "%64", "%65", "%66", BIND_32(d, 0), BIND_32(d, 32));
}
#endif

#if HEAD_DIM == 64
DEVICE void wgmma_values(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    WGMMA_REGISTERS(64, REGS_32, "%32", "%33", "%34", "%35", "%36", BIND_32(d, 0));
}
#elif HEAD_DIM == 80
DEVICE void wgmma_values(float (&d)[40], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    WGMMA_REGISTERS(80, REGS_32 "," REGS_AT_32, "%40", "%41", "%42", "%43", "%44", BIND_32(d, 0), BIND_8(d, 32));
}
#elif HEAD_DIM == 96
DEVICE void wgmma_values(float (&d)[48], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    WGMMA_REGISTERS(96, REGS_32 "," REGS_AT_32 "," REGS_AT_40, "%48", "%49", "%50", "%51", "%52", BIND_32(d, 0),
                    BIND_8(d, 32), BIND_8(d, 40));
}
#elif HEAD_DIM == 128
DEVICE void wgmma_values(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    WGMMA_REGISTERS(128, REGS_64, "%64", "%65", "%66", "%67", "%68", BIND_32(d, 0), BIND_32(d, 32));
}
#elif HEAD_DIM == 256
DEVICE void wgmma_values(float (&d)[128], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    WGMMA_REGISTERS(256, REGS_128, "%128", "%129", "%130", "%131", "%132", BIND_32(d, 0), BIND_32(d, 32),
                    BIND_32(d, 64), BIND_32(d, 96));
}
#endif

// --- The producer warp -----------------------------------------------------------------------------------------------

// What a block works on.
struct Work {
    Entry entry;
    u32 first;     // the tile's first packed row
    u32 num_rows;  // packed rows of the tile
    u32 num_keys;  // keys that its last row attends
    u32 num_tiles; // of keys
};

struct Shared {
    u32 q, k, v, full_k, full_v, empty_k, empty_v;
};

DEVICE void produce(const Work& work, const Shared& shared, const TensorMap* map, const u32* block_table) {
    // A lane copies a box: a page's 64 dims.
    const int lane = threadIdx.x % 32;
    const int column = lane % COLUMNS;
    const int page = lane / COLUMNS;
    const bool copies = lane < COLUMNS * PAGES;
    const int last_page = (work.num_keys - 1) / CHUNK_TOKENS;
    const int tail = work.num_keys - last_page * CHUNK_TOKENS;
    const u32 to = column * KV_COLUMN_BYTES + page * CHUNK_TOKENS * 128;
    const u32* table = block_table + work.entry.first_block;
    u32 block = page <= last_page && copies ? __ldg(table + page) : 0;
    for (u32 tile = 0; tile < work.num_tiles; ++tile) {
        const int at = tile * PAGES + page;
        const int next = at + PAGES;
        const u32 next_block = next <= last_page && copies ? __ldg(table + next) : 0;
        // Zeros come from before token 0 or from past the page.
        const int token = at < last_page ? 0 : at == last_page ? tail - CHUNK_TOKENS : CHUNK_TOKENS;
        const u32 stage = tile % STAGES;
        const u32 parity = tile / STAGES & 1 ^ 1;
        const u32 full_k = shared.full_k + stage * 8;
        const u32 full_v = shared.full_v + stage * 8;
        barrier_wait(shared.empty_k + stage * 8, parity);
        if (lane == 0) barrier_expect(full_k, KV_BYTES);
        __syncwarp();
        if (copies) {
            copy_box(shared.k + stage * KV_BYTES + to, map, column * 64, blockIdx.y, token, 2 * block, full_k);
        }
        barrier_wait(shared.empty_v + stage * 8, parity);
        if (lane == 0) barrier_expect(full_v, KV_BYTES);
        __syncwarp();
        if (copies) {
            copy_box(shared.v + stage * KV_BYTES + to, map, column * 64, blockIdx.y, token, 2 * block + 1, full_v);
        }
        block = next_block;
    }
}

// --- The consumer warpgroups -----------------------------------------------------------------------------------------

constexpr int NUM_SCORES = TILE_KEYS / 2;  // a thread's share of 64 x TILE_KEYS
constexpr int NUM_OUT = HEAD_DIM / 2;

// Queues s = q k^T for the warpgroup's 64 rows.
DEVICE void issue_scores(float (&s)[NUM_SCORES], u32 q, u32 k) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        const u32 at = step % 4 * 32;
        wgmma_scores(s, matrix_descriptor(q + step / 4 * Q_COLUMN_BYTES + at, 16),
                     matrix_descriptor(k + step / 4 * KV_COLUMN_BYTES + at, 16), step > 0);
    }
    wgmma_commit();
}

// Queues o += p v.
DEVICE void issue_values(float (&o)[NUM_OUT], const u32 (&p)[NUM_SCORES / 2], u32 v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_KEYS / 16; ++step) {
        wgmma_values(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                     matrix_descriptor(v + step * 16 * 128, KV_COLUMN_BYTES));
    }
    wgmma_commit();
}

// Leaves of a thread's scores those whose key the row attends. Scores 4i and 4i + 1 are of keys 8i and 8i + 1 past
// `first_key` and the first row, 4i + 2 and 4i + 3 of the same keys and the second row. In the last page the keys lie
// at the end, `shift` slots late.
DEVICE void mask(float (&s)[NUM_SCORES], int first_key, const int (&positions)[2], int last_page_key, int shift) {
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) {
        const int slot = first_key + i / 4 * 8 + i % 2;
        const bool in_tail = slot >= last_page_key;
        const int key = in_tail ? slot - shift : slot;
        const bool attended = key <= positions[i / 2 % 2] && (!in_tail || key >= last_page_key);
        s[i] = attended ? s[i] : MINUS_INFINITY;
    }
}

// Turns scores into probabilities (not yet divided by their sum), given the maxima so far; gives the factors by which
// what was summed under the old maxima shrinks.
DEVICE void softmax(float (&s)[NUM_SCORES], float (&maxima)[2], float (&sums)[2], float (&shrink)[2], float scale) {
    float now[2] = {maxima[0], maxima[1]};
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i]);
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        now[r] = max_of_quad(now[r]);
        offset[r] = now[r] * scale;
        shrink[r] = exp2_approx(maxima[r] * scale - offset[r]);
        maxima[r] = now[r];
    }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) {
        s[i] = exp2_approx(s[i] * scale - offset[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sums[r] = sums[r] * shrink[r] + sum[r];
}

// The accumulator's layout of s is the operand's layout of p.
DEVICE void pack_probabilities(u32 (&p)[NUM_SCORES / 2], const float (&s)[NUM_SCORES]) {
#pragma unroll
    for (int i = 0; i < NUM_SCORES / 2; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Brings the warpgroup's 64 rows of q to shared memory, swizzled; zeros past the tile's rows.
DEVICE void load_q(const Work& work, u32 to, u32 group_row, const bf16* q, u32 num_heads) {
    constexpr int PIECES = HEAD_DIM / 8;
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < 64 * PIECES; i += 128) {
        const u32 row = i / PIECES;
        const u32 piece = i % PIECES;
        const u32 packed = work.first + group_row + row;
        const bool live = group_row + row < work.num_rows;
        const u64 head_row = (u64)(work.entry.first_row + packed / GROUP) * num_heads + blockIdx.y * GROUP + packed % GROUP;
        const u32 address = to + piece / 8 * Q_COLUMN_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16;
        copy_async_16(address, q + (live ? head_row * HEAD_DIM + piece * 8 : 0), live);
    }
    copy_async_commit();
    copy_async_wait<0>();
}

// Writes a warp's 16 rows through their place in q's shared memory, to store whole rows.
DEVICE void store_rows(const Work& work, const float (&o)[NUM_OUT], const float (&factor)[2], u32 base, u32 first_row,
                       bf16* out, u32 num_heads) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 row = lane / 4 + 8 * r;
            const u32 address = base + i / 8 * Q_COLUMN_BYTES + row * 128 + (i % 8 ^ row % 8) * 16 + lane % 4 * 4;
            const u32 pair = pack_bf16(o[4 * i + 2 * r] * factor[r], o[4 * i + 2 * r + 1] * factor[r]);
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
        }
    }
    __syncwarp();
    constexpr int PIECES = HEAD_DIM / 8;
    for (int i = lane; i < 16 * PIECES; i += 32) {
        const u32 row = i / PIECES;
        const u32 piece = i % PIECES;
        if (first_row + row >= work.num_rows) break;
        const u32 packed = work.first + first_row + row;
        const u64 head_row = (u64)(work.entry.first_row + packed / GROUP) * num_heads + blockIdx.y * GROUP + packed % GROUP;
        const u32 address = base + piece / 8 * Q_COLUMN_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16;
        uint4 x;
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(address)
                     : "memory");
        *reinterpret_cast<uint4*>(out + head_row * HEAD_DIM + piece * 8) = x;
    }
}

DEVICE void consume(const Work& work, const Shared& shared, u32 group, const bf16* q, u32 num_kv_heads, float scale,
                    bf16* out) {
    const u32 num_heads = num_kv_heads * GROUP;
    const u32 lane = threadIdx.x % 32;
    const u32 warp_row = group * 64 + threadIdx.x / 32 % 4 * 16;
    const u32 q_tile = shared.q + group * 64 * 128;
    load_q(work, q_tile, group * 64, q, num_heads);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_barrier_sync(1 + group, 128);

    // Rows past the tile's last attend what that one does; nobody reads them.
    int positions[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = min(warp_row + lane / 4 + 8 * r, work.num_rows - 1);
        positions[r] = work.entry.first_position + (work.first + row) / GROUP;
    }
    const u32 top_row = min(group * 64, work.num_rows - 1);
    const u32 top_position = work.entry.first_position + (work.first + top_row) / GROUP;
    const u32 first_masked = (top_position + 1) / TILE_KEYS;
    const int last_page_key = (work.num_keys - 1) / CHUNK_TOKENS * CHUNK_TOKENS;
    const int shift = last_page_key + CHUNK_TOKENS - work.num_keys;
    const int lane_key = lane % 4 * 2;

    // Turns: 3 + group is mine to wait for. The first warpgroup's first turn comes from the second.
    const u32 my_turn = 3 + group;
    const u32 other_turn = 4 - group;
    if (group == 1) named_barrier_arrive(other_turn, 256);

    float s[NUM_SCORES];
    float o[NUM_OUT];
    u32 p[NUM_SCORES / 2];
    float maxima[2] = {MINUS_INFINITY, MINUS_INFINITY};
    float sums[2] = {0.0f, 0.0f};
    float shrink[2];
#pragma unroll
    for (int i = 0; i < NUM_OUT; ++i) o[i] = 0.0f;

    barrier_wait(shared.full_k, 0);
    issue_scores(s, q_tile, shared.k);
    wgmma_wait<0>();
    pin(s);
    if (lane == 0) barrier_arrive(shared.empty_k);
    if (first_masked == 0) mask(s, lane_key, positions, last_page_key, shift);
    softmax(s, maxima, sums, shrink, scale);
    pack_probabilities(p, s);

    for (u32 tile = 1; tile < work.num_tiles; ++tile) {
        const u32 stage = tile % STAGES;
        const u32 before = (tile - 1) % STAGES;
        barrier_wait(shared.full_k + stage * 8, tile / STAGES & 1);
        named_barrier_sync(my_turn, 256);
        issue_scores(s, q_tile, shared.k + stage * KV_BYTES);
        barrier_wait(shared.full_v + before * 8, (tile - 1) / STAGES & 1);
        issue_values(o, p, shared.v + before * KV_BYTES);
        named_barrier_arrive(other_turn, 256);
        wgmma_wait<1>();
        pin(s);
        if (lane == 0) barrier_arrive(shared.empty_k + stage * 8);
        if (tile >= first_masked) mask(s, tile * TILE_KEYS + lane_key, positions, last_page_key, shift);
        softmax(s, maxima, sums, shrink, scale);
        wgmma_wait<0>();
        pin(o);
        pin(s);
        if (lane == 0) barrier_arrive(shared.empty_v + before * 8);
        pack_probabilities(p, s);
#pragma unroll
        for (int i = 0; i < NUM_OUT; ++i) o[i] *= shrink[i / 2 % 2];
    }
    const u32 last = (work.num_tiles - 1) % STAGES;
    barrier_wait(shared.full_v + last * 8, (work.num_tiles - 1) / STAGES & 1);
    issue_values(o, p, shared.v + last * KV_BYTES);
    wgmma_wait<0>();
    pin(o);

    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = 1.0f / sum_of_quad(sums[r]);
    named_barrier_sync(1 + group, 128);
    store_rows(work, o, factor, shared.q + warp_row * 128, warp_row, out, num_heads);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
attention_prefill_wgmma(const __grid_constant__ TensorMap kv_map, const bf16* __restrict__ q,
                        const u32* __restrict__ block_table, const Entry* __restrict__ entries,
                        const Tile* __restrict__ tiles, u32 num_kv_heads, float scale, bf16* __restrict__ out) {
    extern __shared__ char dynamic_shared[];
    const u32 base = (shared_address(dynamic_shared) + 1023) & ~1023u;
    const u32 barriers = base + BARRIER_OFFSET;
    const Shared shared = {base,         base + K_OFFSET,           base + V_OFFSET,           barriers,
                           barriers + STAGES * 8, barriers + 2 * STAGES * 8, barriers + 3 * STAGES * 8};
    const Tile tile = tiles[blockIdx.x];
    Work work;
    work.entry = entries[tile.entry];
    work.first = tile.first;
    work.num_rows = min(TILE_ROWS, work.entry.num_rows * GROUP - tile.first);
    work.num_keys = work.entry.first_position + (tile.first + work.num_rows - 1) / GROUP + 1;
    work.num_tiles = (work.num_keys + TILE_KEYS - 1) / TILE_KEYS;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared.full_k + stage * 8, 1);
            barrier_init(shared.full_v + stage * 8, 1);
            barrier_init(shared.empty_k + stage * 8, CONSUMERS * 4);
            barrier_init(shared.empty_v + stage * 8, CONSUMERS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 32) produce(work, shared, &kv_map, block_table);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(work, shared, threadIdx.x / 128 - 1, q, num_kv_heads, scale * LOG2_E, out);
    }
}

// Threads a block, dynamic shared bytes, packed rows a tile, unused.
extern "C" __constant__ u32 attention_prefill_wgmma_launch[4] = {NUM_THREADS, SHARED_BYTES, TILE_ROWS, 0};
