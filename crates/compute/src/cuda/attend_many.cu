// Attention of tiles with many pairs, with the instructions that all devices have. Follows attention.cu.

// Grid: units * KV_HEADS; MANY_WARPS warps. A stage is a slot of keys and one of values.
template <bool SHARED>
__device__ __forceinline__ void attend_all(const Unit* units, const Member* members, const bf16* query, const bf16* pages,
                                           const u32* tables, u32 table_width, const Outputs& to) {
    extern __shared__ __align__(1024) bf16 shared[];
    Unit unit = units[blockIdx.x / KV_HEADS];
    int kv_head = blockIdx.x % KV_HEADS;
    int pair = threadIdx.x / WARP * 16, count = unit.rows * GROUP;
    Context context = context_of<SHARED>(unit, pages, tables, table_width, kv_head);
    auto fetch_stage = [&](bf16* stage, int key) {
        if (key < context.end) {
            fetch<MANY_WARPS * WARP>(stage, context, 0, key);
            fetch<MANY_WARPS * WARP>(stage + SLOT, context, 1, key);
        }
        copies_commit();
    };
#pragma unroll
    for (int stage = 0; stage < MANY_STAGES; stage++)
        fetch_stage(shared + stage * 2 * SLOT, context.begin + stage * BLOCK);
    Pairs pairs;
    load_pairs<SHARED>(pairs, query, unit, members, kv_head, pair);
    Running running, total;
    clear(running);
    clear(total);
    int last = pair < count ? last_of<SHARED>(unit, min(pair + 15, count - 1)) : -1;
    bf16* stage = shared;
    for (int key = context.begin; key < context.end; key += BLOCK) {
        if (key % SPLIT == 0) fold(total, running);
        copies_wait<MANY_STAGES - 1>();
        __syncthreads();
        // A block beyond all rows of the warp would change nothing.
        if (key <= last) {
            float scores[32];
            u32 weights[BLOCK / 16][4];
            score_block(scores, pairs, stage);
            rescale(running, soften(running, scores, pairs, key));
            pack(weights, scores);
            add_values(running, weights, stage + SLOT);
        }
        __syncthreads();
        fetch_stage(stage, key + MANY_STAGES * BLOCK);
        stage = stage == shared + (MANY_STAGES - 1) * 2 * SLOT ? shared : stage + 2 * SLOT;
    }
    store<SHARED>(total, running, unit, members, kv_head, pair, to);
}

// Hopper's kernels ask for the number of units, so it is given here too.
extern "C" __global__ void __launch_bounds__(MANY_WARPS* WARP)
    attend_many(const Unit* units, u32, const bf16* query, const bf16* pages, const u32* tables, u32 table_width,
                bf16* attended, float* partial_out, float2* partial_sums) {
    Outputs to = {attended, {partial_out, partial_sums}};
    attend_all<false>(units, nullptr, query, pages, tables, table_width, to);
}

extern "C" __global__ void __launch_bounds__(MANY_WARPS* WARP)
    attend_shared(const Unit* units, u32, const bf16* query, const bf16* pages, const u32* tables, u32 table_width,
                  const Member* members, float* partial_out, float2* partial_sums) {
    Outputs to = {nullptr, {partial_out, partial_sums}};
    attend_all<true>(units, members, query, pages, tables, table_width, to);
}
