// From logits to a token: penalties, biases, temperature, top-k, top-p, min-p, and the draw. Follows step.cu.
//
// Weights are summed as integers (WEIGHT_ONE is 1), so that sums do not depend on the order in which threads add.
// A threshold that keeps the likeliest tokens is found digit by digit, over keys that order as the logits do.

#define SAMPLE_THREADS 1024
#define DIGITS 256
#define BINS 1024
#define WEIGHT_BITS 40
#define WEIGHT_ONE 1099511627776.0f // 2^WEIGHT_BITS: all weights of a vocabulary add up to less than 2^64
#define ALL 0xffffffffu

// How the token after one row is picked; the host draws `draw`, in [0, 1).
struct Pick {
    float scale; // log2(e) / temperature
    u32 top_k;   // 0 keeps all
    float top_p, min_p, penalty;
    u32 repeated, repeated_end, biases, biases_end; // places in `lists`
    u32 padding;
    double draw;
};

// Orders as the value does; -inf and NaN come first.
__device__ __forceinline__ u32 key_of(float value) {
    u32 bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 weight_of(float logit, float most, float scale) {
    return (u64)(exp2_fast((logit - most) * scale) * WEIGHT_ONE);
}

__device__ __forceinline__ float block_max(float value) {
    __shared__ float maxima[WARP];
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    if (threadIdx.x % WARP == 0) maxima[threadIdx.x / WARP] = value;
    __syncthreads();
    value = maxima[threadIdx.x % WARP];
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

// The tokens that are kept: those with a larger key, and the first `equals` of those with the same.
struct Threshold {
    u32 key, equals;
};

// Which of BINS a logit is in: by how much less likely its token is than the likeliest, which is in bin 0.
__device__ __forceinline__ u32 bin_of(float logit, float most, float scale) {
    return (u32)fminf((most - logit) * scale * (BINS / WEIGHT_BITS), BINS - 1);
}

// The digit, from `highest` down or up, at which the sums reach `goal`; `reached` is what came before it.
template <int COUNT, bool DOWN>
__device__ __forceinline__ u32 reaches(const u64* sums, const u32* counts, u64 goal, u64& reached) {
    __shared__ u32 chosen;
    __shared__ u64 before;
    if (threadIdx.x == 0) {
        u64 total = reached;
        u32 last = 0; // the last with anything in it, should the goal be out of reach
        u64 before_last = reached;
        for (u32 i = 0; i < COUNT; i++) {
            u32 digit = DOWN ? COUNT - 1 - i : i;
            if (counts[digit] == 0) continue;
            last = digit;
            before_last = total;
            if (total + sums[digit] >= goal) break;
            total += sums[digit];
        }
        chosen = last;
        before = before_last;
    }
    __syncthreads();
    reached = before;
    u32 digit = chosen;
    __syncthreads();
    return digit;
}

// The least set of the likeliest tokens whose weights, or whose number, reach `goal` (at least 1). First a bin is
// found, over which a vocabulary spreads well; then the key within it, digit by digit.
template <bool COUNTS>
__device__ Threshold likeliest(const float* logits, float most, float scale, u64 goal) {
    __shared__ u64 sums[BINS];
    __shared__ u32 counts[BINS];
    for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) sums[i] = counts[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < VOCAB; i += SAMPLE_THREADS) {
        float logit = logits[i];
        u64 weight = COUNTS ? logit > -__int_as_float(0x7f800000) : weight_of(logit, most, scale);
        if (weight == 0) continue;
        u32 bin = bin_of(logit, most, scale);
        atomicAdd(&sums[bin], weight);
        atomicAdd(&counts[bin], 1u);
    }
    __syncthreads();
    u64 reached = 0;
    u32 bin = reaches<BINS, false>(sums, counts, goal, reached);
    u32 prefix = 0;
    u32 digit = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < DIGITS; i += SAMPLE_THREADS) sums[i] = counts[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < VOCAB; i += SAMPLE_THREADS) {
            float logit = logits[i];
            if (!(logit > -__int_as_float(0x7f800000)) || bin_of(logit, most, scale) != bin) continue;
            u32 key = key_of(logit);
            if (shift < 24 && key >> (shift + 8) != prefix) continue;
            u64 weight = COUNTS ? 1 : weight_of(logit, most, scale);
            if (weight == 0) continue;
            atomicAdd(&sums[key >> shift & 255], weight);
            atomicAdd(&counts[key >> shift & 255], 1u);
        }
        __syncthreads();
        digit = reaches<DIGITS, true>(sums, counts, goal, reached);
        prefix = prefix << 8 | digit;
    }
    // All that share the key weigh the same. Where all of them are kept, nobody need count them.
    u64 count = max(counts[digit], 1u);
    u64 each = max(sums[digit] / count, (u64)1);
    u64 missing = goal > reached ? (goal - reached + each - 1) / each : 1;
    __syncthreads();
    return Threshold{prefix, missing < count ? (u32)max(missing, (u64)1) : ALL};
}

