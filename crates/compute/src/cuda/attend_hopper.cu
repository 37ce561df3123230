// Attention of tiles with many pairs on Hopper: four warps multiply together, with a block's keys and values read from
// shared memory, where warps of their own put them. Follows attention.cu.

__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}
template <int LEFT>
__device__ __forceinline__ void group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// What the matrix units are writing is not to be moved about.
__device__ __forceinline__ void hold(float (&values)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(values[i])::"memory");
}

__device__ __forceinline__ void hold(Running& running) {
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) hold(running.out[panel]);
}
// Which four warps this is; by a shuffle, so that the compiler knows it to be the same in the whole warp.
__device__ __forceinline__ int group_of_warps() { return __shfl_sync(~0u, threadIdx.x / (4 * WARP), 0); }
__device__ __forceinline__ void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// sum (64, 64) of four warps += a (64, 16) * b (16, 64), b in a panel of shared memory: its columns stand there as
// positions, or as dimensions (TURNED).
template <int TURNED, int FRESH>
__device__ __forceinline__ void multiply_group(float (&sum)[32], const u32 (&a)[4], const bf16* b) {
    // 128 bytes a position, chunks permuted; 1,024 bytes from eight positions to the next eight.
    u64 matrix = (u64)(shared_address(b) >> 4 & 0x3fff) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]),
          "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]),
          "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]),
          "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]),
          "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix), "n"(FRESH), "n"(TURNED));
}

