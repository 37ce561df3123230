// Paged attention on the matrix units, for prefill and decoding alike. Follows step.cu in the same text.
//
// A *tile* is some consecutive rows of one prompt with the query heads that share a key head: rows * GROUP pairs, 16
// to a warp. Contexts are cut into splits of SPLIT positions, always at multiples of SPLIT. A warp goes through a
// split in blocks of BLOCK keys with a running maximum, and splits are folded together from first to last. So what a
// pair computes depends on its own position alone: blocks beyond it change nothing, neither does the company in the
// tile, nor whether a tile's splits are handled one after the other or each for itself.
//
// `attend_few` is one warp, for decoding. `attend_many` shares keys and values among the warps of a block, for tiles of
// many pairs; it exists twice, in attend_many.cu for all devices and in attend_hopper.cu. All of them do the same
// arithmetic in the same order, and Hopper's two ways to multiply matrices give the same bits.
//
// Rows of different prompts whose contexts begin with the same pages attend to these together: `attend_shared` is
// `attend_many` (with SHARED) for tiles of such rows. It leaves what each pair has of a split, or of a split's first
// blocks; there the row's own unit goes on.

#define BLOCK 64
#define SPLIT 1024
#define NO_PARTIAL 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

// A block's keys, or its values, are panels of 64 dimensions in shared memory. A position of a panel is 128 bytes,
// whose 16-byte chunks are permuted by the position, so that eight positions at one dimension fall into different banks.
#define PANELS ((HEAD_DIM + 63) / 64)
#define PANEL (BLOCK * 64)
#define SLOT (PANELS * PANEL)

// A tile, and one of its splits; then `partial` counts pairs of all splits before it. All of them where `partial` is
// NO_PARTIAL. Then `split` counts the prompt's rows between the tile's two halves, which need not stand together (in
// attend_hopper.cu alone; they do where it is 0). The keys before `begin` are shared: their splits are units of others,
// and what there is of the split that `begin` falls into stands where this unit's partials will. Where `settled` is not 0,
// this step stores nothing in the blocks that `attend_few` fetches first. A shared unit has members instead of rows, all
// of which see the keys up to `position`.
struct Unit {
    u32 first_row, rows, slot, position, split, partial, begin, settled;
};

// A row of a shared unit, and the partials before its own.
struct Member {
    u32 row, partial;
};

struct Running {
    float max[2], sum[2];  // of rows lane / 4 and lane / 4 + 8; the sum is of this lane's columns
    float out[PANELS][32]; // as the matrix units leave them
};

