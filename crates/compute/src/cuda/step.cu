// Everything of a step but products and attention: embedding, norms, rotation, activation, argmax.
//
// A model's shape is given as macros when this text is compiled, so loops have constant bounds. Each kernel handles a
// row with a fixed number of threads and sums in a fixed order, so a row's bits depend on the row alone. The text is
// compiled without contraction (--fmad=false): a sum is fused only where it says so.

// 16 bits of a value: bf16, or f16 (F16 is defined) for devices before compute capability 8.0.
typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GROUP (HEADS / KV_HEADS)
#define QUERY_WIDTH (HEADS * HEAD_DIM)
#define KV_WIDTH (KV_HEADS * HEAD_DIM)
#define QKV_WIDTH (QUERY_WIDTH + 2 * KV_WIDTH)
#define PAGE 16
#define WARP 32

// A row as the host sends it.
struct Row {
    u32 slot, position, page, token;
};

#ifdef F16
// What is beyond the range of f16 becomes its largest, here and in what products leave.
__device__ __forceinline__ float in_range(float value) { return fminf(fmaxf(value, -65504.0f), 65504.0f); }

__device__ __forceinline__ float widen(bf16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return in_range(result);
}

__device__ __forceinline__ bf16 narrow(float value) {
    bf16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(in_range(value)));
    return result;
}

__device__ __forceinline__ u32 narrow2(float low, float high) { return (u32)narrow(high) << 16 | narrow(low); }
__device__ __forceinline__ float low_half(u32 pair) { return widen((bf16)pair); }
__device__ __forceinline__ float high_half(u32 pair) { return widen((bf16)(pair >> 16)); }
#else
__device__ __forceinline__ float widen(bf16 value) { return __uint_as_float((u32)value << 16); }

__device__ __forceinline__ bf16 narrow(float value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// Two values in one register, the first in the low half.
__device__ __forceinline__ u32 narrow2(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
#endif

// 2^x, the hardware's approximation.
__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// For kernels that begin before the one before them has ended (EARLY in module.rs). What they do before this writes
// nothing, and reads nothing that a kernel of the same layer writes.
__device__ __forceinline__ void await_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel after this one begin, where it is EARLY, once all blocks have said so or ended. Two such kernels may follow
// each other only if the one before them does not say so: or the second would begin before that has ended.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same sum in every thread of the block: warps by shuffles, then the warps' sums in order.
template <int THREADS>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[THREADS / WARP];
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / WARP; warp++) total += sums[warp];
    return total;
}

// Grid: rows. Enters each row's page into its slot's table.
extern "C" __global__ void bind_pages(const Row* rows, u32* tables, u32 table_width) {
    Row row = rows[blockIdx.x];
    if (threadIdx.x == 0) tables[(u64)row.slot * table_width + row.position / PAGE] = row.page;
}

// Stands for the token that the step before picked for the row's slot.
#define TOKEN_PENDING 0xffffffffu
// Picked where the logits allow no token. A row that asks for it is of no use any more.
#define TOKEN_NONE 0xfffffffeu

// Grid: rows. residual (rows, HIDDEN) f32 = table (vocab, HIDDEN) bf16 at each row's token.
extern "C" __global__ void embed(const Row* rows, const u32* kept, const bf16* table, float* residual) {
    Row row = rows[blockIdx.x];
    u32 token = row.token == TOKEN_PENDING ? kept[row.slot] : row.token;
    const bf16* from = table + (u64)(token == TOKEN_NONE ? 0 : token) * HIDDEN;
    float* to = residual + (u64)blockIdx.x * HIDDEN;
    for (int i = 2 * threadIdx.x; i < HIDDEN; i += 2 * blockDim.x) {
        u32 pair = *(const u32*)(from + i);
        *(float2*)(to + i) = make_float2(low_half(pair), high_half(pair));
    }
}

