// The next token of each row: greedy, or a draw after temperature, min-p, top-k and top-p, in this order. One block a row.
//
// A token's weight is exp((logit - max) / temperature) as an integer multiple of 2^-40, so that sums do not depend on the
// order in which threads add: a row's token is a function of its logits, seed and position alone. Tokens are ordered best
// first, equal logits by ascending id. Every cut and the draw itself ask one question: at which token does a sum over this
// order pass a bound? It is answered digit by digit over the bits of the logit (11, 11 and 10 bits), with a histogram in
// shared memory: three passes over the row, which lies in L2.
//
// NaN counts as minus infinity. A row without any other logit gives NO_TOKEN.

constexpr int THREADS = 1024;
constexpr int BINS = 2048;
constexpr u32 NO_TOKEN = ~0u;

struct SamplingRow {
    // 0: greedy.
    float temperature;
    // 1: off.
    float top_p;
    // 0: off.
    float min_p;
    // 0: off.
    u32 top_k;
    u64 seed;
    u64 position;
};

// Larger for better logits; 0 for NaN and minus infinity, which are never drawn.
__device__ __forceinline__ u32 rank_of(float logit) {
    if (!(logit > -__int_as_float(0x7f800000))) {
        return 0;
    }
    const u32 bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(u32 rank) {
    return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}

// The SplitMix64 finaliser (Steele, Lea, Flood 2014) over a counter; the seed is mixed first.
__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// 53 random bits for a token's position.
__device__ __forceinline__ u64 random_bits(u64 seed, u64 position) {
    const u64 golden_gamma = 0x9E3779B97F4A7C15ull;
    return mix(mix(seed + golden_gamma) + (position + 1) * golden_gamma) >> 11;
}

// A token in best-first order: its rank, and how many of equal rank come before it (ascending ids).
struct Place {
    u32 rank;
    u32 ties_before;
};

struct Scratch {
    u64 bins[BINS];
    u64 warp_sums[THREADS / 32];
    u32 warp_ranks[THREADS / 32];
    u32 warp_ids[THREADS / 32];
    u64 below;
    u32 digit;
    u32 token;
};

struct Row {
    const float* logits;
    u32 vocab;
    float max;
    float inverse_temperature;
    // Tokens of lower rank are out.
    u32 floor;

    __device__ __forceinline__ u64 weight(u32 rank) const {
        const float scaled = (fminf(logit_of(rank), 3.402823466e38f) - max) * inverse_temperature;
        return static_cast<u64>(exp2f(scaled * 1.4426950408889634f) * 1099511627776.0f);
    }
};

// The sum of everything at or above the row's floor, each counting 1 or its weight.
template <bool BY_WEIGHT>
__device__ u64 total_of(const Row& row, Scratch& s) {
    u64 sum = 0;
    for (u32 id = threadIdx.x; id < row.vocab; id += THREADS) {
        const u32 rank = rank_of(row.logits[id]);
        if (rank >= row.floor) {
            sum += BY_WEIGHT ? row.weight(rank) : 1;
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        s.warp_sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    u64 total = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        total += s.warp_sums[warp];
    }
    return total;
}

// Adds `amount` to a bin; lanes of a warp with the same bin add once.
__device__ __forceinline__ void add_to_bin(Scratch& s, bool takes_part, u32 bin, u64 amount) {
    // Logits crowd into few bins: without this, every lane of a warp would wait for the others.
    const u32 active = __ballot_sync(0xffffffffu, takes_part);
    if (!takes_part) {
        return;
    }
    const u32 leader_bin = __shfl_sync(active, bin, __ffs(active) - 1);
    if (__all_sync(active, bin == leader_bin)) {
        // Weights have 41 bits: sums of 32 of them in two parts.
        const u32 low = __reduce_add_sync(active, static_cast<u32>(amount & 0x3ffffff));
        const u32 high = __reduce_add_sync(active, static_cast<u32>(amount >> 26));
        if (threadIdx.x % 32 == __ffs(active) - 1) {
            atomicAdd(&s.bins[bin], (static_cast<u64>(high) << 26) + low);
        }
        return;
    }
    atomicAdd(&s.bins[bin], amount);
}

// The first token, best first, whose sum (itself included) is more than `bound`; the sum of everything exceeds it.
template <bool BY_WEIGHT>
__device__ Place find(const Row& row, u64 bound, Scratch& s) {
    u32 prefix = 0;
    u32 shift = 32;
    // Sums of tokens better than those with this prefix.
    u64 before = 0;
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
        const u32 bits = pass < 2 ? 11 : 10;
        const u32 num_bins = 1u << bits;
        shift -= bits;
        __syncthreads();
        for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) {
            s.bins[bin] = 0;
        }
        __syncthreads();
        for (u32 start = 0; start < row.vocab; start += THREADS) {
            const u32 id = start + threadIdx.x;
            const u32 rank = id < row.vocab ? rank_of(row.logits[id]) : 0;
            const bool has_prefix = pass == 0 || (static_cast<u64>(rank) >> (shift + bits)) == prefix;
            const bool takes_part = rank >= row.floor && rank > 0 && has_prefix;
            const u64 amount = takes_part ? (BY_WEIGHT ? row.weight(rank) : 1) : 0;
            add_to_bin(s, takes_part && amount > 0, (rank >> shift) & (num_bins - 1), amount);
        }
        __syncthreads();
        // The best bin is the last one. Each thread of the first warp sums an equal part of the bins from the top.
        if (threadIdx.x < 32) {
            const u32 part = num_bins / 32;
            const u32 top = num_bins - 1 - threadIdx.x * part;
            u64 sum = 0;
            for (u32 i = 0; i < part; ++i) {
                sum += s.bins[top - i];
            }
            u64 up_to = sum;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const u64 other = __shfl_up_sync(0xffffffffu, up_to, offset);
                up_to += threadIdx.x >= offset ? other : 0;
            }
            u64 running = before + up_to - sum;
            if (running <= bound && before + up_to > bound) {
                u32 i = 0;
                while (running + s.bins[top - i] <= bound) {
                    running += s.bins[top - i];
                    ++i;
                }
                s.digit = top - i;
                s.below = running;
            }
        }
        __syncthreads();
        prefix = pass == 0 ? s.digit : (prefix << bits) | s.digit;
        before = s.below;
    }
    // All that is left has the same logit, and so the same weight.
    const u64 each = BY_WEIGHT ? row.weight(prefix) : 1;
    return Place{prefix, static_cast<u32>((bound - before) / each)};
}