// The 16 pairs of a warp: what they ask for, and which keys they see.
struct Pairs {
    u32 query[HEAD_DIM / 16][4];
    int last[2], first[2];   // keys first..=last of rows lane / 4 and lane / 4 + 8
    int all_last, all_first; // keys that all of them see
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Where 8 dimensions of a position stand in a slot.
__device__ __forceinline__ int place_of(int position, int chunk) {
    return chunk / 8 * PANEL + position * 64 + (chunk % 8 ^ position % 8) * 8;
}

#ifdef F16
// With the instructions of compute capability 7.5: copies that are awaited, products of half the depth.
__device__ __forceinline__ void copy_async(bf16* to, const bf16* from, bool wanted) {
    *(uint4*)to = wanted ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void copies_commit() {}
template <int LEFT>
__device__ __forceinline__ void copies_wait() {}

__device__ __forceinline__ void multiply_half(float* sum, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void multiply(float* sum, const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_half(sum, a[0], a[1], b0);
    multiply_half(sum, a[2], a[3], b1);
}
#else
__device__ __forceinline__ void copy_async(bf16* to, const bf16* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void multiply(float* sum, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

__device__ __forceinline__ void load_matrices(u32 (&to)[4], const bf16* from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&to)[4], const bf16* from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
}

// The last key that a pair of a unit sees.
template <bool SHARED>
__device__ __forceinline__ int last_of(const Unit& unit, int pair) {
    return (int)unit.position + (SHARED ? 0 : pair / GROUP);
}

template <bool SHARED>
__device__ __forceinline__ void load_pairs(Pairs& pairs, const bf16* query, const Unit& unit, const Member* members,
                                           int kv_head, int pair) {
    int lane = threadIdx.x % WARP;
    int end = (int)unit.rows * GROUP - 1;
    const bf16* from[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = min(pair + lane / 4 + 8 * half, end); // a pair too many does as the last one
        pairs.last[half] = last_of<SHARED>(unit, at);
        pairs.first[half] = pairs.last[half] - WINDOW + 1;
        u32 row = unit.first_row + at / GROUP;
        if (SHARED) row = members[row].row;
        from[half] = query + (u64)row * QUERY_WIDTH + (kv_head * GROUP + at % GROUP) * HEAD_DIM;
    }
    pairs.all_last = last_of<SHARED>(unit, min(pair, end));
    pairs.all_first = last_of<SHARED>(unit, min(pair + 15, end)) - WINDOW + 1;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
#pragma unroll
        for (int part = 0; part < 4; part++)
            pairs.query[step][part] = *(const u32*)(from[part % 2] + 16 * step + 8 * (part / 2) + 2 * (lane % 4));
}

// Where a context's keys and values stand. Each lane of a warp knows one of 32 pages, and one of the 32 after.
struct Context {
    const bf16* pages;
    const u32* table;
    int kv_head, begin, end; // keys begin..end
    u32 now, next;
};

__device__ __forceinline__ u32 page_at(const Context& context, int index) {
    return index * PAGE < context.end ? context.table[index] : 0;
}

// First key, and the key after the last, that any row of a unit attends to.
template <bool SHARED>
__device__ __forceinline__ int2 keys_of(const Unit& unit) {
    bool whole = unit.partial == NO_PARTIAL;
    int begin = whole ? 0 : (int)unit.split * SPLIT;
    int end = (int)(unit.position + (SHARED ? 1 : unit.rows + (whole ? unit.split : 0)));
    if (!whole) end = min(end, begin + SPLIT);
    if (!SHARED) begin = max(begin, (int)unit.begin);
    if (WINDOW > 0) begin = max(begin, ((int)unit.position - WINDOW + 1) / BLOCK * BLOCK);
    return make_int2(begin, end);
}

template <bool SHARED>
__device__ __forceinline__ Context context_of(const Unit& unit, const bf16* pages, const u32* tables, u32 table_width,
                                              int kv_head) {
    Context context;
    context.pages = pages;
    context.table = tables + (u64)unit.slot * table_width;
    context.kv_head = kv_head;
    int2 keys = keys_of<SHARED>(unit);
    context.begin = keys.x;
    context.end = keys.y;
    int index = context.begin / (PAGE * WARP) * WARP + threadIdx.x % WARP;
    context.now = page_at(context, index);
    context.next = page_at(context, index + WARP);
    return context;
}

// Keys (kind 0) or values (1) of BLOCK positions from `key` on into a slot, by THREADS threads; positions beyond the
// context are zero. Blocks come in order, and of each its keys before its values.
template <int THREADS>
__device__ __forceinline__ void fetch(bf16* slot, Context& context, int kind, int key) {
    const int CHUNKS = HEAD_DIM / 8;
    if (kind == 0 && key % (PAGE * WARP) == 0 && key > context.begin) {
        context.now = context.next;
        context.next = page_at(context, key / PAGE + WARP + threadIdx.x % WARP);
    }
    int thread = threadIdx.x % THREADS;
#pragma unroll
    for (int page = 0; page < BLOCK / PAGE; page++) {
        u64 place = __shfl_sync(~0u, context.now, (key / PAGE + page) % WARP);
        int left = context.end - (key + page * PAGE);
        const bf16* from = context.pages + ((place * 2 + kind) * KV_HEADS + context.kv_head) * (PAGE * HEAD_DIM);
#pragma unroll
        for (int i = thread; i < PAGE * CHUNKS; i += THREADS)
            copy_async(slot + place_of(page * PAGE + i / CHUNKS, i % CHUNKS), from + 8 * i, i / CHUNKS < left);
    }
}

__device__ __forceinline__ void clear(Running& running) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        running.max[half] = -INFINITE;
        running.sum[half] = 0;
    }
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 32; i++) running.out[panel][i] = 0;
}

__device__ __forceinline__ void score_block(float (&scores)[32], const Pairs& pairs, const bf16* keys) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] = 0;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
#pragma unroll
        for (int two = 0; two < BLOCK / 16; two++) {
            u32 b[4];
            load_matrices(b, keys + place_of(16 * two + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
            multiply(scores + 8 * two, pairs.query[step], b[0], b[1]);
            multiply(scores + 8 * two + 4, pairs.query[step], b[2], b[3]);
        }
}

// Turns the scores of the block at `key` into weights. Gives the factors for what was added up before.
__device__ __forceinline__ float2 soften(Running& running, float (&scores)[32], const Pairs& pairs, int key) {
    int lane = threadIdx.x % WARP;
    float scale[2];
    if (key + BLOCK - 1 > pairs.all_last || (WINDOW > 0 && key < pairs.all_first)) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int position = key + i / 4 * 8 + 2 * (lane % 4) + i % 2, half = i / 2 % 2;
            bool seen = position <= pairs.last[half] && (WINDOW == 0 || position >= pairs.first[half]);
            scores[i] = seen ? scores[i] : -INFINITE;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -INFINITE;
#pragma unroll
        for (int i = 0; i < 16; i++) most = fmaxf(most, scores[i / 2 * 4 + 2 * half + i % 2]);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        most = fmaxf(most, running.max[half]);
        // Where nothing was seen yet, the maximum is -inf: any finite one does, because all weights are 0.
        float base = most == -INFINITE ? 0.0f : most;
        scale[half] = exp2_fast((running.max[half] - base) * (float)SCORE_SCALE);
        running.max[half] = most;
        base *= -(float)SCORE_SCALE;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float& score = scores[i / 2 * 4 + 2 * half + i % 2];
            score = exp2_fast(fmaf(score, (float)SCORE_SCALE, base));
            sum += score;
        }
        running.sum[half] = fmaf(running.sum[half], scale[half], sum);
    }
    return make_float2(scale[0], scale[1]);
}