// Grid: the rows that `which` lists. Copies their residual (rows, HIDDEN) f32 and attention's output for them
// (rows, QUERY_WIDTH) bf16 to other places, one after the other.
extern "C" __global__ void take_rows(const u32* which, const float* residual, const bf16* attended, float* residual_to,
                                     bf16* attended_to) {
    u64 row = which[blockIdx.x], to = blockIdx.x;
    for (int i = 4 * threadIdx.x; i < HIDDEN; i += 4 * blockDim.x)
        *(float4*)(residual_to + to * HIDDEN + i) = *(const float4*)(residual + row * HIDDEN + i);
    for (int i = 8 * threadIdx.x; i < QUERY_WIDTH; i += 8 * blockDim.x)
        *(uint4*)(attended_to + to * QUERY_WIDTH + i) = *(const uint4*)(attended + row * QUERY_WIDTH + i);
}

#define NORM_THREADS 256
#define NORM_PARTS ((HIDDEN + 4 * NORM_THREADS - 1) / (4 * NORM_THREADS))

// Grid: rows, or the rows that `which` lists. out = x * weight / sqrt(mean x^2 + eps), rounded to bf16.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    norm_rows(const float* residual, const u32* which, const float* weight, bf16* out) {
    float4 values[NORM_PARTS], weights[NORM_PARTS];
#pragma unroll
    for (int part = 0; part < NORM_PARTS; part++) {
        int i = 4 * (part * NORM_THREADS + threadIdx.x);
        if (i < HIDDEN) weights[part] = *(const float4*)(weight + i);
    }
    await_earlier();
    u32 row = which ? which[blockIdx.x] : blockIdx.x;
    const float* from = residual + (u64)row * HIDDEN;
    bf16* to = out + (u64)blockIdx.x * HIDDEN;
    float squares = 0;
#pragma unroll
    for (int part = 0; part < NORM_PARTS; part++) {
        int i = 4 * (part * NORM_THREADS + threadIdx.x);
        if (i >= HIDDEN) continue;
        float4 x = values[part] = *(const float4*)(from + i);
        squares = fmaf(x.x, x.x, squares);
        squares = fmaf(x.y, x.y, squares);
        squares = fmaf(x.z, x.z, squares);
        squares = fmaf(x.w, x.w, squares);
    }
    float mean = block_sum<NORM_THREADS>(squares) / (float)HIDDEN;
    float scale = 1.0f / sqrtf(mean + (float)NORM_EPS);
#pragma unroll
    for (int part = 0; part < NORM_PARTS; part++) {
        int i = 4 * (part * NORM_THREADS + threadIdx.x);
        if (i >= HIDDEN) continue;
        float4 x = values[part], w = weights[part];
        uint2 packed = make_uint2(narrow2(x.x * scale * w.x, x.y * scale * w.y),
                                  narrow2(x.z * scale * w.z, x.w * scale * w.w));
        *(uint2*)(to + i) = packed;
    }
}

#define ROTATE_WARPS 4
#define ROTATE_TOGETHER 4

// Where a key or value of a row stands in pages (pages, 2, KV_HEADS, PAGE, HEAD_DIM); heads count from q's first.
__device__ __forceinline__ bf16* stored(bf16* pages, const Row& row, int head) {
    int kind = (head - HEADS) / KV_HEADS;
    int kv_head = (head - HEADS) % KV_HEADS;
    return pages + ((((u64)row.page * 2 + kind) * KV_HEADS + kv_head) * PAGE + row.position % PAGE) * HEAD_DIM;
}

#define HEADS_ALL (HEADS + 2 * KV_HEADS)