// Grid: rows. Uses the logits (rows, VOCAB) up.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    sample(const Pick* picks, const u32* lists, float* logits, u32* tokens) {
    Pick pick = picks[blockIdx.x];
    float* row = logits + (u64)blockIdx.x * VOCAB;
    const float none = -__int_as_float(0x7f800000);
    float most = none;
    for (u32 i = pick.repeated + threadIdx.x; i < pick.repeated_end; i += SAMPLE_THREADS) {
        float logit = row[lists[i]];
        row[lists[i]] = logit > 0 ? logit / pick.penalty : logit * pick.penalty;
    }
    __syncthreads();
    for (u32 i = pick.biases + 2 * threadIdx.x; i < pick.biases_end; i += 2 * SAMPLE_THREADS)
        row[lists[i]] += __uint_as_float(lists[i + 1]);
    __syncthreads();
    for (u32 i = threadIdx.x; i < VOCAB; i += SAMPLE_THREADS) {
        // NaN is impossible; adding 0 turns -0 into 0, so that keys order as values do.
        float logit = isnan(row[i]) ? none : row[i] + 0.0f;
        row[i] = logit;
        most = fmaxf(most, logit);
    }
    most = block_max(most);
    if (most == none) {
        if (threadIdx.x == 0) tokens[blockIdx.x] = 0;
        return;
    }
    // An infinite logit is greedy too.
    bool greedy = !(pick.scale > 0) || isinf(pick.scale) || isinf(most) || pick.top_k == 1;
    Threshold threshold = {0, ALL};
    if (greedy) threshold = Threshold{key_of(most), 1};
    else if (pick.top_k > 0 && pick.top_k < VOCAB) threshold = likeliest<true>(row, most, pick.scale, pick.top_k);
    // Warps take consecutive parts of the vocabulary. Of equals at the threshold, the first ones are kept.
    const u32 PART = (VOCAB + SAMPLE_THREADS - 1) / (SAMPLE_THREADS / WARP) / WARP * WARP + WARP;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 start = warp * PART, end = min(start + PART, (u32)VOCAB);
    __shared__ u64 part_sums[WARP];
    __shared__ u32 part_equals[WARP];
    for (int round = 0; round < 2; round++) {
        bool last = round == 1 || greedy || !(pick.top_p < 1);
        if (last && !greedy && pick.min_p > 0) {
            // 2^((logit - most) * scale) >= min_p
            u32 floor = key_of(most + log2f(pick.min_p) / pick.scale);
            if (floor > threshold.key) threshold = Threshold{floor, ALL};
        }
        u32 seen = 0;
        if (threshold.equals != ALL) {
            u32 equals = 0;
            for (u32 i = start + lane; i < end; i += WARP) equals += key_of(row[i]) == threshold.key;
            equals = __reduce_add_sync(~0u, equals);
            if (lane == 0) part_equals[warp] = equals;
            __syncthreads();
            for (u32 other = 0; other < warp; other++) seen += part_equals[other];
        }
        u64 sum = 0;
        for (u32 i = start; i < end; i += WARP) {
            bool there = i + lane < end;
            float logit = there ? row[i + lane] : none;
            u32 key = key_of(logit);
            u32 same = __ballot_sync(~0u, there && key == threshold.key);
            u32 rank = seen + __popc(same & ((1u << lane) - 1));
            seen += __popc(same);
            bool kept = there && (key > threshold.key || (key == threshold.key && rank < threshold.equals));
            // What is dropped is marked, so that the draw need not ask again.
            if (there && !kept) row[i + lane] = none;
            if (kept && logit > none) sum += greedy ? 1 : weight_of(logit, most, pick.scale);
        }
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) part_sums[warp] = sum;
        __syncthreads();
        u64 total = 0;
        for (u32 other = 0; other < WARP; other++) total += part_sums[other];
        __syncthreads();
        if (last) {
            u64 target = (u64)(pick.draw * (double)total);
            if (target >= total && total > 0) target = total - 1;
            u64 before = 0;
            for (u32 other = 0; other < warp; other++) before += part_sums[other];
            if (total == 0) {
                if (threadIdx.x == 0) tokens[blockIdx.x] = 0;
            } else if (target >= before && target < before + sum) {
                for (u32 i = start; i < end; i += WARP) {
                    float logit = i + lane < end ? row[i + lane] : none;
                    u64 weight = logit == none ? 0 : greedy ? 1 : weight_of(logit, most, pick.scale);
                    u64 through = weight;
#pragma unroll
                    for (int step = 1; step < WARP; step *= 2) {
                        u64 lower = __shfl_up_sync(~0u, through, step);
                        if (lane >= step) through += lower;
                    }
                    u32 hit = __ballot_sync(~0u, weight > 0 && target < before + through);
                    if (hit) {
                        if (lane == 0) tokens[blockIdx.x] = i + __ffs(hit) - 1;
                        break;
                    }
                    before += __shfl_sync(~0u, through, WARP - 1);
                }
            }
            return;
        }
        u64 goal = (u64)ceil((double)pick.top_p * (double)total);
        threshold = likeliest<false>(row, most, pick.scale, goal > 0 ? goal : 1);
    }
}