// Multiplying by 1 changes no bit, so the whole warp may leave it out.
__device__ __forceinline__ void rescale(Running& running, float2 scale) {
    if (__any_sync(~0u, scale.x != 1.0f || scale.y != 1.0f)) {
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
            for (int i = 0; i < 32; i++) running.out[panel][i] *= i % 4 < 2 ? scale.x : scale.y;
    }
}

__device__ __forceinline__ void pack(u32 (&weights)[BLOCK / 16][4], const float (&scores)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++) weights[i / 4][i % 4] = narrow2(scores[2 * i], scores[2 * i + 1]);
}

__device__ __forceinline__ void add_values(Running& running, const u32 (&weights)[BLOCK / 16][4], const bf16* values) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int two = 0; two < BLOCK / 16; two++)
#pragma unroll
        for (int pair = 0; pair < HEAD_DIM / 16; pair++) {
            u32 b[4];
            load_matrices_turned(b, values + place_of(16 * two + lane / 8 % 2 * 8 + lane % 8, 2 * pair + lane / 16));
            float* out = running.out[pair / 4] + pair % 4 * 8;
            multiply(out, weights[two], b[0], b[1]);
            multiply(out + 4, weights[two], b[2], b[3]);
        }
}

// What a total with one maximum and a part with another are multiplied by when they are added.
__device__ __forceinline__ float2 fold_weights(float total, float part) {
    float most = fmaxf(total, part);
    return make_float2(total == -INFINITE ? 0.0f : exp2_fast((total - most) * (float)SCORE_SCALE),
                       part == -INFINITE ? 0.0f : exp2_fast((part - most) * (float)SCORE_SCALE));
}

__device__ __forceinline__ float sum_of(const Running& running, int half) {
    float sum = running.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Adds a split to those before it, and clears it for the next.
__device__ __forceinline__ void fold(Running& total, Running& running) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 by = fold_weights(total.max[half], running.max[half]);
        // A total's sum is of all columns.
        total.sum[half] = fmaf(total.sum[half], by.x, sum_of(running, half) * by.y);
        total.max[half] = fmaxf(total.max[half], running.max[half]);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
            for (int i = 0; i < 16; i++) {
                int at = i / 2 * 4 + 2 * half + i % 2;
                total.out[panel][at] = fmaf(total.out[panel][at], by.x, running.out[panel][at] * by.y);
            }
    }
    clear(running);
}

// For each pair of a split: what was added up, and of each of the four lanes the maximum with its sum.
struct Partials {
    float* out;
    float2* sums;
};
struct Outputs {
    bf16* attended;
    Partials partials;
};

// Where a pair of a unit has its partials.
template <bool SHARED>
__device__ __forceinline__ u64 partial_of(const Unit& unit, const Member* members, int kv_head, int pair) {
    if (!SHARED) return (u64)unit.partial * KV_HEADS + (u64)kv_head * unit.rows * GROUP + pair;
    u32 partial = members[unit.first_row + pair / GROUP].partial + unit.split * GROUP;
    return (u64)partial * KV_HEADS + kv_head * GROUP + pair % GROUP;
}

