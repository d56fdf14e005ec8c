// The next token of each row: greedy, or a draw after temperature, min-p, top-k and top-p, in this order. One block a row.
//
// A token's weight is exp((logit - max) / temperature) as an integer multiple of 2^-40, so that sums do not depend on the
// order in which threads add: a row's token is a function of its logits, seed and position alone. Tokens are ordered best
// first, equal logits by ascending id; what weighs nothing is never drawn. Every cut and the draw itself ask one question:
// at which token does a sum over this order pass a bound? A histogram over the distance to the best logit, 64 bins an octave
// of weight, names the bin; the bin's few tokens are listed and sorted. A bin too full for the list (many equal logits) is
// searched digit by digit over the bits of the logit instead.
//
// Passes over a row: the maximum, the histogram, and one list for each cut and the draw. A row lies in L2.
// NaN counts as minus infinity. A row without any other logit gives NO_TOKEN.

constexpr int THREADS = 1024;
constexpr int BINS = 2048;
constexpr int BINS_PER_OCTAVE = 64;
// Tokens of one bin that can be listed.
constexpr int LIST = 2048;
constexpr u32 NO_TOKEN = ~0u;
// 2^40, the best token's weight.
constexpr float UNIT_WEIGHT = 1099511627776.0f;

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

struct Scratch {
    // Sums over the bins before one, best first, and over all in [BINS].
    u64 weights[BINS + 1];
    u32 counts[BINS + 1];
    // Of one bin: rank and inverted id, so that larger is better. Or the histogram of a digit.
    u64 list[LIST];
    u64 warp_sums[THREADS / 32];
    u32 warp_counts[THREADS / 32];
    u32 list_len;
    // The bin that `list` holds, sorted; BINS: none.
    u32 listed;
    u32 bin;
    u64 found_weight;
    u32 found_token;
    u32 digit;
};

struct Row {
    const float* logits;
    u32 vocab;
    float max;
    // Octaves of weight a unit of logit.
    float octaves;
    // Tokens of lower rank are out.
    u32 floor;

    __device__ __forceinline__ float distance(u32 rank) const {
        return (max - fminf(logit_of(rank), 3.402823466e38f)) * octaves;
    }

    __device__ __forceinline__ u64 weight(u32 rank) const {
        return rank < floor ? 0 : static_cast<u64>(exp2f(-distance(rank)) * UNIT_WEIGHT);
    }

    __device__ __forceinline__ u32 bin(u32 rank) const {
        return static_cast<u32>(fminf(distance(rank) * BINS_PER_OCTAVE, BINS - 1));
    }

    // Calls `f(id, rank)` for every token, 16 bytes a load where rows allow it.
    template <typename F>
    __device__ __forceinline__ void each(F f) const {
        if (vocab % 4 == 0) {
            for (u32 id = threadIdx.x * 4; id < vocab; id += THREADS * 4) {
                const F32x4 four = *reinterpret_cast<const F32x4*>(logits + id);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    f(id + j, rank_of(four.at[j]));
                }
            }
        } else {
            for (u32 id = threadIdx.x; id < vocab; id += THREADS) {
                f(id, rank_of(logits[id]));
            }
        }
    }
};

// The token at which a sum passes a bound, and the weight of everything up to it, itself included.
struct Found {
    u32 token;
    u64 weight;
};

// Sums of `value` and `count` over the threads before this one; the scratch sums are free again after a barrier.
__device__ void scan(u64& value, u32& count, Scratch& s) {
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u64 own_value = value;
    const u32 own_count = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const u64 other_value = __shfl_up_sync(0xffffffffu, value, offset);
        const u32 other_count = __shfl_up_sync(0xffffffffu, count, offset);
        value += lane >= offset ? other_value : 0;
        count += lane >= offset ? other_count : 0;
    }
    __syncthreads();
    if (lane == 31) {
        s.warp_sums[warp] = value;
        s.warp_counts[warp] = count;
    }
    __syncthreads();
    value -= own_value;
    count -= own_count;
