// Causal attention of many rows over paged K/V, for compute capability 9.0 (built for sm_90a).
//
// A block takes tiles of 128 packed rows (192 at head dim 64; see Tile) of one K/V head from a queue. Of its first
// warpgroup, a warp brings K and V of 128 keys (64 at head dim 256) at a time to shared memory with the bulk tensor
// copy, a page a box, and three warps bring the next tile's queries. The other warpgroups, of 64 rows each, multiply
// with wgmma: queries, K and V from shared memory, probabilities from registers. A warpgroup issues the scores of the
// next keys before the values of these, so its softmax runs under its own products, and they take turns issuing, so
// one's softmax also runs under the other's products. The algorithm is FlashAttention's (arXiv:2205.14135), the overlap
// FlashAttention-3's (arXiv:2407.08608, section 3). Where there are few tiles, several blocks share the keys of one;
// the last to finish adds up, in the order of the keys.
//
// Slots past a tile's last key are never read: the copy of the last page starts before the page's first token, which
// fills the front of its box with zeros, and pages past it are copied from outside the tensor, which gives only zeros.
//
// Launch: see the constant at the end; grid: as many blocks as fit the device at once (one a multiprocessor).
// partials: TILE_ROWS * (HEAD_DIM + 2) floats a K/V head and part of split tiles, any content; counters: two, and one a
// K/V head and part of split tiles, zeros, left zero. Rows of no tile are left alone.

// Warpgroups that multiply, 64 rows each: at the smallest heads a third fits, and hides more of the softmax.
#ifndef PREFILL_CONSUMERS
#define PREFILL_CONSUMERS (HEAD_DIM == 64 ? 3 : 2)
#endif
constexpr int CONSUMERS = PREFILL_CONSUMERS;
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int TILE_ROWS = 64 * CONSUMERS;
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int Q_WARPS = 3;
// Registers a thread, of 65,536 in all.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr int TILE_KEYS = HEAD_DIM > 128 ? 64 : 128;
constexpr int STAGES = 2;
// Queries in shared memory, of this tile and the next; two fit at smaller heads only.
constexpr int Q_SLOTS = HEAD_DIM > 128 ? 1 : 2;
constexpr int WORK_SLOTS = 2;
// Columns of 64 dims: 128 bytes, the width of the swizzle.
constexpr int COLUMNS = (HEAD_DIM + 63) / 64;
constexpr int Q_COLUMN_BYTES = TILE_ROWS * 128;
constexpr int Q_BYTES = COLUMNS * Q_COLUMN_BYTES;
constexpr int KV_COLUMN_BYTES = TILE_KEYS * 128;
constexpr int KV_BYTES = COLUMNS * KV_COLUMN_BYTES;
constexpr int PAGES = TILE_KEYS / CHUNK_TOKENS;
static_assert(COLUMNS * PAGES <= 32, "a lane of the producer copies a box");

// Offsets in shared memory.
constexpr int K_AT = Q_SLOTS * Q_BYTES;
constexpr int V_AT = K_AT + STAGES * KV_BYTES;
constexpr int FULL_K = V_AT + STAGES * KV_BYTES;
constexpr int EMPTY_K = FULL_K + STAGES * 8;
constexpr int FULL_V = EMPTY_K + STAGES * 8;
constexpr int EMPTY_V = FULL_V + STAGES * 8;
constexpr int FULL_Q = EMPTY_V + STAGES * 8;
constexpr int EMPTY_Q = FULL_Q + Q_SLOTS * 8;
constexpr int FULL_WORK = EMPTY_Q + Q_SLOTS * 8;
constexpr int EMPTY_WORK = FULL_WORK + WORK_SLOTS * 8;
constexpr int WORK_AT = EMPTY_WORK + WORK_SLOTS * 8;
constexpr int WORK_BYTES = 64;
// 1,024 more than is used, to align the base to the swizzle's period.
constexpr int SHARED_BYTES = WORK_AT + WORK_SLOTS * WORK_BYTES + 1024;

// Named barriers: one a warpgroup, one for its turn to issue, one for all that multiply.
constexpr int GROUP_BARRIER = 1;
constexpr int TURN_BARRIER = 4;
constexpr int ALL_BARRIER = 7;

// CUtensorMap over a layer's K/V: { head_dim, kv_head, token, 2 * block + (0 for K, 1 for V) }, boxes of
// { 64, 1, CHUNK_TOKENS, 1 }, 128-byte swizzle.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct Problem {
    const bf16* q;
    const u32* block_table;
    const Tile* tiles;
    u32 num_tiles;
    u32 num_kv_heads;
    float scale;
    bf16* out;
    float* partials;
    u32* counters;  // next of the queue, blocks done with it, then finished parts a (slot, K/V head)
};