// What a unit's pairs have of the split that it begins in the midst of.
__device__ __forceinline__ void inherit(Running& running, const Unit& unit, int kv_head, const Partials& partials) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = min(lane / 4 + 8 * half, (int)unit.rows * GROUP - 1);
        u64 place = partial_of<false>(unit, nullptr, kv_head, at);
        float2 sum = partials.sums[4 * place + lane % 4];
        running.max[half] = sum.x;
        running.sum[half] = sum.y;
#pragma unroll
        for (int tile = 0; tile < HEAD_DIM / 8; tile++) {
            float2 out = *(const float2*)(partials.out + place * HEAD_DIM + 8 * tile + 2 * (lane % 4));
            running.out[tile / 8][tile % 8 * 4 + 2 * half] = out.x;
            running.out[tile / 8][tile % 8 * 4 + 2 * half + 1] = out.y;
        }
    }
}

// Writes what a warp has of a whole tile.
__device__ __forceinline__ void store_whole(const Running& total, const Unit& unit, int kv_head, int pair, bf16* attended) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = pair + lane / 4 + 8 * half;
        if (at >= (int)unit.rows * GROUP) continue;
        float inverse = 1.0f / total.sum[half];
        u32 row = unit.first_row + at / GROUP;
        bf16* to = attended + (u64)row * QUERY_WIDTH + (kv_head * GROUP + at % GROUP) * HEAD_DIM;
#pragma unroll
        for (int tile = 0; tile < HEAD_DIM / 8; tile++) {
            const float* out = total.out[tile / 8] + tile % 8 * 4 + 2 * half;
            *(u32*)(to + 8 * tile + 2 * (lane % 4)) = narrow2(out[0] * inverse, out[1] * inverse);
        }
    }
}

// Writes what a warp has of a split, for `combine` or whoever goes on with it.
template <bool SHARED>
__device__ __forceinline__ void store_partial(const Running& running, const Unit& unit, const Member* members, int kv_head,
                                              int pair, const Partials& partials) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = pair + lane / 4 + 8 * half;
        if (at >= (int)unit.rows * GROUP) continue;
        u64 place = partial_of<SHARED>(unit, members, kv_head, at);
        partials.sums[4 * place + lane % 4] = make_float2(running.max[half], running.sum[half]);
#pragma unroll
        for (int tile = 0; tile < HEAD_DIM / 8; tile++) {
            const float* out = running.out[tile / 8] + tile % 8 * 4 + 2 * half;
            *(float2*)(partials.out + place * HEAD_DIM + 8 * tile + 2 * (lane % 4)) = make_float2(out[0], out[1]);
        }
    }
}

// Ends a unit.
template <bool SHARED>
__device__ __forceinline__ void store(Running& total, Running& running, const Unit& unit, const Member* members, int kv_head,
                                      int pair, const Outputs& to) {
    if (SHARED || unit.partial != NO_PARTIAL) {
        store_partial<SHARED>(running, unit, members, kv_head, pair, to.partials);
    } else {
        fold(total, running);
        store_whole(total, unit, kv_head, pair, to.attended);
    }
}

// Where FEW_KEPT is 1, what a warp has of the splits before stands in shared memory: it is needed seldom, and registers
// are few.
__device__ __forceinline__ void set_aside(float* kept, const Running& total) {
#pragma unroll
    for (int i = 0; i < FEW_KEPT * PANELS * 32; i++) kept[i * WARP + threadIdx.x] = total.out[i / 32][i % 32];
}
__device__ __forceinline__ void recall(Running& total, const float* kept) {
#pragma unroll
    for (int i = 0; i < FEW_KEPT * PANELS * 32; i++) total.out[i / 32][i % 32] = kept[i * WARP + threadIdx.x];
}