#pragma unroll
    for (int before = 0; before < THREADS / 32; ++before) {
        value += before < warp ? s.warp_sums[before] : 0;
        count += before < warp ? s.warp_counts[before] : 0;
    }
}

// Fills the histogram and turns it into sums over the bins before.
__device__ void count_bins(const Row& row, Scratch& s) {
    for (u32 bin = threadIdx.x; bin <= BINS; bin += THREADS) {
        s.weights[bin] = 0;
        s.counts[bin] = 0;
    }
    if (threadIdx.x == 0) {
        s.listed = BINS;
    }
    __syncthreads();
    row.each([&](u32, u32 rank) {
        const u64 weight = rank == 0 ? 0 : row.weight(rank);
        if (weight > 0) {
            const u32 bin = row.bin(rank);
            atomicAdd(&s.weights[bin], weight);
            atomicAdd(&s.counts[bin], 1);
        }
    });
    __syncthreads();
    static_assert(BINS == 2 * THREADS, "a thread takes two bins");
    const u32 first = 2 * threadIdx.x;
    const u64 weights[2] = {s.weights[first], s.weights[first + 1]};
    const u32 counts[2] = {s.counts[first], s.counts[first + 1]};
    u64 weight = weights[0] + weights[1];
    u32 count = counts[0] + counts[1];
    scan(weight, count, s);
    s.weights[first] = weight;
    s.counts[first] = count;
    s.weights[first + 1] = weight + weights[0];
    s.counts[first + 1] = count + counts[0];
    if (threadIdx.x == THREADS - 1) {
        s.weights[BINS] = weight + weights[0] + weights[1];
        s.counts[BINS] = count + counts[0] + counts[1];
    }
    __syncthreads();
}

// Lists a bin's tokens, best first.
__device__ void list_bin(const Row& row, u32 bin, Scratch& s) {
    if (s.listed == bin) {
        return;
    }
    const u32 len = s.counts[bin + 1] - s.counts[bin];
    u32 padded = 32;
    while (padded < len) {
        padded *= 2;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s.list_len = 0;
        s.listed = bin;
    }
    for (u32 i = threadIdx.x; i < padded; i += THREADS) {
        s.list[i] = 0;
    }
    __syncthreads();
    row.each([&](u32 id, u32 rank) {
        if (rank >= row.floor && row.bin(rank) == bin && row.weight(rank) > 0) {
            s.list[atomicAdd(&s.list_len, 1)] = static_cast<u64>(rank) << 32 | ~id;
        }
    });
    // Bitonic sort, descending. The order of insertion does not matter: all entries differ.
    for (u32 size = 2; size <= padded; size *= 2) {
        for (u32 stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < padded / 2; i += THREADS) {
                const u32 a = 2 * i - (i & (stride - 1));
                const u32 b = a + stride;
                const bool descends = (a & size) == 0;
                const u64 x = s.list[a];
                const u64 y = s.list[b];
                if ((x < y) == descends) {
                    s.list[a] = y;
                    s.list[b] = x;
                }
            }
        }
    }
    __syncthreads();
}

// Adds `amount` to a digit's bin; lanes of a warp with the same digit add once.
__device__ __forceinline__ void add_to_digit(Scratch& s, u32 digit, u64 amount) {
    // Every lane of a warp would wait for the others where logits are equal.
    const u32 active = __ballot_sync(0xffffffffu, amount > 0);
    if (amount == 0) {
        return;
    }
    const u32 leader = __ffs(active) - 1;
    if (__all_sync(active, digit == __shfl_sync(active, digit, leader))) {
        // Weights have 41 bits: sums of 32 of them in two parts.
        const u32 low = __reduce_add_sync(active, static_cast<u32>(amount & 0x3ffffff));
        const u32 high = __reduce_add_sync(active, static_cast<u32>(amount >> 26));
        if (threadIdx.x % 32 == leader) {
            atomicAdd(&s.list[digit], (static_cast<u64>(high) << 26) + low);
        }
        return;
    }
    atomicAdd(&s.list[digit], amount);
}

