// From logits to a token and its log-probability: penalties, biases, temperature, top-k, top-p, min-p, and the draw.
// Follows step.cu.
//
// Weights are summed as integers (WEIGHT_ONE is 1), so that sums do not depend on the order in which threads add.
// A threshold that keeps the likeliest tokens is found digit by digit, over keys that order as the logits do.

#define SAMPLE_THREADS 512
#define SAMPLE_WARPS (SAMPLE_THREADS / WARP)
#define SAMPLE_BLOCKS 2 // on a multiprocessor: one reads while the other searches
#define REPORT_THREADS 1024
#define DIGITS 256
#define BINS SAMPLE_THREADS // each thread sums one
#define WEIGHT_BITS 40
#define WEIGHT_ONE 1099511627776.0f // 2^WEIGHT_BITS: all weights of a vocabulary add up to less than 2^64
#define LISTED_MAX 8192
#define LOADS 8 // of a thread at once
#define ALL 0xffffffffu
#define IMPOSSIBLE (-INFINITE)

// How the token after one row is picked; the host draws `draw`, in [0, 1).
struct Pick {
    float scale; // log2(e) / temperature
    u32 top_k;   // 0 keeps all
    float top_p, min_p, penalty;
    u32 repeated, repeated_end; // places in `lists` of pairs: token, room for its logit before the penalty
    u32 biases, biases_end;     // places of triples: token, bias, room for its logit before
    u32 alternatives;           // how many likeliest tokens are reported; ALL: no log-probabilities
    u32 place;                  // where the log-probabilities go
    u32 padding;
    double draw;
};

// Memory that a block shares.
struct Shared {
    u32 low[BINS], high[BINS]; // sums of 64 bits
    u32 keys[LISTED_MAX];
    u64 totals[SAMPLE_WARPS], before;
    u32 equals[SAMPLE_WARPS], listed, chosen, token;
    float value;
};

// Adds to a sum; two additions of 32 bits are faster than one of 64.
__device__ __forceinline__ void add(Shared& shared, u32 at, u64 weight) {
    u32 low = (u32)weight;
    u32 old = atomicAdd(&shared.low[at], low);
    u32 high = (u32)(weight >> 32) + (old + low < old);
    if (high) atomicAdd(&shared.high[at], high);
}

// Orders as the value does; -inf comes first.
__device__ __forceinline__ u32 key_of(float value) {
    u32 bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// NaN is impossible; adding 0 turns -0 into 0, so that keys order as values do.
__device__ __forceinline__ float clean(float logit) { return isnan(logit) ? IMPOSSIBLE : logit + 0.0f; }

__device__ __forceinline__ u64 weight_of(float logit, float most, float scale) {
    return (u64)(exp2_fast((logit - most) * scale) * WEIGHT_ONE);
}

// Loads every STEP-th logit from `first` on. Those beyond the end are impossible. Many are on their way at once, because
// each is a long way from here.
template <u32 STEP>
__device__ __forceinline__ void load(const float* row, u32 first, u32 end, float (&logits)[LOADS]) {
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) logits[i] = first + i * STEP < end ? row[first + i * STEP] : IMPOSSIBLE;
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) logits[i] = clean(logits[i]);
}

// Has a block's threads use all logits of a row.
template <int THREADS, typename Use>
__device__ __forceinline__ void each(const float* row, Use&& use) {
    for (u32 first = threadIdx.x; first < VOCAB; first += LOADS * THREADS) {
        float logits[LOADS];
        load<THREADS>(row, first, VOCAB, logits);
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) use(logits[i]);
    }
}

// The largest logit of a row, in every thread.
template <int THREADS>
__device__ __forceinline__ float largest(const float* row) {
    __shared__ float maxima[THREADS / WARP];
    float most = IMPOSSIBLE;
    each<THREADS>(row, [&](float logit) { most = fmaxf(most, logit); });
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x % WARP == 0) maxima[threadIdx.x / WARP] = most;
    __syncthreads();
#pragma unroll
    for (u32 warp = 0; warp < THREADS / WARP; warp++) most = fmaxf(most, maxima[warp]);
    return most;
}

// The tokens that are kept: those with a larger key, and the first `equals` of those with the same.
struct Threshold {
    u32 key, equals;
};

// Which of BINS a logit is in: by how much less likely its token is than the likeliest, which is in bin 0.
__device__ __forceinline__ u32 bin_of(float logit, float most, float scale) {
    return (u32)fminf((most - logit) * scale * (BINS / WEIGHT_BITS), BINS - 1);
}