// Grid: units * KV_HEADS; one warp, with at most 16 pairs. The ring's slots hold keys and values in turn.
extern "C" __global__ void __launch_bounds__(WARP)
    attend_few(const Unit* units, const bf16* query, const bf16* pages, const u32* tables, u32 table_width,
               bf16* attended, float* partial_out, float2* partial_sums) {
    extern __shared__ __align__(1024) bf16 shared[];
    Unit unit = units[blockIdx.x / KV_HEADS];
    int kv_head = blockIdx.x % KV_HEADS;
    Context context = context_of<false>(unit, pages, tables, table_width, kv_head);
    float* kept = (float*)(shared + FEW_SLOTS * SLOT);
    Running running, total;
    clear(running);
    clear(total);
    set_aside(kept, total);
    let_next_begin();
    int ahead = 0; // slots fetched or left out
    auto fetch_next = [&](bf16* slot) {
        int key = context.begin + ahead / 2 * BLOCK;
        if (key < context.end) fetch<WARP>(slot, context, ahead % 2, key);
        copies_commit();
        ahead++;
    };
    // The first blocks need not wait for what this step stores elsewhere. Those of a window begin later.
    bool settled = WINDOW == 0 && unit.settled;
    if (!settled) await_earlier();
#pragma unroll
    for (int slot = 0; slot < FEW_SLOTS; slot++) fetch_next(shared + slot * SLOT);
    if (settled) await_earlier();
    Pairs pairs;
    load_pairs<false>(pairs, query, unit, nullptr, kv_head, 0);
    Partials partials = {partial_out, partial_sums};
    if (unit.begin > unit.split * SPLIT) inherit(running, unit, kv_head, partials);
    bf16* slot = shared;
    auto turn = [&]() {
        __syncwarp();
        fetch_next(slot);
        slot = slot == shared + (FEW_SLOTS - 1) * SLOT ? shared : slot + SLOT;
    };
    for (int key = context.begin; key < context.end; key += BLOCK) {
        if (key % SPLIT == 0 && key > context.begin) {
            recall(total, kept);
            fold(total, running);
            set_aside(kept, total);
        }
        float scores[32];
        copies_wait<FEW_SLOTS - 1>();
        __syncwarp();
        score_block(scores, pairs, slot);
        turn();
        rescale(running, soften(running, scores, pairs, key));
        u32 weights[BLOCK / 16][4];
        pack(weights, scores);
        copies_wait<FEW_SLOTS - 1>();
        __syncwarp();
        add_values(running, weights, slot);
        turn();
    }
    recall(total, kept);
    store<false>(total, running, unit, nullptr, kv_head, 0, Outputs{attended, partials});
}

// A tile whose splits were handled each for itself; their partials follow each other.
struct Combined {
    u32 first_row, rows, splits, partial;
};

#define COMBINE_WARPS 8

// Grid: (tiles, KV_HEADS). Folds a tile's splits together, from first to last; a warp takes a pair at a time.
extern "C" __global__ void __launch_bounds__(COMBINE_WARPS* WARP)
    combine(const Combined* tiles, const float* partial_out, const float2* partial_sums, bf16* attended) {
    Combined tile = tiles[blockIdx.x];
    await_earlier();
    int kv_head = blockIdx.y, pairs = tile.rows * GROUP;
    for (int pair = threadIdx.x / WARP; pair < pairs; pair += COMBINE_WARPS)
        for (int dim = threadIdx.x % WARP * 4; dim < HEAD_DIM; dim += WARP * 4) {
            float most = -INFINITE, sum = 0;
            float4 out = make_float4(0, 0, 0, 0);
#pragma unroll 4
            for (u32 split = 0; split < tile.splits; split++) {
                u64 place = ((u64)tile.partial + (u64)split * pairs) * KV_HEADS + (u64)kv_head * pairs + pair;
                float4 low = *(const float4*)(partial_sums + 4 * place), high = *(const float4*)(partial_sums + 4 * place + 2);
                // As `sum_of` adds them.
                float2 part = make_float2(low.x, (low.y + low.w) + (high.y + high.w));
                float4 here = *(const float4*)(partial_out + place * HEAD_DIM + dim);
                float2 by = fold_weights(most, part.x);
                most = fmaxf(most, part.x);
                sum = fmaf(sum, by.x, part.y * by.y);
                out.x = fmaf(out.x, by.x, here.x * by.y);
                out.y = fmaf(out.y, by.x, here.y * by.y);
                out.z = fmaf(out.z, by.x, here.z * by.y);
                out.w = fmaf(out.w, by.x, here.w * by.y);
            }
            float inverse = 1.0f / sum;
            u32 row = tile.first_row + pair / GROUP;
            bf16* to = attended + (u64)row * QUERY_WIDTH + (kv_head * GROUP + pair % GROUP) * HEAD_DIM + dim;
            *(uint2*)to = make_uint2(narrow2(out.x * inverse, out.y * inverse), narrow2(out.z * inverse, out.w * inverse));
        }
}
