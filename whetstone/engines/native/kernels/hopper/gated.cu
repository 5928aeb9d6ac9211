// The first half of an MLP for up to a thousand rows: act(x gates^T) * (x values^T), one kernel instead of a product
// and a gate. x is [n, K]; the weight [2 I, K] has the rows of gates and then those of values.
//
// The library's products are made for all shapes; here a tile has just as many columns that every multiprocessor has
// the same number of them (2 * 8,960 columns are 132 times 136), and nothing but the result is written.
// - Two blocks are a cluster: each fetches half of the rows' numbers for both. Only as many rows are fetched as there
//   are, for what lies beyond the last takes longer; what is made of the others is not written.
// - There are as many blocks as multiprocessors; they take one tile after the other, and the next one's numbers are
//   fetched while outputs of the last are made.
// - Four warps fetch (one thread of them does), eight multiply: two groups of four, each with half of the rows.
// - A tile's columns are fours of gates and fours of values in turn, as the tensor map fetches them, so that two
//   lanes have what makes an output. It is rounded wherever transformers rounds.
// - The first weights are asked for while the kernel before, which makes x, still runs.
//
// Given by the compiler's options: ROWS of a tile (128 or 256), COLUMNS (a multiple of 8), STAGES, GELU, BFLOAT16,
// SHARED_BYTES. `multiply_tile` is written by hopper.py, since the number of its registers is in its name.

constexpr int BLOCKS = 2, GROUPS = 2;      // of a cluster; of four warps that multiply
constexpr int DEPTH = 64, LINE = 128;      // numbers of a row in a stage, and their bytes
constexpr int PARTS = ROWS / 64 / GROUPS;  // of 64 rows, of a group
constexpr int INPUT = ROWS * LINE, STAGE = INPUT + COLUMNS * LINE;
constexpr int SUMS = COLUMNS / 2;          // of a lane and a part: rows g and g + 8, columns 8 i + 2 t, 8 i + 2 t + 1
constexpr int EIGHTS = COLUMNS / 8, PASSES = 2, IN_PASS = (EIGHTS + 1) / PASSES;  // outputs are written in passes
constexpr int LINE_OUT = 8 * IN_PASS, LINES = 16 * LINE_OUT;  // bytes of a row's and of a warp's, on their way
constexpr int AT_LINES = STAGES * STAGE, AT_FULL = AT_LINES + 4 * GROUPS * LINES, AT_EMPTY = AT_FULL + 8 * STAGES;
static_assert(AT_EMPTY + 8 * STAGES == SHARED_BYTES, "gated_cuda.py counts otherwise");
static_assert(STAGE % 1024 == 0, "tiles begin at multiples of eight rows");