// A tile of a K/V head and its steps of TILE_KEYS keys. No rows: the queue is empty.
struct Work {
    Tile tile;
    u32 kv_head;
    u32 num_keys;  // that the tile's last row attends
    u32 first_step, end_step;
};
static_assert(sizeof(Work) <= WORK_BYTES, "a work slot");

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
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(dim), "r"(head), "r"(token), "r"(part), "r"(barrier)
        : "memory");
}

DEVICE void named_barrier_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Whether any of the threads says so.
DEVICE bool named_barrier_any(u32 id, u32 threads, bool mine) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred one, all;\n"
        "setp.ne.u32 one, %3, 0;\n"
        "bar.red.or.pred all, %1, %2, one;\n"
        "selp.u32 %0, 1, 0, all;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(u32(mine))
        : "memory");
    return any != 0;
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

// Matrix descriptor of shared memory in the 128-byte swizzle: eight rows of 128 bytes are 1,024 bytes, then come the
// next eight rows. `column_bytes`: from a column of 64 to the next, where columns are the operand's rows (V).
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

// --- The producing warpgroup -----------------------------------------------------------------------------------------

// The queue: blocks at work at once share K/V heads, so that these stay in the cache; but the last quarter of the
// tiles, which are the shortest, comes after all others, so that no long tile starts late.
DEVICE Work work_of(const Problem& problem, u32 item) {
    Work work = {};
    if (item >= problem.num_tiles * problem.num_kv_heads) return work;
    const u32 num_short = problem.num_tiles / 4;
    const u32 num_long = problem.num_tiles - num_short;
    const bool is_long = item < num_long * problem.num_kv_heads;
    const u32 of_length = is_long ? item : item - num_long * problem.num_kv_heads;
    const u32 num = is_long ? num_long : num_short;
    work.tile = problem.tiles[of_length % num + (is_long ? 0 : num_long)];
    work.kv_head = of_length / num;
    work.num_keys = row_position(work.tile, work.tile.num_rows - 1) + 1;
    const u32 steps = (work.num_keys + TILE_KEYS - 1) / TILE_KEYS;
    work.first_step = steps * work.tile.part / work.tile.parts;
    work.end_step = steps * (work.tile.part + 1) / work.tile.parts;
    return work;
}

// Copies the keys of a tile; `count` steps were copied before.
DEVICE void copy_keys(const Problem& problem, const Work& work, u32 base, const TensorMap* map, u32& count) {
    // A lane copies a box: a page's 64 dims.
    const int lane = threadIdx.x % 32;
    const int column = lane % COLUMNS;
    const int page = lane / COLUMNS;
    const bool copies = lane < COLUMNS * PAGES;
    const int last_page = (work.num_keys - 1) / CHUNK_TOKENS;
    const int tail = work.num_keys - last_page * CHUNK_TOKENS;
    const u32 to = base + column * KV_COLUMN_BYTES + page * CHUNK_TOKENS * 128;
    const u32* table = problem.block_table + work.tile.first_block;
    int at = work.first_step * PAGES + page;
    u32 block = at <= last_page && copies ? __ldg(table + at) : 0;
    for (u32 step = work.first_step; step < work.end_step; ++step, ++count) {
        const int next = at + PAGES;
        const u32 next_block = next <= last_page && copies ? __ldg(table + next) : 0;
        // Zeros come from before token 0 or from past the page.
        const int token = at < last_page ? 0 : at == last_page ? tail - CHUNK_TOKENS : CHUNK_TOKENS;
        const u32 stage = count % STAGES;
        const u32 parity = count / STAGES & 1 ^ 1;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const u32 full = base + (part == 0 ? FULL_K : FULL_V) + stage * 8;
            barrier_wait(base + (part == 0 ? EMPTY_K : EMPTY_V) + stage * 8, parity);
            if (lane == 0) barrier_expect(full, KV_BYTES);
            __syncwarp();
            if (copies) {
                const u32 stage_at = (part == 0 ? K_AT : V_AT) + stage * KV_BYTES;
                copy_box(to + stage_at, map, column * 64, work.kv_head, token, 2 * block + part, full);
            }
        }
        block = next_block;
        at = next;
    }
}