// Grid: (rows, blocks that share a row's heads); a warp takes ROTATE_TOGETHER heads at a time, a thread two neighbours of
// each half of a head. Takes qkv (rows, QKV_WIDTH) bf16 as the product left it. Adds the bias, norms the heads, rotates q and
// k. Leaves q in `query` (rows, QUERY_WIDTH) and stores k and v in their pages. Without pages, leaves all three side by side
// in `query` (rows, QKV_WIDTH).
extern "C" __global__ void __launch_bounds__(ROTATE_WARPS* WARP)
    rotate(const Row* rows, const bf16* qkv, const float* bias, const float* head_norms, const float* angles,
           bf16* query, bf16* pages) {
    const int HALF = HEAD_DIM / 2;
    const int PAIRS = (HALF + 2 * WARP - 1) / (2 * WARP);
    Row row = rows[blockIdx.x];
    const bf16* from = qkv + (u64)blockIdx.x * QKV_WIDTH;
    int lane = threadIdx.x % WARP;
    float2 cosines[PAIRS], sines[PAIRS];
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        int i = 2 * (pair * WARP + lane);
        if (i >= HALF) continue;
        const float* angle = angles + (u64)row.position * HEAD_DIM + i;
        cosines[pair] = *(const float2*)angle;
        sines[pair] = *(const float2*)(angle + HALF);
    }
    let_next_begin();
    await_earlier();
    int stride = gridDim.y * ROTATE_WARPS;
    for (int first = blockIdx.y * ROTATE_WARPS + threadIdx.x / WARP; first < HEADS_ALL; first += stride * ROTATE_TOGETHER) {
        u32 values[ROTATE_TOGETHER][PAIRS][2];
#pragma unroll
        for (int which = 0; which < ROTATE_TOGETHER; which++)
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                int head = first + which * stride, i = 2 * (pair * WARP + lane);
                if (head >= HEADS_ALL || i >= HALF) continue;
                values[which][pair][0] = *(const u32*)(from + head * HEAD_DIM + i);
                values[which][pair][1] = *(const u32*)(from + head * HEAD_DIM + i + HALF);
            }
#pragma unroll
        for (int which = 0; which < ROTATE_TOGETHER; which++) {
            int head = first + which * stride;
            if (head >= HEADS_ALL) break;
            int kind = head < HEADS ? 0 : head < HEADS + KV_HEADS ? 1 : 2; // q, k, v
            bf16* to = query + (u64)blockIdx.x * (pages ? QUERY_WIDTH : QKV_WIDTH) + head * HEAD_DIM;
            if (pages && kind > 0) to = stored(pages, row, head);
            float2 low[PAIRS], high[PAIRS];
            float squares = 0;
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                int i = 2 * (pair * WARP + lane);
                if (i >= HALF) continue;
                low[pair] = make_float2(low_half(values[which][pair][0]), high_half(values[which][pair][0]));
                high[pair] = make_float2(low_half(values[which][pair][1]), high_half(values[which][pair][1]));
                if (bias) {
                    const float* added = bias + head * HEAD_DIM + i;
                    low[pair].x += added[0];
                    low[pair].y += added[1];
                    high[pair].x += added[HALF];
                    high[pair].y += added[HALF + 1];
                }
                squares = fmaf(low[pair].x, low[pair].x, squares);
                squares = fmaf(low[pair].y, low[pair].y, squares);
                squares = fmaf(high[pair].x, high[pair].x, squares);
                squares = fmaf(high[pair].y, high[pair].y, squares);
            }
            float scale = 1;
            if (head_norms && kind < 2) scale = 1.0f / sqrtf(warp_sum(squares) / (float)HEAD_DIM + (float)NORM_EPS);
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                int i = 2 * (pair * WARP + lane);
                if (i >= HALF) continue;
                float2 a = low[pair], b = high[pair];
                if (head_norms && kind < 2) {
                    const float* norm = head_norms + kind * HEAD_DIM + i;
                    a = make_float2(a.x * scale * norm[0], a.y * scale * norm[1]);
                    b = make_float2(b.x * scale * norm[HALF], b.y * scale * norm[HALF + 1]);
                }
                if (kind < 2) {
                    float2 cosine = cosines[pair], sine = sines[pair];
                    float2 turned = make_float2(a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y);
                    b = make_float2(b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y);
                    a = turned;
                }
                *(u32*)(to + i) = narrow2(a.x, a.y);
                *(u32*)(to + i + HALF) = narrow2(b.x, b.y);
            }
        }
    }
}

// Grid: rows. Of rotated qkv (rows, QKV_WIDTH), leaves q in `query` (rows, QUERY_WIDTH) and stores k and v in their pages.
extern "C" __global__ void append(const Row* rows, const bf16* qkv, bf16* query, bf16* pages) {
    Row row = rows[blockIdx.x];
    const bf16* from = qkv + (u64)blockIdx.x * QKV_WIDTH;
    for (int i = 8 * threadIdx.x; i < QKV_WIDTH; i += 8 * blockDim.x) {
        bf16* to = i < QUERY_WIDTH ? query + (u64)blockIdx.x * QUERY_WIDTH + i
                                   : stored(pages, row, i / HEAD_DIM) + i % HEAD_DIM;
        *(uint4*)to = *(const uint4*)(from + i);
    }
}

