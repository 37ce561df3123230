// Paged attention on the matrix units, for prefill and decoding alike. Follows step.cu in the same text.
//
// A *tile* is some consecutive rows of one prompt with the query heads that share a key head: rows * GROUP pairs, 16
// to a warp. Contexts are cut into splits of SPLIT positions, always at multiples of SPLIT. A warp goes through a
// split in blocks of BLOCK keys with a running maximum. So what a pair computes depends on its own position alone:
// blocks beyond it change nothing, and neither does the company in the tile. Splits are combined from first to last.
//
// `attend_many` shares keys and values among the warps of a block, for tiles of many pairs. `attend_few` gives each
// warp a unit of its own, for decoding. Both do the same arithmetic, in the same function.

#define BLOCK 32
#define SPLIT 1024
// Bytes of one key in shared memory: padded so that eight rows of 16 bytes fall into different banks.
#define KEY_STRIDE (HEAD_DIM + 8)
#define STAGE_VALUES (BLOCK * KEY_STRIDE)
#define NO_PARTIAL 0xffffffffu

// A tile and one of its splits. `partial` counts pairs of all tiles with several splits before it.
struct Unit {
    u32 first_row, rows, split, partial;
};

struct Running {
    float max[2], sum[2];       // of rows lane / 4 and lane / 4 + 8; the sum is of this lane's columns
    float out[HEAD_DIM / 8][4]; // as the matrix unit leaves them
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void copy_async(bf16* to, const bf16* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(wanted ? 16 : 0));
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;"); }
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}

__device__ __forceinline__ void load_matrices(u32 (&to)[4], const bf16* from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from)));
}
__device__ __forceinline__ void load_matrices_turned(u32 (&to)[4], const bf16* from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from)));
}
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The 16 pairs of a warp: what they ask for, and which keys they see.
struct Pairs {
    u32 query[HEAD_DIM / 16][4];
    int last[2], first[2]; // keys first..=last of rows lane / 4 and lane / 4 + 8; none where last < 0
};

__device__ __forceinline__ void load_pairs(Pairs& pairs, const Row* rows, const bf16* query, Unit unit, int kv_head,
                                           int pair) {
    int lane = threadIdx.x % WARP;
    const bf16* from[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = pair + lane / 4 + 8 * half;
        bool there = at < (int)unit.rows * GROUP;
        u32 row = unit.first_row + (there ? at / GROUP : 0);
        pairs.last[half] = there ? (int)rows[row].position : -1;
        pairs.first[half] = WINDOW > 0 ? max(0, pairs.last[half] - WINDOW + 1) : 0;
        from[half] = query + (u64)row * QUERY_WIDTH + (kv_head * GROUP + (there ? at % GROUP : 0)) * HEAD_DIM;
    }
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
#pragma unroll
        for (int part = 0; part < 4; part++)
            pairs.query[step][part] = *(const u32*)(from[part % 2] + 16 * step + 8 * (part / 2) + 2 * (lane % 4));
}

// Keys and values of BLOCK positions from `key` on, which begins a page, into a stage, by `threads` threads; positions
// from `end` on are zero.
__device__ __forceinline__ void fetch(bf16* stage, const bf16* pages, const u32* table, int kv_head, int key, int end,
                                      int thread, int threads) {
    const int CHUNKS = HEAD_DIM / 8; // of 16 bytes
#pragma unroll
    for (int page = 0; page < BLOCK / PAGE; page++) {
        int left = end - (key + page * PAGE);
        u64 place = left > 0 ? table[key / PAGE + page] : 0;
#pragma unroll
        for (int kind = 0; kind < 2; kind++) {
            const bf16* from = pages + ((place * 2 + kind) * KV_HEADS + kv_head) * (PAGE * HEAD_DIM);
            bf16* to = stage + kind * STAGE_VALUES + page * PAGE * KEY_STRIDE;
            for (int i = thread; i < PAGE * CHUNKS; i += threads) {
                int position = i / CHUNKS, chunk = i % CHUNKS;
                copy_async(to + position * KEY_STRIDE + 8 * chunk, from + 8 * i, position < left);
            }
        }
    }
}