__device__ __forceinline__ void group_score(float (&scores)[32], const Pairs& pairs, const bf16* keys) {
    multiply_group<0, 1>(scores, pairs.query[0], keys);
#pragma unroll
    for (int step = 1; step < HEAD_DIM / 16; step++)
        multiply_group<0, 0>(scores, pairs.query[step], keys + step / 4 * PANEL + step % 4 * 16);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void group_add_values(Running& running, const u32 (&weights)[BLOCK / 16][4],
                                                 const bf16* values) {
#pragma unroll
    for (int step = 0; step < BLOCK / 16; step++)
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            multiply_group<1, 0>(running.out[panel], weights[step], values + panel * PANEL + step * 16 * 64);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#define MANY_SLOTS (2 * MANY_STAGES)
// Of a thread that fetches, and one that attends: they share what a processor has.
#define FETCH_REGISTERS 40
#define ATTEND_REGISTERS 232
// Slots under way while the next one is asked for.
#define LAG 2

// A ring of slots that one group of warps fills and the others empty.
struct Ring {
    bf16* slots;
    u64 *full, *empty;
};

__device__ __forceinline__ bf16* ring_wait(const Ring& ring, int item) {
    barrier_wait(ring.full + item % MANY_SLOTS, item / MANY_SLOTS % 2);
    return ring.slots + item % MANY_SLOTS * SLOT;
}
__device__ __forceinline__ void ring_release(const Ring& ring, int item) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(ring.empty + item % MANY_SLOTS);
}

// What a block does in a round: a unit and a key head. Units come longest first, so every other round goes backwards.
__device__ __forceinline__ int work_of(int round) {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// Fetches all that a block attends to.
template <bool SHARED>
__device__ __forceinline__ void ring_fill(const Ring& ring, const Unit* units, int work_end, const bf16* pages,
                                          const u32* tables, u32 table_width) {
    int item = 0, arrived = 0;
    auto arrive = [&]() {
        // What was copied is for the matrix units to read.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(ring.full + arrived++ % MANY_SLOTS);
    };
    for (int round = 0; work_of(round) < work_end; round++) {
        int work = work_of(round);
        Context context = context_of<SHARED>(units[work / KV_HEADS], pages, tables, table_width, work % KV_HEADS);
        for (int key = context.begin; key < context.end; key += BLOCK)
#pragma unroll
            for (int kind = 0; kind < 2; kind++, item++) {
                if (item >= MANY_SLOTS) barrier_wait(ring.empty + item % MANY_SLOTS, (item / MANY_SLOTS - 1) % 2);
                fetch<4 * WARP>(ring.slots + item % MANY_SLOTS * SLOT, context, kind, key);
                copies_commit();
                if (item >= LAG) {
                    copies_wait<LAG>();
                    arrive();
                }
            }
    }
    copies_wait<0>();
    while (arrived < item) arrive();
}

// One unit, by the groups that attend. Gives the items of the ring used so far.
template <bool SHARED>
__device__ __forceinline__ int attend_unit(const Ring& ring, int item, Unit unit, const Member* members, int kv_head,
                                           const bf16* query, const Outputs& to) {
    int2 keys = keys_of<SHARED>(unit);
    int pair = threadIdx.x / WARP * 16, group_pair = 64 * group_of_warps();
    if (!SHARED && unit.partial == NO_PARTIAL && unit.split > 0) {
        // The halves stand apart: each group has one as its own tile.
        u32 skipped = group_of_warps() * (64 / GROUP + unit.split);
        unit.first_row += skipped;
        unit.position += skipped;
        unit.rows = 64 / GROUP;
        pair -= group_pair;
        group_pair = 0;
    }
    int count = unit.rows * GROUP;
    Pairs pairs;
    load_pairs<SHARED>(pairs, query, unit, members, kv_head, pair);
    Running running, total;
    clear(running);
    clear(total);
    int blocks = max(0, (keys.y - keys.x + BLOCK - 1) / BLOCK);
    // Blocks beyond all rows of the four warps would change nothing.
    int last = group_pair < count ? last_of<SHARED>(unit, min(group_pair + 63, count - 1)) : -1;
    int own = last < keys.x ? 0 : min(blocks, (last - keys.x) / BLOCK + 1);
    int end = item + 2 * blocks;
    if (own > 0) {
        float scores[32];
        u32 weights[BLOCK / 16][4];
        const bf16* at = ring_wait(ring, item);
        group_fence();
        group_score(scores, pairs, at);
        group_wait<0>();
        hold(scores);
        ring_release(ring, item);
        soften(running, scores, pairs, keys.x);
        pack(weights, scores);
        // The scores of a block are made beside the values of the one before.
        for (int block = 1; block < own; block++, item += 2) {
            int key = keys.x + block * BLOCK;
            at = ring_wait(ring, item + 2);
            group_fence();
            group_score(scores, pairs, at);
            at = ring_wait(ring, item + 1);
            group_add_values(running, weights, at);
            group_wait<1>();
            hold(scores);
            ring_release(ring, item + 2);
            if (key % SPLIT == 0) {
                group_wait<0>();
                hold(running);
                fold(total, running);
            }
            float2 scale = soften(running, scores, pairs, key);
            group_wait<0>();
            hold(running);
            ring_release(ring, item + 1);
            rescale(running, scale);
            pack(weights, scores);
        }
        at = ring_wait(ring, item + 1);
        group_fence();
        group_add_values(running, weights, at);
        group_wait<0>();
        hold(running);
        ring_release(ring, item + 1);
        item += 2;
    }
    for (; item < end; item++) {
        ring_wait(ring, item);
        ring_release(ring, item);
    }
    store<SHARED>(total, running, unit, members, kv_head, pair, to);
    return item;
}

// Grid: as many blocks as run at a time; MANY_WARPS warps that attend, by fours, and four that fetch.
template <bool SHARED>
__device__ __forceinline__ void attend_all(const Unit* units, u32 count, const Member* members, const bf16* query,
                                           const bf16* pages, const u32* tables, u32 table_width, const Outputs& to) {
    extern __shared__ __align__(1024) bf16 shared[];
    Ring ring;
    ring.slots = shared;
    ring.full = (u64*)(shared + MANY_SLOTS * SLOT);
    ring.empty = ring.full + MANY_SLOTS;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < MANY_SLOTS; slot++) {
            barrier_init(ring.full + slot, 4 * WARP);
            barrier_init(ring.empty + slot, MANY_WARPS);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    int work_end = count * KV_HEADS;
    if (group_of_warps() == MANY_WARPS / 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCH_REGISTERS));
        ring_fill<SHARED>(ring, units, work_end, pages, tables, table_width);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(ATTEND_REGISTERS));
        int item = 0;
        for (int round = 0; work_of(round) < work_end; round++) {
            int work = work_of(round);
            Unit unit = units[work / KV_HEADS];
            item = attend_unit<SHARED>(ring, item, unit, members, work % KV_HEADS, query, to);
        }
    }
}

extern "C" __global__ void __launch_bounds__((MANY_WARPS + 4) * WARP, 1)
    attend_many(const Unit* units, u32 count, const bf16* query, const bf16* pages, const u32* tables, u32 table_width,
                bf16* attended, float* partial_out, float2* partial_sums) {
    Outputs to = {attended, {partial_out, partial_sums}};
    attend_all<false>(units, count, nullptr, query, pages, tables, table_width, to);
}

extern "C" __global__ void __launch_bounds__((MANY_WARPS + 4) * WARP, 1)
    attend_shared(const Unit* units, u32 count, const bf16* query, const bf16* pages, const u32* tables, u32 table_width,
                  const Member* members, float* partial_out, float2* partial_sums) {
    Outputs to = {nullptr, {partial_out, partial_sums}};
    attend_all<true>(units, count, members, query, pages, tables, table_width, to);
}