#define ACTIVATE_THREADS 256
#define ACTIVATE_TOGETHER 2
// Blocks that a multiprocessor is to have room for. Where it has room for fewer threads than these, this is ignored.
#define ACTIVATE_BLOCKS 8

// out (rows, FEED_FORWARD) = silu(gate) * up, of both (rows, 2, FEED_FORWARD). A thread takes eight of a row at a time, and
// ACTIVATE_TOGETHER such; the grid covers all rows.
extern "C" __global__ void __launch_bounds__(ACTIVATE_THREADS, ACTIVATE_BLOCKS)
    activate(const bf16* gate_up, bf16* out, u32 rows) {
    const u32 EIGHTS = FEED_FORWARD / 8;
    u32 first = blockIdx.x * (ACTIVATE_THREADS * ACTIVATE_TOGETHER) + threadIdx.x;
    uint4 gates[ACTIVATE_TOGETHER], ups[ACTIVATE_TOGETHER];
    await_earlier();
#pragma unroll
    for (int which = 0; which < ACTIVATE_TOGETHER; which++) {
        u32 at = first + which * ACTIVATE_THREADS;
        if (at >= rows * EIGHTS) continue;
        const bf16* from = gate_up + (u64)(at / EIGHTS) * (2 * FEED_FORWARD) + at % EIGHTS * 8;
        gates[which] = *(const uint4*)from;
        ups[which] = *(const uint4*)(from + FEED_FORWARD);
    }
#pragma unroll
    for (int which = 0; which < ACTIVATE_TOGETHER; which++) {
        u32 at = first + which * ACTIVATE_THREADS;
        if (at >= rows * EIGHTS) continue;
        u32 gate[4] = {gates[which].x, gates[which].y, gates[which].z, gates[which].w};
        u32 up[4] = {ups[which].x, ups[which].y, ups[which].z, ups[which].w};
        u32 result[4];
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            float g[2] = {low_half(gate[pair]), high_half(gate[pair])};
            float u[2] = {low_half(up[pair]), high_half(up[pair])};
#pragma unroll
            for (int half = 0; half < 2; half++)
                g[half] = __fdividef(g[half], 1.0f + exp2_fast(g[half] * -1.4426950408889634f)) * u[half];
            result[pair] = narrow2(g[0], g[1]);
        }
        *(uint4*)(out + (u64)at * 8) = make_uint4(result[0], result[1], result[2], result[3]);
    }
}

#define ARGMAX_THREADS 512

// Grid: rows. The likeliest token of each row of logits (rows, VOCAB) f32, the lowest id among equals; never NaN or -inf.
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS) argmax(const float* logits, u32* tokens) {
    const float* row = logits + (u64)blockIdx.x * VOCAB;
    float best = -__int_as_float(0x7f800000);
    u32 token = 0xffffffffu;
    for (u32 i = threadIdx.x; i < VOCAB; i += ARGMAX_THREADS) {
        float logit = row[i];
        if (logit > best || (logit == best && i < token)) {
            best = logit;
            token = i;
        }
    }
    __shared__ float values[ARGMAX_THREADS / WARP];
    __shared__ u32 ids[ARGMAX_THREADS / WARP];
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(~0u, best, step);
        u32 id = __shfl_xor_sync(~0u, token, step);
        if (other > best || (other == best && id < token)) {
            best = other;
            token = id;
        }
    }
    if (threadIdx.x % WARP == 0) {
        values[threadIdx.x / WARP] = best;
        ids[threadIdx.x / WARP] = token;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < ARGMAX_THREADS / WARP; warp++)
            if (values[warp] > best || (values[warp] == best && ids[warp] < token)) {
                best = values[warp];
                token = ids[warp];
            }
        tokens[blockIdx.x] = isinf(best) && best < 0 ? TOKEN_NONE : token;
    }
}