// The sum of a value up to and with this thread's; the whole sum is left in `total`.
__device__ __forceinline__ u64 sum_through(Shared& shared, u64 value, u64& total) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        u64 lower = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += lower;
    }
    if (lane == WARP - 1) shared.totals[warp] = value;
    __syncthreads();
    total = 0;
    u64 before = 0;
    for (u32 other = 0; other < SAMPLE_WARPS; other++) {
        if (other == warp) before = total;
        total += shared.totals[other];
    }
    __syncthreads();
    return before + value;
}

// The digit, from the first up or from the last down, at which the sums reach `goal`, or the last with anything in it;
// `reached` is what came before it. A goal of 0 stands for this share of all sums.
template <int COUNT, bool DOWN>
__device__ __forceinline__ u32 reaches(Shared& shared, u64& goal, double share, u64& reached) {
    u32 place = threadIdx.x, digit = DOWN ? COUNT - 1 - place : place;
    u64 sum = place < COUNT ? (u64)shared.high[digit] << 32 | shared.low[digit] : 0;
    if (place == 0) shared.chosen = 0;
    u64 total, before = reached + sum_through(shared, sum, total) - sum;
    if (goal == 0) goal = max((u64)ceil(share * (double)total), (u64)1);
    if (sum > 0 && before < goal) atomicMax(&shared.chosen, place);
    __syncthreads();
    u32 chosen = shared.chosen;
    if (place == chosen) shared.before = before;
    __syncthreads();
    reached = shared.before;
    return DOWN ? COUNT - 1 - chosen : chosen;
}

// The least set of the likeliest tokens whose number is `goal`, or whose weights reach a share of all. First a bin is
// found, over which a vocabulary spreads well; then the key within it, digit by digit. A bin's keys are listed if there
// is room, else looked up again for every digit.
template <bool COUNTS>
__device__ Threshold likeliest(Shared& shared, const float* row, float most, float scale, u64 goal, double share) {
    shared.low[threadIdx.x] = shared.high[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    auto weigh = [&](float logit) -> u64 { return COUNTS ? logit > IMPOSSIBLE : weight_of(logit, most, scale); };
    each<SAMPLE_THREADS>(row, [&](float logit) {
        u64 weight = weigh(logit);
        if (weight > 0) add(shared, bin_of(logit, most, scale), weight);
    });
    __syncthreads();
    u64 reached = 0;
    u32 bin = reaches<BINS, false>(shared, goal, share, reached);
    each<SAMPLE_THREADS>(row, [&](float logit) {
        if (!(logit > IMPOSSIBLE) || bin_of(logit, most, scale) != bin) return;
        u32 place = atomicAdd(&shared.listed, 1u);
        if (place < LISTED_MAX) shared.keys[place] = key_of(logit);
    });
    __syncthreads();
    bool listed = shared.listed <= LISTED_MAX;
    u32 count = listed ? shared.listed : VOCAB;
    u32 prefix = 0, digit = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        shared.low[threadIdx.x] = shared.high[threadIdx.x] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += SAMPLE_THREADS) {
            float logit = listed ? value_of(shared.keys[i]) : clean(row[i]);
            if (!(logit > IMPOSSIBLE) || bin_of(logit, most, scale) != bin) continue;
            u32 key = key_of(logit);
            if (shift < 24 && key >> (shift + 8) != prefix) continue;
            u64 weight = weigh(logit);
            if (weight > 0) add(shared, key >> shift & 255, weight);
        }
        __syncthreads();
        digit = reaches<DIGITS, true>(shared, goal, share, reached);
        prefix = prefix << 8 | digit;
    }
    // All that share the key weigh the same. Where all of them are kept, nobody need count them.
    u64 sum = (u64)shared.high[digit] << 32 | shared.low[digit];
    u64 each = max(weigh(value_of(prefix)), (u64)1);
    u64 missing = goal > reached ? (goal - reached + each - 1) / each : 1;
    __syncthreads();
    return Threshold{prefix, missing * each < sum ? (u32)max(missing, (u64)1) : ALL};
}

// A warp's part of the vocabulary; of equals at the threshold, the first ones are kept.
struct Part {
    u32 start, end;
    u32 equals; // at the threshold, in the parts before
};

__device__ Part part_of(Shared& shared, const float* row, const Threshold& threshold) {
    const u32 PART = (VOCAB + SAMPLE_THREADS - 1) / SAMPLE_WARPS / WARP * WARP + WARP;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 start = min(warp * PART, (u32)VOCAB);
    Part part = {start, min(start + PART, (u32)VOCAB), 0};
    if (threshold.equals == ALL) return part;
    u32 equals = 0;
    for (u32 i = part.start + lane; i < part.end; i += WARP) equals += key_of(clean(row[i])) == threshold.key;
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) equals += __shfl_xor_sync(~0u, equals, step);
    if (lane == 0) shared.equals[warp] = equals;
    __syncthreads();
    for (u32 other = 0; other < warp; other++) part.equals += shared.equals[other];
    __syncthreads();
    return part;
}