// The warp that takes tiles from the queue and copies their keys.
DEVICE void produce(const Problem& problem, char* shared, u32 base, const TensorMap* map) {
    const u32 lane = threadIdx.x % 32;
    u32 item = blockIdx.x;
    u32 count = 0;
    for (u32 turn = 0;; ++turn) {
        const u32 slot = turn % WORK_SLOTS;
        const Work work = work_of(problem, item);
        barrier_wait(base + EMPTY_WORK + slot * 8, turn / WORK_SLOTS & 1 ^ 1);
        if (lane == 0) {
            *reinterpret_cast<Work*>(shared + WORK_AT + slot * WORK_BYTES) = work;
            barrier_arrive(base + FULL_WORK + slot * 8);
        }
        if (work.tile.num_rows == 0) break;
        if (lane == 0) item = gridDim.x + atomicAdd(problem.counters, 1);
        copy_keys(problem, work, base, map, count);
        item = __shfl_sync(~0u, item, 0);
    }
    // The last block to find the queue empty leaves it as it was.
    if (lane == 0 && atomicAdd(problem.counters + 1, 1) == gridDim.x - 1) {
        problem.counters[0] = 0;
        problem.counters[1] = 0;
    }
}

// The warps that bring queries: rows in the 128-byte swizzle, zeros past the tile's rows.
DEVICE void copy_queries(const Problem& problem, const char* shared, u32 base) {
    constexpr int PIECES = HEAD_DIM / 8;
    const u32 lane = threadIdx.x % 32;
    for (u32 turn = 0;; ++turn) {
        const u32 slot = turn % WORK_SLOTS;
        barrier_wait(base + FULL_WORK + slot * 8, turn / WORK_SLOTS & 1);
        const Work& work = *reinterpret_cast<const Work*>(shared + WORK_AT + slot * WORK_BYTES);
        const Tile tile = work.tile;
        const u32 kv_head = work.kv_head;
        __syncwarp();
        if (lane == 0) barrier_arrive(base + EMPTY_WORK + slot * 8);
        const u32 q_slot = turn % Q_SLOTS;
        barrier_wait(base + EMPTY_Q + q_slot * 8, turn / Q_SLOTS & 1 ^ 1);
        const u32 to = base + q_slot * Q_BYTES;
        if (tile.num_rows > 0) {
#pragma unroll 4
            for (int i = threadIdx.x - 32; i < TILE_ROWS * PIECES; i += 32 * Q_WARPS) {
                const u32 row = i / PIECES;
                const u32 piece = i % PIECES;
                const bool live = row < tile.num_rows;
                const u64 from = live ? row_element(tile, row, kv_head, problem.num_kv_heads) + piece * 8 : 0;
                copy_async_16(to + piece / 8 * Q_COLUMN_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16,
                              problem.q + from, live);
            }
            copy_async_commit();
            copy_async_wait<0>();
            // wgmma reads through another proxy.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        barrier_arrive(base + FULL_Q + q_slot * 8);
        if (tile.num_rows == 0) break;
    }
}

// --- The multiplying warpgroups --------------------------------------------------------------------------------------

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

// How far, in powers of two, scores may exceed the maximum that they are taken relative to: far less than a float
// holds. Scaling what was summed takes issue slots from the softmax (2 to 10% of the time at heads of 96 to 256, H200);
// at heads of 64 there is little of it, and registers are short.
#ifndef PREFILL_SLACK
#define PREFILL_SLACK (HEAD_DIM > 64 ? 8 : -1)
#endif

// Turns scores into probabilities, not yet divided by their sum and relative to maxima of the scores so far, or less by
// PREFILL_SLACK at most: what was summed before has to shrink only when these move. Returns whether they do, for the
// whole warp, and the factors.
DEVICE bool softmax(float (&s)[NUM_SCORES], float (&maxima)[2], float (&sums)[2], float (&shrink)[2], float scale) {
    float now[2] = {maxima[0], maxima[1]};
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) now[r] = max_of_quad(now[r]);
    const float rise = fmaxf((now[0] - maxima[0]) * scale, (now[1] - maxima[1]) * scale);
    const bool moves = PREFILL_SLACK < 0 || !__all_sync(~0u, rise <= float(PREFILL_SLACK));
    if (moves) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // A part of the keys may hold none that the row attends.
            shrink[r] = now[r] == MINUS_INFINITY ? 1.0f : exp2_approx((maxima[r] - now[r]) * scale);
            maxima[r] = now[r];
            sums[r] *= shrink[r];
        }
    }
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = maxima[r] == MINUS_INFINITY ? 0.0f : maxima[r] * scale;
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) {
        s[i] = exp2_approx(s[i] * scale - offset[i / 2 % 2]);
        sums[i / 2 % 2] += s[i];
    }
    return moves;
}