__device__ __forceinline__ float activated(float gate) {
    constexpr float LOG2E = 1.4426950408889634f;
#if GELU
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return gate * reciprocal(1 + power(-2 * LOG2E * inner));
#else
    return gate * reciprocal(1 + power(-LOG2E * gate));
#endif
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(128 * (1 + GROUPS), 1) gate_up(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, char* out, int num_rows,
    int width, int num_steps, int half_rows) {
    char* const room = shared_room();
    const u32 stages = address_of(room), full = stages + AT_FULL, empty = stages + AT_EMPTY;
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128 - 1, rank = rank_in_cluster();

    // A cluster's tiles, all rows of some columns before others; each has COLUMNS for every block of it.
    const int row_tiles = (num_rows + ROWS - 1) / ROWS;
    const int num_tiles = row_tiles * ((width + COLUMNS - 1) / COLUMNS);
    const int first_tile = blockIdx.x / BLOCKS, next_tile = gridDim.x / BLOCKS;
    auto first_row = [&](int tile) { return tile % row_tiles * ROWS; };
    auto first_eight = [&](int tile) { return (tile / row_tiles * BLOCKS + rank) * EIGHTS; };

    if (threadIdx.x == 0) {
        look_ahead(&weights);
        look_ahead(&inputs);
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + 8 * s, 1);
            init_barrier(empty + 8 * s, BLOCKS * GROUPS * 4);
        }
        show_barriers();
    }
    arrive_in_cluster();
    wait_for_cluster();

    int stage = 0, turn = 0;  // of the steps of all tiles
    auto go_on = [&]() {
        if (++stage == STAGES) stage = 0, turn ^= 1;
    };
    if (group < 0) {
        give_registers<24>();
        if (threadIdx.x == 0) {
            const int half = rank * half_rows;
            bool waited = false;
            for (int tile = first_tile; tile < num_tiles; tile += next_tile)
                for (int step = 0; step < num_steps; step++, go_on()) {
                    const u32 to = stages + stage * STAGE, barrier = full + 8 * stage;
                    wait_at(empty + 8 * stage, turn ^ 1);
                    arrive_expecting(barrier, (BLOCKS * half_rows + COLUMNS) * LINE);
                    fetch_4d(to + INPUT, &weights, barrier, step * DEPTH, first_eight(tile));
                    if (!waited) wait_for_kernel_before();
                    waited = true;
                    fetch_2d(to + half * LINE, &inputs, barrier, step * DEPTH, first_row(tile) + half,
                             (1 << BLOCKS) - 1);
                }
        }
        sync_warp();
    } else {
        take_registers<240>();
        const int g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
        char* const lines = room + AT_LINES + (group * 4 + warp) * LINES;
        float sums[PARTS][SUMS];
        auto free_stage = [&](int which) {
            if (lane < BLOCKS) arrive_at(empty + 8 * which, lane);
        };
        for (int tile = first_tile; tile < num_tiles; tile += next_tile) {
            int before = 0;  // the stage of the step before
            for (int step = 0; step < num_steps; step++, go_on()) {
                wait_at(full + 8 * stage, turn);
                begin_products();
                const u32 input = stages + stage * STAGE + group * PARTS * 64 * LINE;
                const u32 weight = stages + stage * STAGE + INPUT;
#pragma unroll
                for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
                    for (int n = 0; n < PARTS; n++)
                        multiply_tile(sums[n], tile_at(input + n * 64 * LINE + 32 * k), tile_at(weight + 32 * k),
                                      step > 0 || k > 0);
                end_products();
                wait_for_products<1>();
                if (step > 0) free_stage(before);
                before = stage;
            }
            wait_for_products<0>();
            free_stage(before);
#pragma unroll
            for (int n = 0; n < PARTS; n++) hold(sums[n]);

            // Lanes t = 0 and 1 have gates, 2 and 3 values: the former make outputs of row g, the latter of g + 8.
            const bool has_gates = t < 2;
            char* const to = lines + (has_gates ? g : g + 8) * LINE_OUT + (t & 1) * 4;
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
                    for (int i = pass * IN_PASS; i < min(EIGHTS, (pass + 1) * IN_PASS); i++) {
                        const float* mine = sums[n] + 4 * i;
                        const u32 upper = pack(mine[0], mine[1]), lower = pack(mine[2], mine[3]);
                        const u32 others = __shfl_xor_sync(ALL, has_gates ? lower : upper, 2);
                        const u32 gates = has_gates ? upper : others, values = has_gates ? others : lower;
                        const u32 act = pack(activated(low_of(gates)), activated(high_of(gates)));
                        *reinterpret_cast<u32*>(to + 8 * (i - pass * IN_PASS)) = multiply_pairs(act, values);
                    }
                    sync_warp();
                    // Out of the lines: a lane takes four outputs at a time.
                    constexpr int COPIES = (16 * IN_PASS + 31) / 32;
                    u64 copied[COPIES];
#pragma unroll
                    for (int i = 0; i < COPIES; i++)
                        copied[i] = *reinterpret_cast<const u64*>(lines + 8 * min(32 * i + lane, 16 * IN_PASS - 1));
                    sync_warp();
                    const int row = first_row(tile) + (group * PARTS + n) * 64 + warp * 16;
                    const int column = 4 * (first_eight(tile) + pass * IN_PASS);
                    const int rows = min(16, num_rows - row);
                    const int fours = min(min(IN_PASS, EIGHTS - pass * IN_PASS), (width - column) / 4);
                    char* const place = out + 2 * (static_cast<long long>(row) * width + column);
#pragma unroll
                    for (int i = 0; i < COPIES; i++) {
                        const int r = (32 * i + lane) / IN_PASS, four = (32 * i + lane) % IN_PASS;
                        if (r < rows && four < fours)
                            *reinterpret_cast<u64*>(place + 2 * (r * width + 4 * four)) = copied[i];
                    }
                }
        }
    }
    arrive_in_cluster();
    wait_for_cluster();  // the other may still tell this block that a stage is empty
}