// The logits of a lane's tokens: every 32nd from this place of its warp's on. Those that are not kept are impossible.
// `equals` counts those at the threshold.
__device__ __forceinline__ void kept(const float* row, u32 start, u32 end, const Threshold& threshold, u32& equals,
                                     float (&logits)[LOADS]) {
    u32 lane = threadIdx.x % WARP;
    load<WARP>(row, start + lane, end, logits);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
        u32 key = key_of(logits[i]);
        bool is_kept = key >= threshold.key;
        if (threshold.equals != ALL) {
            u32 same = __ballot_sync(~0u, start + i * WARP + lane < end && key == threshold.key);
            u32 rank = equals + __popc(same & ((1u << lane) - 1));
            equals += __popc(same);
            is_kept = key > threshold.key || (key == threshold.key && rank < threshold.equals);
        }
        if (!is_kept) logits[i] = IMPOSSIBLE;
    }
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Draws among the tokens that are kept; the result is left in `shared.token`. A scale of 0 weighs all alike.
__device__ void draw(Shared& shared, const float* row, const Threshold& threshold, float most, float scale, double at) {
    Part part = part_of(shared, row, threshold);
    u32 lane = threadIdx.x % WARP;
    auto weigh = [&](float logit) -> u64 {
        return logit == IMPOSSIBLE ? 0 : scale == 0 ? 1 : weight_of(logit, most, scale);
    };
    u64 sum = 0;
    u32 equals = part.equals;
    float logits[LOADS];
    for (u32 start = part.start; start < part.end; start += LOADS * WARP) {
        kept(row, start, part.end, threshold, equals, logits);
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) sum += weigh(logits[i]);
    }
    u64 total, through = sum_through(shared, sum, total);
    // The sums of a warp's lanes are added up; what is before its first lane is before the part.
    u64 before = __shfl_sync(~0u, through - sum, 0), after = __shfl_sync(~0u, through, WARP - 1);
    u64 target = (u64)(at * (double)total);
    if (target >= total && total > 0) target = total - 1;
    if (target < before || target >= after) return;
    equals = part.equals;
    for (u32 start = part.start; start < part.end; start += LOADS * WARP) {
        kept(row, start, part.end, threshold, equals, logits);
        u64 weights[LOADS], sum = 0;
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) sum += weights[i] = weigh(logits[i]);
        sum = warp_sum(sum);
        if (target >= before + sum) {
            before += sum;
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            u64 through = weights[i];
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                u64 lower = __shfl_up_sync(~0u, through, step);
                if (lane >= step) through += lower;
            }
            u32 hit = __ballot_sync(~0u, weights[i] > 0 && target < before + through);
            if (hit) {
                if (lane == 0) shared.token = start + i * WARP + __ffs(hit) - 1;
                return;
            }
            before += __shfl_sync(~0u, through, WARP - 1);
        }
    }
}

// Applies penalties and biases, and keeps the logits before.
__device__ void adjust(const Pick& pick, u32* lists, float* row) {
    for (u32 i = pick.repeated + 2 * threadIdx.x; i < pick.repeated_end; i += 2 * SAMPLE_THREADS) {
        if (lists[i] >= VOCAB) continue;
        float logit = row[lists[i]];
        lists[i + 1] = __float_as_uint(logit);
        row[lists[i]] = logit > 0 ? logit / pick.penalty : logit * pick.penalty;
    }
    __syncthreads();
    for (u32 i = pick.biases + 3 * threadIdx.x; i < pick.biases_end; i += 3 * SAMPLE_THREADS) {
        if (lists[i] >= VOCAB) continue;
        float logit = row[lists[i]];
        lists[i + 2] = __float_as_uint(logit);
        row[lists[i]] = logit + __uint_as_float(lists[i + 1]);
    }
    __syncthreads();
}

// A token's logit before penalties and biases.
__device__ float before_all(Shared& shared, const Pick& pick, const u32* lists, const float* row, u32 token) {
    if (threadIdx.x == 0) shared.value = row[token];
    __syncthreads();
    for (u32 i = pick.biases + 3 * threadIdx.x; i < pick.biases_end; i += 3 * SAMPLE_THREADS)
        if (lists[i] == token) shared.value = __uint_as_float(lists[i + 2]);
    __syncthreads();
    for (u32 i = pick.repeated + 2 * threadIdx.x; i < pick.repeated_end; i += 2 * SAMPLE_THREADS)
        if (lists[i] == token) shared.value = __uint_as_float(lists[i + 1]);
    __syncthreads();
    return clean(shared.value);
}