// The accumulator's layout of s is the operand's layout of p.
DEVICE void pack_probabilities(u32 (&p)[NUM_SCORES / 2], const float (&s)[NUM_SCORES]) {
#pragma unroll
    for (int i = 0; i < NUM_SCORES / 2; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Writes a warp's 16 rows to `out` through their place in the queries' shared memory, so as to store whole rows.
DEVICE void store_rows(const Problem& problem, const Work& work, const float (&o)[NUM_OUT], const float (&factor)[2],
                       u32 queries, u32 warp_row) {
    constexpr int PIECES = HEAD_DIM / 8;
    const u32 lane = threadIdx.x % 32;
    const u32 rows_at = queries + warp_row * 128;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 row = lane / 4 + 8 * r;
            const u32 address = rows_at + i / 8 * Q_COLUMN_BYTES + row * 128 + (i % 8 ^ row % 8) * 16 + lane % 4 * 4;
            const u32 pair = pack_bf16(o[4 * i + 2 * r] * factor[r], o[4 * i + 2 * r + 1] * factor[r]);
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
        }
    }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * PIECES; i += 32) {
        const u32 row = i / PIECES;
        const u32 piece = i % PIECES;
        if (warp_row + row >= work.tile.num_rows) break;
        uint4 x;
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(rows_at + piece / 8 * Q_COLUMN_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16)
                     : "memory");
        const u64 to = row_element(work.tile, warp_row + row, work.kv_head, problem.num_kv_heads) + piece * 8;
        *reinterpret_cast<uint4*>(problem.out + to) = x;
    }
}

// A part's sums: `[row][dim]`, then `[row]` maximum (in powers of two) and sum of probabilities.
DEVICE float* partial(const Problem& problem, const Work& work, u32 part) {
    const u64 slot = (u64)(work.tile.slot + part) * problem.num_kv_heads + work.kv_head;
    return problem.partials + slot * (TILE_ROWS * (HEAD_DIM + 2));
}

DEVICE void store_partial(const Problem& problem, const Work& work, const float (&o)[NUM_OUT],
                          const float (&maxima)[2], const float (&sums)[2], u32 warp_row) {
    const u32 lane = threadIdx.x % 32;
    float* to = partial(problem, work, work.tile.part);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = warp_row + lane / 4 + 8 * r;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            *reinterpret_cast<float2*>(to + row * HEAD_DIM + i * 8 + lane % 4 * 2) =
                make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]);
        }
        if (lane % 4 == 0) {
            *reinterpret_cast<float2*>(to + TILE_ROWS * HEAD_DIM + row * 2) =
                make_float2(maxima[r] * problem.scale, sums[r]);
        }
    }
}

// Adds up the parts of a tile, if this block is the last of them to come here.
DEVICE void merge_parts(const Problem& problem, const Work& work) {
    const u32 thread = threadIdx.x - 128;
    __threadfence();
    named_barrier_sync(ALL_BARRIER, 128 * CONSUMERS);
    bool is_last = false;
    if (thread == 0) {
        u32* counter = problem.counters + 2 + work.tile.slot * problem.num_kv_heads + work.kv_head;
        is_last = atomicAdd(counter, 1) == work.tile.parts - 1;
        // The next launch finds it as this one did.
        if (is_last) *counter = 0;
    }
    if (!named_barrier_any(ALL_BARRIER, 128 * CONSUMERS, is_last)) return;
    __threadfence();
    for (u32 i = thread; i < work.tile.num_rows * (HEAD_DIM / 4); i += 128 * CONSUMERS) {
        const u32 row = i / (HEAD_DIM / 4);
        const u32 dim = i % (HEAD_DIM / 4) * 4;
        float maximum = MINUS_INFINITY, sum = 0.0f;
        float4 x = {};
#pragma unroll 4
        for (u32 part = 0; part < work.tile.parts; ++part) {
            const float* from = partial(problem, work, part);
            const float2 weight = __ldcg(reinterpret_cast<const float2*>(from + TILE_ROWS * HEAD_DIM + row * 2));
            const float4 y = __ldcg(reinterpret_cast<const float4*>(from + row * HEAD_DIM + dim));
            // The first part holds key 0, so the maximum is finite from there on.
            const float now = fmaxf(maximum, weight.x);
            const float shrink = exp2_approx(maximum - now);
            const float grow = exp2_approx(weight.x - now);
            maximum = now;
            sum = sum * shrink + weight.y * grow;
            x = {x.x * shrink + y.x * grow, x.y * shrink + y.y * grow, x.z * shrink + y.z * grow,
                 x.w * shrink + y.w * grow};
        }
        const float factor = 1.0f / sum;
        const uint2 pairs = {pack_bf16(x.x * factor, x.y * factor), pack_bf16(x.z * factor, x.w * factor)};
        const u64 to = row_element(work.tile, row, work.kv_head, problem.num_kv_heads) + dim;
        *reinterpret_cast<uint2*>(problem.out + to) = pairs;
    }
}