// The id of the token of `rank` that has `ties_before` equals with smaller ids.
__device__ u32 token_at(const Row& row, u32 rank, u32 ties_before, Scratch& s) {
    u32 before = 0;
    for (u32 start = 0; start < row.vocab; start += THREADS) {
        const u32 id = start + threadIdx.x;
        const bool is_equal = id < row.vocab && rank_of(row.logits[id]) == rank;
        const u32 lanes = __ballot_sync(0xffffffffu, is_equal);
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
            s.warp_counts[threadIdx.x / 32] = __popc(lanes);
        }
        __syncthreads();
        u32 smaller = before + __popc(lanes & ((1u << (threadIdx.x % 32)) - 1));
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; ++warp) {
            smaller += warp < threadIdx.x / 32 ? s.warp_counts[warp] : 0;
            before += s.warp_counts[warp];
        }
        if (is_equal && smaller == ties_before) {
            s.found_token = id;
        }
        if (before > ties_before) {
            break;
        }
    }
    __syncthreads();
    return s.found_token;
}

// As `find`, for a bin that does not fit into the list: over the bits of the ranks, 11, 11 and 10 at a time.
template <bool BY_WEIGHT>
__device__ Found find_by_digits(const Row& row, u64 bound, Scratch& s) {
    static_assert(LIST == 2048, "a digit of 11 bits");
    u32 prefix = 0;
    u32 shift = 32;
    // Sums of tokens better than those with this prefix.
    u64 before = 0;
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
        const u32 bits = pass < 2 ? 11 : 10;
        const u32 num_digits = 1u << bits;
        shift -= bits;
        __syncthreads();
        for (u32 digit = threadIdx.x; digit < LIST; digit += THREADS) {
            s.list[digit] = 0;
        }
        if (threadIdx.x == 0) {
            s.listed = BINS;
        }
        __syncthreads();
        for (u32 start = 0; start < row.vocab; start += THREADS) {
            const u32 id = start + threadIdx.x;
            const u32 rank = id < row.vocab ? rank_of(row.logits[id]) : 0;
            const bool has_prefix = pass == 0 || (static_cast<u64>(rank) >> (shift + bits)) == prefix;
            const u64 weight = rank > 0 && has_prefix ? row.weight(rank) : 0;
            add_to_digit(s, (rank >> shift) & (num_digits - 1), BY_WEIGHT || weight == 0 ? weight : 1);
        }
        __syncthreads();
        // The best digit is the last one. Each lane of the first warp sums an equal part from the top.
        if (threadIdx.x < 32) {
            const u32 part = num_digits / 32;
            const u32 top = num_digits - 1 - threadIdx.x * part;
            u64 sum = 0;
            for (u32 i = 0; i < part; ++i) {
                sum += s.list[top - i];
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
                while (running + s.list[top - i] <= bound) {
                    running += s.list[top - i];
                    ++i;
                }
                s.digit = top - i;
                s.found_weight = running;
            }
        }
        __syncthreads();
        prefix = pass == 0 ? s.digit : (prefix << bits) | s.digit;
        before = s.found_weight;
    }
    // All that is left has the same logit, and so the same weight.
    const u64 each = row.weight(prefix);
    const u32 ties_before = static_cast<u32>((bound - before) / (BY_WEIGHT ? each : 1));
    u64 better = before;
    if (!BY_WEIGHT) {
        u32 unused = 0;
        better = 0;
        row.each([&](u32, u32 rank) { better += rank > prefix ? row.weight(rank) : 0; });
        const u64 own = better;
        scan(better, unused, s);
        if (threadIdx.x == THREADS - 1) {
            s.found_weight = better + own;
        }
        __syncthreads();
        better = s.found_weight;
    }
    const u32 token = token_at(row, prefix, ties_before, s);
    return Found{token, better + (ties_before + 1) * each};
}