// Grid: rows. Picks a token of each row of logits (rows, VOCAB), which it changes. Where log-probabilities are asked for,
// the token's logit goes to its place among them.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, SAMPLE_BLOCKS)
    sample(const Pick* picks, u32* lists, float* logits, u32* tokens, float* reported) {
    __shared__ Shared shared;
    Pick pick = picks[blockIdx.x];
    float* row = logits + (u64)blockIdx.x * VOCAB;
    if (threadIdx.x == 0) shared.token = 0;
    adjust(pick, lists, row);
    float most = largest<SAMPLE_THREADS>(row);
    // An infinite logit is greedy too.
    bool greedy = !(pick.scale > 0) || isinf(pick.scale) || isinf(most) || pick.top_k == 1;
    Threshold threshold = {0, ALL};
    if (greedy) {
        threshold = Threshold{key_of(most), 1};
    } else {
        bool counted = pick.top_k > 0 && pick.top_k < VOCAB, weighed = pick.top_p < 1;
        if (counted) threshold = likeliest<true>(shared, row, most, pick.scale, pick.top_k, 0);
        if (counted && weighed) {
            Part part = part_of(shared, row, threshold);
            for (u32 start = part.start; start < part.end; start += LOADS * WARP) {
                float logits[LOADS];
                kept(row, start, part.end, threshold, part.equals, logits);
#pragma unroll
                for (u32 i = 0, at = start + threadIdx.x % WARP; i < LOADS; i++, at += WARP)
                    if (at < part.end) row[at] = logits[i];
            }
            __syncthreads();
        }
        if (weighed) threshold = likeliest<false>(shared, row, most, pick.scale, 0, pick.top_p);
        // 2^((logit - most) * scale) >= min_p
        u32 floor = pick.min_p > 0 ? key_of(most + log2f(pick.min_p) / pick.scale) : 0;
        if (floor > threshold.key) threshold = Threshold{floor, ALL};
    }
    draw(shared, row, threshold, most, greedy ? 0 : pick.scale, pick.draw);
    __syncthreads();
    u32 token = shared.token;
    if (threadIdx.x == 0) tokens[blockIdx.x] = most == IMPOSSIBLE ? TOKEN_NONE : token;
    if (pick.alternatives == ALL) return;
    float logit = before_all(shared, pick, lists, row, token);
    if (threadIdx.x == 0) reported[pick.place] = logit;
}

// Grid: rows, before they are sampled. Where log-probabilities are asked for, their place gets (after a word for the
// token's own logit) the logarithm of the sum of all weights, then the likeliest tokens, each with its logit.
extern "C" __global__ void __launch_bounds__(REPORT_THREADS)
    report(const Pick* picks, const float* logits, float* reported) {
    Pick pick = picks[blockIdx.x];
    if (pick.alternatives == ALL) return;
    const float* row = logits + (u64)blockIdx.x * VOCAB;
    float* out = reported + pick.place + 1;
    float most = largest<REPORT_THREADS>(row), sum = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < VOCAB; i += REPORT_THREADS)
        sum += exp2_fast((clean(row[i]) - most) * 1.4426950408889634f);
    sum = block_sum<REPORT_THREADS>(sum);
    if (threadIdx.x == 0) *out = isinf(most) ? 0 : most + logf(sum);
    // By logit, and by the lower id among equals.
    u64 last = ~0ull;
    __shared__ u64 best[REPORT_THREADS / WARP];
    for (u32 rank = 0; rank < pick.alternatives; rank++) {
        u64 next = 0;
#pragma unroll 4
        for (u32 i = threadIdx.x; i < VOCAB; i += REPORT_THREADS) {
            u64 place = (u64)key_of(clean(row[i])) << 32 | ~i;
            if (place < last && place > next) next = place;
        }
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) next = max(next, __shfl_xor_sync(~0u, next, step));
        if (threadIdx.x % WARP == 0) best[threadIdx.x / WARP] = next;
        __syncthreads();
        for (u32 warp = 0; warp < REPORT_THREADS / WARP; warp++) next = max(next, best[warp]);
        __syncthreads();
        last = next;
        if (threadIdx.x == 0) {
            out[1 + 2 * rank] = __uint_as_float(~(u32)last);
            out[2 + 2 * rank] = value_of((u32)(last >> 32));
        }
    }
}

// One thread for each of `count` picks. Keeps the token of each pick's slot for the next step, whose rows may ask for it.
extern "C" __global__ void keep_tokens(const Row* rows, const u32* picked, const u32* tokens, u32* kept, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) kept[rows[picked[i]].slot] = tokens[i];
}