// One block of keys: scores, running softmax, values.
__device__ __forceinline__ void attend_block(Running& running, const Pairs& pairs, const bf16* stage, int key) {
    int lane = threadIdx.x % WARP;
    const bf16* keys = stage;
    const bf16* values = stage + STAGE_VALUES;
    float scores[BLOCK / 8][4];
#pragma unroll
    for (int tile = 0; tile < BLOCK / 8; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[tile][i] = 0;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
#pragma unroll
        for (int two = 0; two < BLOCK / 16; two++) {
            u32 b[4];
            int position = 16 * two + lane / 16 * 8 + lane % 8;
            load_matrices(b, keys + position * KEY_STRIDE + 16 * step + lane / 8 % 2 * 8);
            multiply(scores[2 * two], pairs.query[step], b[0], b[1]);
            multiply(scores[2 * two + 1], pairs.query[step], b[2], b[3]);
        }
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -__int_as_float(0x7f800000);
#pragma unroll
        for (int tile = 0; tile < BLOCK / 8; tile++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int position = key + 8 * tile + 2 * (lane % 4) + i;
                bool seen = position <= pairs.last[half] && position >= pairs.first[half];
                float& score = scores[tile][2 * half + i];
                score = seen ? score * (float)SCORE_SCALE : -__int_as_float(0x7f800000);
                most = fmaxf(most, score);
            }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float max_before = running.max[half];
        float max_now = fmaxf(max_before, most);
        // Where nothing was seen yet, the maximum is -inf: any finite one does, because all weights are 0.
        float base = max_now == -__int_as_float(0x7f800000) ? 0.0f : max_now;
        scale[half] = exp2_fast(max_before - base);
        running.max[half] = max_now;
        float sum = 0;
#pragma unroll
        for (int tile = 0; tile < BLOCK / 8; tile++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& score = scores[tile][2 * half + i];
                score = exp2_fast(score - base);
                sum += score;
            }
        running.sum[half] = fmaf(running.sum[half], scale[half], sum);
    }
    // Multiplying by 1 changes no bit, so the whole warp may leave it out.
    if (__any_sync(~0u, scale[0] != 1.0f || scale[1] != 1.0f)) {
#pragma unroll
        for (int tile = 0; tile < HEAD_DIM / 8; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) running.out[tile][i] *= scale[i / 2];
    }
#pragma unroll
    for (int two = 0; two < BLOCK / 16; two++) {
        u32 weights[4] = {
            narrow2(scores[2 * two][0], scores[2 * two][1]), narrow2(scores[2 * two][2], scores[2 * two][3]),
            narrow2(scores[2 * two + 1][0], scores[2 * two + 1][1]),
            narrow2(scores[2 * two + 1][2], scores[2 * two + 1][3])};
#pragma unroll
        for (int pair = 0; pair < HEAD_DIM / 16; pair++) {
            u32 b[4];
            int position = 16 * two + lane / 8 % 2 * 8 + lane % 8;
            load_matrices_turned(b, values + position * KEY_STRIDE + 16 * pair + lane / 16 * 8);
            multiply(running.out[2 * pair], weights, b[0], b[1]);
            multiply(running.out[2 * pair + 1], weights, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void clear(Running& running) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        running.max[half] = -__int_as_float(0x7f800000);
        running.sum[half] = 0;
    }
#pragma unroll
    for (int tile = 0; tile < HEAD_DIM / 8; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) running.out[tile][i] = 0;
}

// Writes what a warp has: the output where its split is the only one, else a partial for `combine`.
__device__ __forceinline__ void store(Running& running, Unit unit, int kv_head, int pair, bf16* attended,
                                      float* partial_out, float2* partial_sums) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = running.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int at = pair + lane / 4 + 8 * half;
        if (at >= (int)unit.rows * GROUP) continue;
        if (unit.partial == NO_PARTIAL) {
            float inverse = 1.0f / sum;
            u32 row = unit.first_row + at / GROUP;
            bf16* to = attended + (u64)row * QUERY_WIDTH + (kv_head * GROUP + at % GROUP) * HEAD_DIM;
#pragma unroll
            for (int tile = 0; tile < HEAD_DIM / 8; tile++)
                *(u32*)(to + 8 * tile + 2 * (lane % 4)) =
                    narrow2(running.out[tile][2 * half] * inverse, running.out[tile][2 * half + 1] * inverse);
        } else {
            u64 place = (u64)unit.partial * KV_HEADS + (u64)kv_head * unit.rows * GROUP + at;
            if (lane % 4 == 0) partial_sums[place] = make_float2(running.max[half], sum);
#pragma unroll
            for (int tile = 0; tile < HEAD_DIM / 8; tile++)
                *(float2*)(partial_out + place * HEAD_DIM + 8 * tile + 2 * (lane % 4)) =
                    make_float2(running.out[tile][2 * half], running.out[tile][2 * half + 1]);
        }
    }
}

// First key, and the key after the last, that any row of a unit sees in its split.
__device__ __forceinline__ int2 keys_of(Unit unit, const Row* rows) {
    int begin = (int)unit.split * SPLIT;
    int end = min(begin + SPLIT, (int)rows[unit.first_row + unit.rows - 1].position + 1);
    if (WINDOW > 0) begin = max(begin, ((int)rows[unit.first_row].position - WINDOW + 1) / BLOCK * BLOCK);
    return make_int2(begin, end);
}