// A warpgroup's 64 rows of a tile; `count` steps were consumed before.
DEVICE void attend(const Problem& problem, const Work& work, u32 base, u32 queries, u32 group, u32& count) {
    const u32 lane = threadIdx.x % 32;
    const u32 warp_row = group * 64 + threadIdx.x / 32 % 4 * 16;
    const u32 q = queries + group * 64 * 128;
    // Rows past the tile's last attend what that one does; nobody reads them.
    int positions[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        positions[r] = row_position(work.tile, min(warp_row + lane / 4 + 8 * r, work.tile.num_rows - 1));
    }
    const u32 first_masked = (row_position(work.tile, min(group * 64, work.tile.num_rows - 1)) + 1) / TILE_KEYS;
    const int last_page_key = (work.num_keys - 1) / CHUNK_TOKENS * CHUNK_TOKENS;
    const int shift = last_page_key + CHUNK_TOKENS - work.num_keys;
    const int lane_key = lane % 4 * 2;
    // Turns only where every group has rows.
    const bool turns = work.tile.num_rows > (CONSUMERS - 1) * 64;
    const u32 my_turn = TURN_BARRIER + group;
    const u32 next_turn = TURN_BARRIER + (group + 1) % CONSUMERS;

    float s[NUM_SCORES];
    float o[NUM_OUT];
    u32 p[NUM_SCORES / 2];
    float maxima[2] = {MINUS_INFINITY, MINUS_INFINITY};
    float sums[2] = {0.0f, 0.0f};
    float shrink[2];
#pragma unroll
    for (int i = 0; i < NUM_OUT; ++i) o[i] = 0.0f;

    u32 stage = count % STAGES;
    u32 parity = count / STAGES & 1;
    barrier_wait(base + FULL_K + stage * 8, parity);
    issue_scores(s, q, base + K_AT + stage * KV_BYTES);
    wgmma_wait<0>();
    pin(s);
    if (lane == 0) barrier_arrive(base + EMPTY_K + stage * 8);
    if (work.first_step >= first_masked) {
        mask(s, work.first_step * TILE_KEYS + lane_key, positions, last_page_key, shift);
    }
    softmax(s, maxima, sums, shrink, problem.scale);
    pack_probabilities(p, s);

    const u32 end_step = work.end_step;
    for (u32 step = work.first_step + 1; step < end_step; ++step) {
        const u32 before = stage;
        const u32 parity_before = parity;
        ++count;
        stage = count % STAGES;
        parity = count / STAGES & 1;
        barrier_wait(base + FULL_K + stage * 8, parity);
        if (turns) named_barrier_sync(my_turn, 256);
        issue_scores(s, q, base + K_AT + stage * KV_BYTES);
        barrier_wait(base + FULL_V + before * 8, parity_before);
        issue_values(o, p, base + V_AT + before * KV_BYTES);
        if (turns) named_barrier_arrive(next_turn, 256);
        wgmma_wait<1>();
        pin(s);
        if (lane == 0) barrier_arrive(base + EMPTY_K + stage * 8);
        if (step >= first_masked) mask(s, step * TILE_KEYS + lane_key, positions, last_page_key, shift);
        const bool moves = softmax(s, maxima, sums, shrink, problem.scale);
        wgmma_wait<0>();
        pin(o);
        pin(s);
        if (lane == 0) barrier_arrive(base + EMPTY_V + before * 8);
        pack_probabilities(p, s);
        if (moves) {
#pragma unroll
            for (int i = 0; i < NUM_OUT; ++i) o[i] *= shrink[i / 2 % 2];
        }
    }
    ++count;
    barrier_wait(base + FULL_V + stage * 8, parity);
    issue_values(o, p, base + V_AT + stage * KV_BYTES);
    wgmma_wait<0>();
    pin(o);
    if (lane == 0) barrier_arrive(base + EMPTY_V + stage * 8);

#pragma unroll
    for (int r = 0; r < 2; ++r) sums[r] = sum_of_quad(sums[r]);
    if (work.tile.parts > 1) {
        store_partial(problem, work, o, maxima, sums, warp_row);
        merge_parts(problem, work);
    } else {
        const float factor[2] = {1.0f / sums[0], 1.0f / sums[1]};
        // The whole group is done with its queries.
        named_barrier_sync(GROUP_BARRIER + group, 128);
        store_rows(problem, work, o, factor, queries, warp_row);
    }
}

