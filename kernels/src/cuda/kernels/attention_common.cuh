// What the attention kernels share: the step's structs, bf16 packing, asynchronous copies and the warp's matrix
// instructions as inline PTX. Prepended as text to each kernel file, so nothing here needs a toolkit's headers.
//
// Required macros: HEAD_DIM (64, 80, 96, 128, 256), GROUP (query heads a K/V head), CHUNK_TOKENS (tokens a block).

typedef unsigned int u32;
typedef unsigned long long u64;
// Only storage: arithmetic is in f32.
typedef unsigned short bf16;

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM");
static_assert(CHUNK_TOKENS == 16 || CHUNK_TOKENS == 32 || CHUNK_TOKENS == 64, "CHUNK_TOKENS");
static_assert(GROUP >= 1, "GROUP");

// As `Entry` in kv.rs: rows first_row.. at positions first_position.., row at position p attends keys [0, p].
struct Entry {
    u32 first_row;
    u32 num_rows;
    u32 first_position;
    u32 first_block;
    u32 num_blocks;
};

// Prefill's unit of work: some packed rows of an entry and, if `parts` > 1, an equal part of their keys. Packed row m
// of an entry = (row m / GROUP, query head kv_head * GROUP + m % GROUP): the heads of a group are rows of one tile,
// since they share K and V.
struct Tile {
    u32 first_row;       // of the entry, and so
    u32 first_position;
    u32 first_block;
    u32 first;           // packed row of the entry
    u32 num_rows;        // packed rows
    u32 part, parts;
    u32 slot;            // of the tile's first part among all parts of split tiles
};

#define DEVICE [[maybe_unused]] static __device__ __forceinline__

constexpr float LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY __int_as_float(0xff800000)

// Position of a tile's row.
DEVICE u32 row_position(const Tile& tile, u32 row) { return tile.first_position + (tile.first + row) / GROUP; }

// First element in q and out of a tile's row.
DEVICE u64 row_element(const Tile& tile, u32 row, u32 kv_head, u32 num_kv_heads) {
    const u32 packed = tile.first + row;
    const u64 of_head = (u64)(tile.first_row + packed / GROUP) * num_kv_heads + kv_head;
    return (of_head * GROUP + packed % GROUP) * HEAD_DIM;
}

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Two floats as bf16, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float max_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float sum_of_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// 16 bytes to shared memory, past L1; zeros instead, without touching `from`, where `live` is false.
DEVICE void copy_async_16(u32 to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0)
                 : "memory");
}

// The same for what is read once: first to leave the L2 cache.
DEVICE void copy_async_16_once(u32 to, const void* from, bool live, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(live ? 16 : 0), "l"(policy)
                 : "memory");
}

DEVICE u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void load_matrix_x4(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void load_matrix_x4_transposed(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// c += a b, a 16 x 16 row-major, b 16 x 8 column-major, in the fragment layouts of mma.m16n8k16.
DEVICE void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