// Makes `last` the row's last token and returns the weight of what is left.
__device__ u64 cut_at(Row& row, Place last, Scratch& s) {
    row.floor = last.rank + 1;
    const u64 better = total_of<true>(row, s);
    row.floor = last.rank;
    return better + (last.ties_before + 1) * row.weight(last.rank);
}

// The id of a place: the one among equals that has `ties_before` smaller ids.
__device__ u32 token_at(const Row& row, Place place, Scratch& s) {
    u32 before = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        s.token = NO_TOKEN;
    }
    for (u32 start = 0; start < row.vocab; start += THREADS) {
        const u32 id = start + threadIdx.x;
        const bool is_equal = id < row.vocab && rank_of(row.logits[id]) == place.rank;
        const u32 lanes = __ballot_sync(0xffffffffu, is_equal);
        // Nearly every stretch holds none: one barrier each, which also separates the reads of the last from these writes.
        if (__syncthreads_or(is_equal) == 0) {
            continue;
        }
        if (threadIdx.x % 32 == 0) {
            s.warp_ids[threadIdx.x / 32] = __popc(lanes);
        }
        __syncthreads();
        u32 smaller = before + __popc(lanes & ((1u << (threadIdx.x % 32)) - 1));
        u32 all = before;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; ++warp) {
            smaller += warp < threadIdx.x / 32 ? s.warp_ids[warp] : 0;
            all += s.warp_ids[warp];
        }
        if (is_equal && smaller == place.ties_before) {
            s.token = id;
        }
        before = all;
        if (before > place.ties_before) {
            break;
        }
    }
    __syncthreads();
    return s.token;
}

// logits: [row][vocab] f32, rows `stride` apart. tokens: one a row.
extern "C" __global__ void __launch_bounds__(THREADS) sample(
    const float* __restrict__ logits, u32 vocab, u64 stride, const SamplingRow* __restrict__ rows,
    u32* __restrict__ tokens) {
    __shared__ Scratch s;
    const SamplingRow params = rows[blockIdx.x];
    Row row;
    row.logits = logits + blockIdx.x * stride;
    row.vocab = vocab;

    u32 best_rank = 0;
    u32 best_id = NO_TOKEN;
    for (u32 id = threadIdx.x; id < vocab; id += THREADS) {
        const u32 rank = rank_of(row.logits[id]);
        if (rank > best_rank) {
            best_rank = rank;
            best_id = id;
        }
    }
    const u32 warp_best = __reduce_max_sync(0xffffffffu, best_rank);
    const u32 warp_id = __reduce_min_sync(0xffffffffu, best_rank == warp_best ? best_id : NO_TOKEN);
    if (threadIdx.x % 32 == 0) {
        s.warp_ranks[threadIdx.x / 32] = warp_best;
        s.warp_ids[threadIdx.x / 32] = warp_id;
    }
    __syncthreads();
    best_rank = 0;
    best_id = NO_TOKEN;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        const u32 rank = s.warp_ranks[warp];
        const u32 id = s.warp_ids[warp];
        if (rank > best_rank || (rank == best_rank && id < best_id)) {
            best_rank = rank;
            best_id = id;
        }
    }
    if (params.temperature == 0.0f || best_rank == 0) {
        if (threadIdx.x == 0) {
            tokens[blockIdx.x] = best_rank == 0 ? NO_TOKEN : best_id;
        }
        return;
    }
    row.max = fminf(logit_of(best_rank), 3.402823466e38f);
    row.inverse_temperature = fminf(1.0f / params.temperature, 1e30f);
    row.floor = 1;
    if (params.min_p > 0.0f) {
        row.floor = max(1u, rank_of(row.max + logf(params.min_p) * params.temperature));
    }

    // The weight of the kept set. Ties of its last token that are not in it lie behind it in the order, so that bounds
    // below `kept` never reach them.
    u64 kept;
    if (params.top_k > 0 && total_of<false>(row, s) > params.top_k) {
        kept = cut_at(row, find<false>(row, params.top_k - 1, s), s);
    } else {
        kept = total_of<true>(row, s);
    }
    if (params.top_p < 1.0f) {
        // The smallest set whose sum reaches top_p of the kept weight.
        const u64 wanted = static_cast<u64>(ceil(static_cast<double>(kept) * params.top_p));
        const u64 bound = wanted == 0 ? 0 : (wanted < kept ? wanted : kept) - 1;
        kept = cut_at(row, find<true>(row, bound, s), s);
    }
    const u64 drawn = __umul64hi(random_bits(params.seed, params.position) << 11, kept);
    const u32 token = token_at(row, find<true>(row, drawn, s), s);
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token;
    }
}