// A warpgroup without rows lets the tile pass.
DEVICE void pass(const Problem& problem, const Work& work, u32 base, u32& count) {
    const u32 lane = threadIdx.x % 32;
    const u32 end = count + work.end_step - work.first_step;
    for (; count < end; ++count) {
        const u32 stage = count % STAGES;
        const u32 parity = count / STAGES & 1;
        barrier_wait(base + FULL_K + stage * 8, parity);
        if (lane == 0) barrier_arrive(base + EMPTY_K + stage * 8);
        barrier_wait(base + FULL_V + stage * 8, parity);
        if (lane == 0) barrier_arrive(base + EMPTY_V + stage * 8);
    }
    if (work.tile.parts > 1) merge_parts(problem, work);
}

DEVICE void consume(const Problem& problem, const char* shared, u32 base, u32 group) {
    const u32 lane = threadIdx.x % 32;
    // The first turn of the first group comes from the last.
    if (group == CONSUMERS - 1) named_barrier_arrive(TURN_BARRIER, 256);
    u32 count = 0;
    for (u32 turn = 0;; ++turn) {
        const u32 slot = turn % WORK_SLOTS;
        const u32 q_slot = turn % Q_SLOTS;
        barrier_wait(base + FULL_WORK + slot * 8, turn / WORK_SLOTS & 1);
        // Stays in shared memory: registers are short.
        const Work& work = *reinterpret_cast<const Work*>(shared + WORK_AT + slot * WORK_BYTES);
        if (work.tile.num_rows == 0) break;
        barrier_wait(base + FULL_Q + q_slot * 8, turn / Q_SLOTS & 1);
        if (group * 64 < work.tile.num_rows) {
            attend(problem, work, base, base + q_slot * Q_BYTES, group, count);
        } else {
            pass(problem, work, base, count);
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(base + EMPTY_Q + q_slot * 8);
            barrier_arrive(base + EMPTY_WORK + slot * 8);
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
attention_prefill_wgmma(const __grid_constant__ TensorMap kv_map, const bf16* __restrict__ q,
                        const u32* __restrict__ block_table, const Tile* __restrict__ tiles, u32 num_tiles,
                        u32 num_kv_heads, float scale, bf16* __restrict__ out, float* partials, u32* counters) {
    extern __shared__ char dynamic_shared[];
    const u32 unaligned = shared_address(dynamic_shared);
    const u32 base = (unaligned + 1023) & ~1023u;
    char* shared = dynamic_shared + (base - unaligned);
    const Problem problem = {q, block_table, tiles, num_tiles, num_kv_heads, scale * LOG2_E, out, partials, counters};

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(base + FULL_K + stage * 8, 1);
            barrier_init(base + FULL_V + stage * 8, 1);
            barrier_init(base + EMPTY_K + stage * 8, CONSUMER_WARPS);
            barrier_init(base + EMPTY_V + stage * 8, CONSUMER_WARPS);
        }
        for (int slot = 0; slot < Q_SLOTS; ++slot) {
            barrier_init(base + FULL_Q + slot * 8, 32 * Q_WARPS);
            barrier_init(base + EMPTY_Q + slot * 8, CONSUMER_WARPS);
        }
        for (int slot = 0; slot < WORK_SLOTS; ++slot) {
            barrier_init(base + FULL_WORK + slot * 8, 1);
            barrier_init(base + EMPTY_WORK + slot * 8, CONSUMER_WARPS + Q_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x < 32) {
            produce(problem, shared, base, &kv_map);
        } else {
            copy_queries(problem, shared, base);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, shared, base, threadIdx.x / 128 - 1);
    }
}

// Threads a block, dynamic shared bytes, packed rows a tile, unused.
extern "C" __constant__ u32 attention_prefill_wgmma_launch[4] = {NUM_THREADS, SHARED_BYTES, TILE_ROWS, 0};