// Grid: (units, KV_HEADS); MANY_WARPS warps.
extern "C" __global__ void __launch_bounds__(MANY_WARPS* WARP)
    attend_many(const Unit* units, const Row* rows, const bf16* query, const bf16* pages, const u32* tables,
                u32 table_width, bf16* attended, float* partial_out, float2* partial_sums) {
    extern __shared__ __align__(16) bf16 shared[];
    Unit unit = units[blockIdx.x];
    int kv_head = blockIdx.y;
    int pair = threadIdx.x / WARP * 16;
    const u32* table = tables + (u64)rows[unit.first_row].slot * table_width;
    int2 keys = keys_of(unit, rows);
    Pairs pairs;
    load_pairs(pairs, rows, query, unit, kv_head, pair);
    Running running;
    clear(running);
    int count = unit.rows * GROUP;
    int last = pair < count ? (int)rows[unit.first_row + min(pair + 15, count - 1) / GROUP].position : -1;
    int blocks = (keys.y - keys.x + BLOCK - 1) / BLOCK;
#pragma unroll
    for (int stage = 0; stage < MANY_STAGES - 1; stage++) {
        if (stage < blocks)
            fetch(shared + stage * 2 * STAGE_VALUES, pages, table, kv_head, keys.x + stage * BLOCK, keys.y, threadIdx.x,
                  MANY_WARPS * WARP);
        copies_commit();
    }
    for (int block = 0; block < blocks; block++) {
        copies_wait<MANY_STAGES - 2>();
        __syncthreads();
        int ahead = block + MANY_STAGES - 1;
        if (ahead < blocks)
            fetch(shared + ahead % MANY_STAGES * 2 * STAGE_VALUES, pages, table, kv_head, keys.x + ahead * BLOCK, keys.y,
                  threadIdx.x, MANY_WARPS * WARP);
        copies_commit();
        // A block beyond all rows of the warp would change nothing.
        if (keys.x + block * BLOCK <= last)
            attend_block(running, pairs, shared + block % MANY_STAGES * 2 * STAGE_VALUES, keys.x + block * BLOCK);
    }
    if (pair < count) store(running, unit, kv_head, pair, attended, partial_out, partial_sums);
}

// Grid: (units / FEW_WARPS, KV_HEADS); FEW_WARPS warps with a unit of at most 16 pairs each.
extern "C" __global__ void __launch_bounds__(FEW_WARPS* WARP)
    attend_few(const Unit* units, u32 count, const Row* rows, const bf16* query, const bf16* pages, const u32* tables,
               u32 table_width, bf16* attended, float* partial_out, float2* partial_sums) {
    extern __shared__ __align__(16) bf16 shared[];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 index = blockIdx.x * FEW_WARPS + warp;
    if (index >= count) return;
    bf16* ring = shared + warp * FEW_STAGES * 2 * STAGE_VALUES;
    Unit unit = units[index];
    int kv_head = blockIdx.y;
    const u32* table = tables + (u64)rows[unit.first_row].slot * table_width;
    int2 keys = keys_of(unit, rows);
    int blocks = (keys.y - keys.x + BLOCK - 1) / BLOCK;
#pragma unroll
    for (int stage = 0; stage < FEW_STAGES; stage++) {
        if (stage < blocks)
            fetch(ring + stage * 2 * STAGE_VALUES, pages, table, kv_head, keys.x + stage * BLOCK, keys.y, lane, WARP);
        copies_commit();
    }
    Pairs pairs;
    load_pairs(pairs, rows, query, unit, kv_head, 0);
    Running running;
    clear(running);
    for (int block = 0; block < blocks; block++) {
        copies_wait<FEW_STAGES - 1>();
        __syncwarp();
        bf16* stage = ring + block % FEW_STAGES * 2 * STAGE_VALUES;
        attend_block(running, pairs, stage, keys.x + block * BLOCK);
        __syncwarp();
        int ahead = block + FEW_STAGES;
        if (ahead < blocks) fetch(stage, pages, table, kv_head, keys.x + ahead * BLOCK, keys.y, lane, WARP);
        copies_commit();
    }
    store(running, unit, kv_head, 0, attended, partial_out, partial_sums);
}

// A tile of several splits, whose partials follow each other.
struct Combined {
    u32 first_row, rows, splits, partial;
};

// Grid: (tiles, pairs of a tile at most, KV_HEADS); HEAD_DIM threads. Adds the splits up, from first to last.
extern "C" __global__ void combine(const Combined* tiles, const float* partial_out, const float2* partial_sums,
                                   bf16* attended) {
    Combined tile = tiles[blockIdx.x];
    int pair = blockIdx.y, kv_head = blockIdx.z;
    if (pair >= (int)tile.rows * GROUP) return;
    float most = -__int_as_float(0x7f800000), sum = 0, out = 0;
    for (u32 split = 0; split < tile.splits; split++) {
        u64 place = ((u64)tile.partial + (u64)split * tile.rows * GROUP) * KV_HEADS
                    + (u64)kv_head * tile.rows * GROUP + pair;
        float2 part = partial_sums[place];
        if (part.x == -__int_as_float(0x7f800000)) continue; // the row sees nothing here
        float max_now = fmaxf(most, part.x);
        float before = exp2_fast(most - max_now), here = exp2_fast(part.x - max_now);
        sum = fmaf(sum, before, part.y * here);
        out = fmaf(out, before, partial_out[place * HEAD_DIM + threadIdx.x] * here);
        most = max_now;
    }
    u32 row = tile.first_row + pair / GROUP;
    attended[(u64)row * QUERY_WIDTH + (kv_head * GROUP + pair % GROUP) * HEAD_DIM + threadIdx.x] = narrow(out * (1.0f / sum));
}
