// x [n, K] times the transpose of a small matrix [N, K], plus a bias: the products around the attention of a decode
// step. They take hardly longer than to begin and to end, so:
// - A block has up to 64 rows, COLUMNS columns and half of the depth, for there are too few tiles for all
//   multiprocessors. All tiles have the same number of rows: what is fetched from beyond the last row takes longer than
//   what is there. Rows that nobody fetched are multiplied too, and what comes of them is not written.
// - The two blocks of a cluster send each other sums, from registers into the other's shared memory; each adds what it
//   is sent to its own half of the columns.
// - It begins while the kernel before it runs, fetches weights ahead, and lets the next one begin.
// - Four warps multiply, one fetches.
//
// Given by the compiler's options: COLUMNS, STAGES, BIAS, BFLOAT16, SHARED_BYTES. `multiply_tile` is written by
// hopper.py.

constexpr int BLOCKS = 2, ROWS = 64, DEPTH = 64, LINE = 128;  // of a cluster; LINE: bytes of a row in a stage
constexpr int INPUT = ROWS * LINE, STAGE = INPUT + COLUMNS * LINE;
constexpr int OWN = COLUMNS / BLOCKS, EIGHTS = OWN / 8;  // columns of a block, in the end
constexpr int SUMS = OWN / 2, SENT = 128 * SUMS * 4;     // of a thread: rows g and g + 8, columns 8 i + 2 t and the next
constexpr int LINE_OUT = 2 * OWN + 16, LINES = 16 * LINE_OUT;  // bytes of a row's and of a warp's outputs, on their way
constexpr int AT_SENT = STAGES * STAGE, AT_LINES = AT_SENT + SENT, AT_FULL = AT_LINES + 4 * LINES;
constexpr int AT_EMPTY = AT_FULL + 8 * STAGES, AT_RECEIVED = AT_EMPTY + 8 * STAGES;
static_assert(AT_RECEIVED + 16 == SHARED_BYTES, "linear_cuda.py counts otherwise");

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(160, 1) linear(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, const u16* bias, char* out,
    int num_rows, int width, int all_steps, int tile_rows) {
    char* const room = shared_room();
    const u32 stages = address_of(room), full = stages + AT_FULL, empty = stages + AT_EMPTY;
    const u32 received = stages + AT_RECEIVED;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = rank_in_cluster();
    const int first_row = blockIdx.y * tile_rows, first_column = blockIdx.z * COLUMNS;
    const int first_step = rank * (all_steps / 2), num_steps = rank ? all_steps - first_step : all_steps / 2;

    if (threadIdx.x == 128) {
        let_next_kernel_begin();
        look_ahead(&weights);
        look_ahead(&inputs);
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + 8 * s, 1);
            init_barrier(empty + 8 * s, 4);
        }
        init_barrier(received, 1);
        show_barriers();
        arrive_expecting(received, SENT);
    }
    __syncthreads();
    arrive_in_cluster();

    if (warp == 4) {
        if (lane == 0) {
            auto fetch_weights = [&](int step) {
                const int s = step % STAGES;
                arrive_expecting(full + 8 * s, (tile_rows + COLUMNS) * LINE);
                fetch_2d(stages + s * STAGE + INPUT, &weights, full + 8 * s, (first_step + step) * DEPTH, first_column);
            };
            const int ahead = min(STAGES, num_steps);
            for (int step = 0; step < ahead; step++) fetch_weights(step);
            wait_for_kernel_before();
            for (int step = 0; step < num_steps; step++) {
                const int s = step % STAGES;
                if (step >= ahead) {
                    wait_at(empty + 8 * s, step / STAGES + 1 & 1);
                    fetch_weights(step);
                }
                fetch_2d(stages + s * STAGE, &inputs, full + 8 * s, (first_step + step) * DEPTH, first_row);
            }
        }
        sync_warp();
        wait_for_cluster();
    } else {
        const int g = lane / 4, t = lane % 4, own_column = first_column + rank * OWN;
        u32 biases[EIGHTS];
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const int column = own_column + 8 * i;
            biases[i] = BIAS && column < width ? *reinterpret_cast<const u32*>(bias + column + 2 * t) : 0;
        }
        float sums[COLUMNS / 2];
        for (int step = 0; step < num_steps; step++) {
            const int s = step % STAGES;
            const u32 input = stages + s * STAGE, weight = input + INPUT;
            wait_at(full + 8 * s, step / STAGES & 1);
            begin_products();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++)
                multiply_tile(sums, tile_at(input + 32 * k), tile_at(weight + 32 * k), step > 0 || k > 0);
            end_products();
            wait_for_products<1>();
            if (step > 0 && lane == 0) arrive_at(empty + 8 * ((step - 1) % STAGES), rank);
        }
        wait_for_products<0>();
        hold(sums);

        // A thread has the same rows and the same places of columns in both blocks.
        wait_for_cluster();  // the other's barriers are there
        float own[SUMS];
        const u32 place = stages + AT_SENT + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float *low = sums + i, *high = sums + SUMS + i;
            if (rank == 0)
                send(place + i * 512, received, 1, high[0], high[1], high[2], high[3]);
            else
                send(place + i * 512, received, 0, low[0], low[1], low[2], low[3]);
#pragma unroll
            for (int n = 0; n < 4; n++) own[i + n] = rank == 0 ? low[n] : high[n];
        }
        wait_at(received, 0);
        char* const lines = room + AT_LINES + warp * LINES;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const float4 others = *reinterpret_cast<const float4*>(room + AT_SENT + threadIdx.x * 16 + i * 2048);
            const float *mine = own + 4 * i, low = low_of(biases[i]), high = high_of(biases[i]);
            char* const to = lines + g * LINE_OUT + 16 * i + 4 * t;
            *reinterpret_cast<u32*>(to) = pack(mine[0] + others.x + low, mine[1] + others.y + high);
            *reinterpret_cast<u32*>(to + 8 * LINE_OUT) = pack(mine[2] + others.z + low, mine[3] + others.w + high);
        }
        sync_warp();
#pragma unroll
        for (int i = lane; i < 16 * EIGHTS; i += 32) {
            const int r = i / EIGHTS, column = i % EIGHTS * 8, of_tile = warp * 16 + r, row = first_row + of_tile;
            if (of_tile < tile_rows && row < num_rows && own_column + column < width) {
                const long long at = 2 * (static_cast<long long>(row) * width + own_column + column);
                store_piece(out + at, load_shared(lines + r * LINE_OUT + 2 * column));
            }
        }
    }
}