// The first token, best first, whose sum (itself included, each token counting 1 or its weight) is more than `bound`; the
// sum of everything exceeds it.
template <bool BY_WEIGHT>
__device__ Found find(const Row& row, u64 bound, Scratch& s) {
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) {
        const u64 before = BY_WEIGHT ? s.weights[bin] : s.counts[bin];
        const u64 up_to = BY_WEIGHT ? s.weights[bin + 1] : s.counts[bin + 1];
        if (before <= bound && bound < up_to) {
            s.bin = bin;
        }
    }
    __syncthreads();
    const u32 bin = s.bin;
    if (s.counts[bin + 1] - s.counts[bin] > LIST) {
        return find_by_digits<BY_WEIGHT>(row, bound, s);
    }
    list_bin(row, bin, s);
    static_assert(LIST == 2 * THREADS, "a thread takes two tokens");
    const u32 len = s.counts[bin + 1] - s.counts[bin];
    const u32 first = 2 * threadIdx.x;
    const u64 weights[2] = {
        first < len ? row.weight(static_cast<u32>(s.list[first] >> 32)) : 0,
        first + 1 < len ? row.weight(static_cast<u32>(s.list[first + 1] >> 32)) : 0,
    };
    u64 weight = weights[0] + weights[1];
    u32 count = 0;
    scan(weight, count, s);
    u64 up_to = s.weights[bin] + weight;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const u64 before = up_to;
        up_to += weights[j];
        const u64 counted = s.counts[bin] + first + j;
        const bool is_it = BY_WEIGHT ? before <= bound && bound < up_to : counted == bound;
        if (first + j < len && is_it) {
            s.found_weight = up_to;
            s.found_token = ~static_cast<u32>(s.list[first + j]);
        }
    }
    __syncthreads();
    return Found{s.found_token, s.found_weight};
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
    row.each([&](u32 id, u32 rank) {
        if (rank > best_rank) {
            best_rank = rank;
            best_id = id;
        }
    });
    const u32 warp_best = __reduce_max_sync(0xffffffffu, best_rank);
    const u32 warp_id = __reduce_min_sync(0xffffffffu, best_rank == warp_best ? best_id : NO_TOKEN);
    if (threadIdx.x % 32 == 0) {
        s.warp_counts[threadIdx.x / 32] = warp_id;
        s.warp_sums[threadIdx.x / 32] = warp_best;
    }
    __syncthreads();
    best_rank = 0;
    best_id = NO_TOKEN;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        const u32 rank = static_cast<u32>(s.warp_sums[warp]);
        const u32 id = s.warp_counts[warp];
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
    row.octaves = fminf(1.0f / params.temperature, 1e30f) * 1.4426950408889634f;
    row.floor = 1;
    if (params.min_p > 0.0f) {
        row.floor = max(1u, rank_of(row.max + logf(params.min_p) * params.temperature));
    }
    __syncthreads();
    count_bins(row, s);
    // The weight of the kept set: the first tokens of the order, so that bounds below it never reach the others.
    u64 kept = s.weights[BINS];
    if (params.top_k > 0 && params.top_k < s.counts[BINS]) {
        kept = find<false>(row, params.top_k - 1, s).weight;
    }
    if (params.top_p < 1.0f) {
        // The smallest set whose sum reaches top_p of the kept weight.
        const u64 wanted = static_cast<u64>(ceil(static_cast<double>(kept) * params.top_p));
        const u64 bound = wanted == 0 ? 0 : (wanted < kept ? wanted : kept) - 1;
        kept = find<true>(row, bound, s).weight;
    }
    const u64 drawn = __umul64hi(random_bits(params.seed, params.position) << 11, kept);
    const u32 token = find<true>(row, drawn, s).token;
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token;
    }
}
