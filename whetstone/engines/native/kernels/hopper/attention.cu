// One new token per row against the pages of its slot, for many rows: rotary embedding, cache write and attention.
//
// What attention.py does in Triton, for half precision and heads of 64 or 128, written for the memory's speed:
// - A block has two rows and one head of keys and values. If the rows share a prompt (samples of a group do), the
//   prompt's pages come into shared memory once for both, instead of once a row out of the chip's cache.
// - Two warps have a row, and each of them half of every page: 32 tokens, copied into its own room in shared memory
//   without going through registers (loads into registers hold up whatever a warp does after them). A warp waits
//   for its own copies alone, and asks for the next keys before it multiplies with the values. The two are merged
//   at the end.
// - Half of the blocks begin with the prompt, half with the row's own tokens, so that memory is busy all the time.
// A row's sums are in the same order whether its prompt is shared or not, so its rounding does not depend on its
// neighbours.
//
// Fragments: lane (g, t) = (lane / 4, lane % 4). Scores are Q K^T with queries as rows (8 of 16 are used) and
// tokens as columns; outputs are V^T P^T with 16 places of a head as rows and queries as columns. The order of
// places within a product is free, so it is chosen to make loads of 16 bytes: 8 places of one token.

// Given by the compiler's options: WIDTH (of a head), GROUP (queries for a head of keys and values), KV_HEADS,
// BFLOAT16, ROTARY, NORM, SHARED_BYTES.
constexpr int ROWS = 2, WAYS = 2, WARPS = WAYS * ROWS, THREADS = 32 * WARPS;
constexpr int PAGE = 64, CHUNK = PAGE / WAYS;  // tokens of a page, and of a warp's part of it
constexpr int TURNS = CHUNK / 16;              // a fragment has 16 tokens
constexpr int QUERIES = 8;                     // of a row, GROUP of them real
constexpr int STAGES = 1;  // pages of a shared prompt at a time; with more, a multiprocessor has no room for two blocks
constexpr int BYTES = 2 * WIDTH, PIECES = WIDTH / 8;
constexpr int BLOCKS = WIDTH / 32, HALVES = WIDTH / 64;
constexpr int STAGE = 2 * PAGE * BYTES, OUT_ROW = WIDTH + 8;
constexpr int ROOM = 2 * CHUNK * BYTES;  // of a warp, for its keys and values, at the end for its outputs
static_assert(ROOM >= QUERIES * OUT_ROW * 4, "outputs need more room than tokens");
constexpr int AT_ROOMS = STAGES * STAGE, AT_QUERIES = AT_ROOMS + WARPS * ROOM;
constexpr int AT_KEY = AT_QUERIES + ROWS * QUERIES * BYTES;
constexpr int AT_VALUE = AT_KEY + ROWS * BYTES;
constexpr int AT_NEW = AT_VALUE + ROWS * BYTES;
constexpr int AT_HIGHEST = AT_NEW + ROWS * QUERIES * 4;
constexpr int AT_TOTAL = AT_HIGHEST + WARPS * QUERIES * 4;
constexpr int SHARED = AT_TOTAL + WARPS * QUERIES * 4;
static_assert(SHARED == SHARED_BYTES, "attention_cuda.py counts otherwise");

constexpr int ACTIVE = 0, PREFIX = 1, OWN = 2;  // as in layout.py

// Where pieces lie in shared memory, so that eight lanes that read at the same time read from all banks.
__device__ __forceinline__ int key_place(int token, int piece) {
    return token * BYTES + ((piece ^ ((token & 1) << 2)) << 4);
}
__device__ __forceinline__ int value_place(int token, int piece) {
    return token * BYTES + ((piece ^ (((token >> 1) & 3) << 1)) << 4);
}

// Of a piece of queries, whose middle words are exchanged.
__device__ __forceinline__ int word_of(int word) { return word == 1 ? 2 : word == 2 ? 1 : word; }

// A warp's running sums: lane (g, t) has the highest score and (a part of) the total of query g, and the outputs of
// queries 2t and 2t + 1 in the places that are rows of its fragments.
struct Sums {
    float highest, total;
    float out[HALVES][4][4];
};

// Queries lie in shared memory with the two middle words of a piece exchanged: as rows 0 to 7 of a fragment they are
// its words 0 and 1, as rows 8 to 15 its words 2 and 3. Each half of the result that is meant is taken, the other is
// nonsense; so a piece of keys is two pairs of registers as they were loaded.
// `key(n, b)` is the piece at 32 b + 8 t of token 8 n + g.
template <class Key>
__device__ __forceinline__ void score(Key key, const char* queries, int g, int t, float (&s)[4 * TURNS]) {
#pragma unroll
    for (int n = 0; n < 2 * TURNS; n++) {
        float upper[4] = {0, 0, 0, 0}, lower[4] = {0, 0, 0, 0};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const Piece q = load_shared(queries + key_place(g, 4 * b + t)), k = key(n, b);
            multiply(upper, q.x[0], q.x[1], q.x[2], q.x[3], k.x[0], k.x[1]);
            multiply(lower, q.x[0], q.x[1], q.x[2], q.x[3], k.x[2], k.x[3]);
        }
        s[2 * n] = upper[0] + lower[2], s[2 * n + 1] = upper[1] + lower[3];
    }
}

// A lane's scores are those of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16, as its values are.
__device__ __forceinline__ int token_of(int i, int t) { return 2 * t + (i & 1) + (i >> 1) * 8; }

// Scores -> weights, as the tensor cores want them; the sums so far are faded.
__device__ __forceinline__ void weigh(float (&s)[4 * TURNS], Sums& sums, int valid, float scale, int t,
                                      u32 (&weights)[TURNS][2]) {
    float most = NONE;
#pragma unroll
    for (int i = 0; i < 4 * TURNS; i++) {
        s[i] = token_of(i, t) < valid ? s[i] * scale : NONE;
        most = fmaxf(most, s[i]);
    }
    most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
    float highest = fmaxf(sums.highest, most);
    float fade = power(sums.highest - highest), total = 0;
    sums.highest = highest;
#pragma unroll
    for (int i = 0; i < 4 * TURNS; i++) total += s[i] = power(s[i] - highest);
    sums.total = sums.total * fade + total;
#pragma unroll
    for (int i = 0; i < 2 * TURNS; i++) weights[i / 2][i % 2] = pack(s[2 * i], s[2 * i + 1]);
    float fade_0 = __shfl_sync(ALL, fade, 8 * t), fade_1 = __shfl_sync(ALL, fade, 8 * t + 4);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sums.out[h][j][0] *= fade_0, sums.out[h][j][1] *= fade_1;
            sums.out[h][j][2] *= fade_0, sums.out[h][j][3] *= fade_1;
        }
}

// `value(u, h, i)` is the piece at 64 h + 8 g of token 16 u + token_of(i, t).
template <class Value>
__device__ __forceinline__ void add(Value value, const u32 (&weights)[TURNS][2], Sums& sums) {
#pragma unroll
    for (int u = 0; u < TURNS; u++)
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const Piece v[4] = {value(u, h, 0), value(u, h, 1), value(u, h, 2), value(u, h, 3)};
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply(sums.out[h][j], __byte_perm(v[0].x[j], v[1].x[j], 0x5410),
                         __byte_perm(v[0].x[j], v[1].x[j], 0x7632), __byte_perm(v[2].x[j], v[3].x[j], 0x5410),
                         __byte_perm(v[2].x[j], v[3].x[j], 0x7632), weights[u][0], weights[u][1]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) decode_attention(
    const u16* query, const u16* key, const u16* value, u16* out, const u16* cosines, const u16* sines,
    const u16* query_norm, const u16* key_norm, const long long* bases, const int* fields, const int* table,
    const int* rows, int layer, int query_stride, int key_stride, int value_stride, int num_slots, int table_width,
    int num_rows, float scale, float eps, float norm_offset) {
    extern __shared__ __align__(128) char room[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int r = warp / WAYS, part = warp % WAYS;
    const int head = blockIdx.y, first_row = blockIdx.x * ROWS;
    if (threadIdx.x == 0) let_next_kernel_begin();

    const bool has_numbers = lane < WIDTH / 4 && first_row + r < num_rows;

    // What every row is: each warp asks for all of them, a lane a row; and for its own row's first pages, a lane a
    // page, before it knows what they are, for every load that waits for another takes a microsecond. All this was
    // there before the kernel before this one, which makes the queries and may still run.
    int slot = -1, prefix = 0, own = 0, first_page = -1;
    if (lane < ROWS && first_row + lane < num_rows) slot = rows[first_row + lane];
    const int likely_slot = __shfl_sync(ALL, slot, r);
    const int known_page = likely_slot >= 0 && lane < table_width ? table[likely_slot * table_width + lane] : 0;
    if (slot >= 0) {
        int active = fields[ACTIVE * num_slots + slot];
        prefix = fields[PREFIX * num_slots + slot];
        own = fields[OWN * num_slots + slot];
        first_page = table[slot * table_width];
        if (active == 0) slot = -1;
    }
    const u32 alive = __ballot_sync(ALL, slot >= 0);
    if (alive == 0) {
        wait_for_kernel_before();
        return;
    }
    const int leader = __ffs(alive) - 1;
    const int leaders_slot = __shfl_sync(ALL, slot, leader);
    const int leaders_prefix = __shfl_sync(ALL, prefix, leader);
    const int leaders_page = __shfl_sync(ALL, first_page, leader);
    const bool is_like_leader = prefix == leaders_prefix && first_page == leaders_page;
    const bool is_shared = __all_sync(ALL, slot < 0 || is_like_leader) && (alive & (alive - 1)) && leaders_prefix > 0;
    slot = __shfl_sync(ALL, slot, r);
    prefix = __shfl_sync(ALL, prefix, r);
    own = __shfl_sync(ALL, own, r);
    const bool is_alive = slot >= 0;

    const u64 of_layer = 2 * (static_cast<u64>(layer) * bases[2] + head * PAGE * WIDTH);
    char* const keys = reinterpret_cast<char*>(bases[0]) + of_layer;
    char* const values = reinterpret_cast<char*>(bases[1]) + of_layer;
    constexpr long long PAGE_BYTES = 2ll * KV_HEADS * PAGE * WIDTH;
    const int* const pages = table + (is_alive ? slot : leaders_slot) * table_width;
    const int prompt_pages = (prefix + PAGE - 1) / PAGE;

    u32 cosine = 0, sine = 0;
    if (ROTARY && has_numbers && is_alive) {
        const long long at = static_cast<long long>(prefix + own) * (WIDTH / 4) + lane;
        cosine = reinterpret_cast<const u32*>(cosines)[at];
        sine = reinterpret_cast<const u32*>(sines)[at];
    }

    // (For all lanes of a warp.) A dead row, which helps to fetch a shared prompt, has to look at another's.
    auto page_of = [&](int page) {
        const int known = __shfl_sync(ALL, known_page, page & 31);
        return static_cast<long long>(is_alive && page < 32 ? known : pages[page]);
    };

    // The row's queries, new key and new value are asked for before its pages: whatever is asked for later comes later.
    // Lane: places 2 lane, 2 lane + 1 and those WIDTH / 2 later. The warps of a row share its heads.
    wait_for_kernel_before();
    constexpr int HEADS_OF_WARP = QUERIES / WAYS;
    u32 given[HEADS_OF_WARP + 1][2];  // the last is the key (of the first warp) or the value (of the last one)
    {
        const int row = first_row + r;
        auto ask = [&](int n, const u16* from) {
            given[n][0] = given[n][1] = 0;
            if (!has_numbers || from == nullptr) return;
            given[n][0] = reinterpret_cast<const u32*>(from)[lane];
            given[n][1] = reinterpret_cast<const u32*>(from)[WIDTH / 4 + lane];
        };
#pragma unroll
        for (int n = 0; n < HEADS_OF_WARP; n++) {
            const int h = part + n * WAYS;
            ask(n, h < GROUP ? query + row * query_stride + (head * GROUP + h) * WIDTH : nullptr);
        }
        ask(HEADS_OF_WARP,
            part == 0 ? key + row * key_stride + head * WIDTH : value + row * value_stride + head * WIDTH);
    }

    // A shared prompt: all threads of the block fetch it.
    const int tiles = is_shared ? (leaders_prefix + PAGE - 1) / PAGE : 0;
    auto fetch = [&](int tile) {
        char* stage = room + tile % STAGES * STAGE;
        const long long from = page_of(tile) * PAGE_BYTES;  // any row's that is alive
        constexpr int STEP = THREADS / PIECES;  // tokens at a time; places repeat after eight
        static_assert(STEP % 8 == 0, "places would not repeat");
        const int token = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
        char* const to_keys = stage + key_place(token, piece);
        char* const to_values = stage + PAGE * BYTES + value_place(token, piece);
        const char *from_keys = keys + from + threadIdx.x * 16, *from_values = values + from + threadIdx.x * 16;
#pragma unroll
        for (int n = 0; n < PAGE; n += STEP) {
            const bool wanted = tile * PAGE + n + token < leaders_prefix;
            copy_piece(to_keys + n * BYTES, from_keys + n * BYTES, wanted);
            copy_piece(to_values + n * BYTES, from_values + n * BYTES, wanted);
        }
    };
    if (is_shared) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            if (s < tiles) fetch(s);
            end_copies();
        }
    }

    // A warp's own work: the row's tokens, and its prompt if that is not shared.
    const bool is_prompt_first = head % 2 == 0;  // by heads, which a row has all of: not by where it sits
    auto pages_with = [&](int tokens) { return max(0, tokens - part * CHUNK + PAGE - 1) / PAGE; };  // of this warp
    const int owns = is_alive ? pages_with(own) : 0, prompts = is_alive && !is_shared ? pages_with(prefix) : 0;
    const int steps = owns + prompts;
    auto page_of_step = [&](int step, int& valid) {
        const bool is_own = is_prompt_first ? step >= prompts : step < owns;
        const int page = step - (is_prompt_first ? (is_own ? prompts : 0) : (is_own ? 0 : owns));
        valid = step < steps ? (is_own ? own : prefix) - page * PAGE - part * CHUNK : 0;
        return page_of(step < steps ? page + (is_own ? prompt_pages : 0) : 0);
    };
    char* const own_keys = room + AT_ROOMS + warp * ROOM;
    char* const own_values = own_keys + CHUNK * BYTES;
    // A warp copies AT_ONCE tokens at a time, a lane the same piece of each.
    constexpr int AT_ONCE = 32 / PIECES;
    const int its_token = lane / PIECES, its_piece = lane % PIECES;
    const long long its_place = part * CHUNK * BYTES + lane * 16;
    char* const to_keys = own_keys + key_place(its_token, its_piece);
    auto load_keys = [&](long long page, int valid) {
        const char* from = keys + page * PAGE_BYTES + its_place;
#pragma unroll
        for (int n = 0; n < CHUNK; n += AT_ONCE)
            copy_piece(to_keys + n * BYTES, from + n * BYTES, its_token + n < valid);
        end_copies();
    };
    auto load_values = [&](long long page, int valid) {
        const char* from = values + page * PAGE_BYTES + its_place;
#pragma unroll
        for (int n = 0; n < CHUNK; n += AT_ONCE) {
            char* to = own_values + value_place(its_token, its_piece ^ ((n / 2 & 3) << 1));  // as of its_token + n
            copy_piece(to + n * BYTES, from + n * BYTES, its_token + n < valid);
        }
        end_copies();
    };
    int valid = 0;
    auto begin = [&]() {
        const long long place = page_of_step(0, valid);
        load_keys(place, valid);
        load_values(place, valid);
    };
    const bool is_prompt_later = is_shared && !is_prompt_first;
    if (!is_shared || is_prompt_later) begin();

    // Queries, the new key and the new value: normed, turned and rounded; the latter two into the cache.
    char* const queries = room + AT_QUERIES + r * QUERIES * BYTES;
    u32* const new_key = reinterpret_cast<u32*>(room + AT_KEY + r * BYTES);
    u32* const new_value = reinterpret_cast<u32*>(room + AT_VALUE + r * BYTES);
    if (is_alive) {
        const long long place = page_of(prompt_pages + own / PAGE) * PAGE_BYTES + (own % PAGE) * BYTES;
        auto turn = [&](u32& low, u32& high, const u16* norm) {
            u32 norm_low = 0, norm_high = 0;
            if (NORM && has_numbers) {
                norm_low = reinterpret_cast<const u32*>(norm)[lane];
                norm_high = reinterpret_cast<const u32*>(norm)[WIDTH / 4 + lane];
            }
            if (!ROTARY && !NORM) return;
            float a0 = low_of(low), a1 = high_of(low), b0 = low_of(high), b1 = high_of(high);
            if (NORM) {
                float factor = rsqrtf(sum_of_warp(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1) / WIDTH + eps);
                a0 = a0 * factor * (low_of(norm_low) + norm_offset);
                a1 = a1 * factor * (high_of(norm_low) + norm_offset);
                b0 = b0 * factor * (low_of(norm_high) + norm_offset);
                b1 = b1 * factor * (high_of(norm_high) + norm_offset);
            }
            if (ROTARY) {
                float c0 = low_of(cosine), c1 = high_of(cosine), s0 = low_of(sine), s1 = high_of(sine);
                float x0 = a0 * c0 - b0 * s0, x1 = a1 * c1 - b1 * s1;
                b0 = b0 * c0 + a0 * s0, b1 = b1 * c1 + a1 * s1;
                a0 = x0, a1 = x1;
            }
            low = pack(a0, a1), high = pack(b0, b1);
        };
#pragma unroll
        for (int n = 0; n < HEADS_OF_WARP; n++) {
            const int h = part + n * WAYS;
            if (h < GROUP) turn(given[n][0], given[n][1], query_norm);
            if (has_numbers) {
                char* at = queries + word_of(lane & 3) * 4;
                *reinterpret_cast<u32*>(at + key_place(h, lane >> 2)) = given[n][0];
                *reinterpret_cast<u32*>(at + key_place(h, PIECES / 2 + (lane >> 2))) = given[n][1];
            }
        }
        if (part == 0 || part == WAYS - 1) {
            u32 &low = given[HEADS_OF_WARP][0], &high = given[HEADS_OF_WARP][1];
            if (part == 0) turn(low, high, key_norm);
            u32* to = reinterpret_cast<u32*>((part == 0 ? keys : values) + place);
            u32* too = part == 0 ? new_key : new_value;
            if (has_numbers) {
                to[lane] = too[lane] = low;
                to[WIDTH / 4 + lane] = too[WIDTH / 4 + lane] = high;
            }
        }
    }
    __syncthreads();

    // The new token's scores, while the first loads are under way.
    float* const scores_of_new = reinterpret_cast<float*>(room + AT_NEW) + r * QUERIES;
#pragma unroll
    for (int h = part; h < GROUP; h += WAYS) {
        float x = 0;
        if (has_numbers) {
            const char* at = queries + word_of(lane & 3) * 4;
            u32 low = *reinterpret_cast<const u32*>(at + key_place(h, lane >> 2));
            u32 high = *reinterpret_cast<const u32*>(at + key_place(h, PIECES / 2 + (lane >> 2)));
            u32 key_low = new_key[lane], key_high = new_key[WIDTH / 4 + lane];
            x = low_of(low) * low_of(key_low) + high_of(low) * high_of(key_low) +
                low_of(high) * low_of(key_high) + high_of(high) * high_of(key_high);
        }
        x = sum_of_warp(x);
        if (lane == 0) scores_of_new[h] = x * scale;
    }

    Sums sums;
    sums.highest = NONE, sums.total = 0;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.out[h][j][i] = 0;
    float s[4 * TURNS];
    u32 weights[TURNS][2];

    auto attend_to_shared = [&]() {  // in shared memory
        for (int tile = 0; tile < tiles; tile++) {
            wait_for_copies<STAGES - 1>();
            __syncthreads();
            const int seen = prefix - tile * PAGE - part * CHUNK;  // tokens of this warp
            if (is_alive && seen > 0) {
                const char* stage = room + tile % STAGES * STAGE;
                score([&](int n, int b) {
                    return load_shared(stage + key_place(part * CHUNK + 8 * n + g, 4 * b + t));
                }, queries, g, t, s);
                weigh(s, sums, seen, scale, t, weights);
                add([&](int u, int h, int i) {
                    const int token = part * CHUNK + 16 * u + token_of(i, t);
                    return load_shared(stage + PAGE * BYTES + value_place(token, 8 * h + g));
                }, weights, sums);
            }
            if (tile + STAGES < tiles) {
                __syncthreads();
                fetch(tile + STAGES);
            }
            end_copies();
        }
    };
    if (is_shared && is_prompt_first) {
        attend_to_shared();
        begin();
    }
    for (int step = 0; step < steps; step++) {
        int next_valid;
        const long long place = page_of_step(step + 1, next_valid);
        wait_for_copies<1>();  // the values may be under way
        sync_warp();
        score([&](int n, int b) { return load_shared(own_keys + key_place(8 * n + g, 4 * b + t)); },
              queries, g, t, s);
        sync_warp();
        load_keys(place, next_valid);
        weigh(s, sums, valid, scale, t, weights);
        wait_for_copies<1>();  // the next keys may be under way
        sync_warp();
        add([&](int u, int h, int i) {
            return load_shared(own_values + value_place(16 * u + token_of(i, t), 8 * h + g));
        }, weights, sums);
        sync_warp();
        load_values(place, next_valid);
        valid = next_valid;
    }
    if (is_prompt_later) attend_to_shared();

    // The warps of a row, and its new token, are merged.
    float* const all_highest = reinterpret_cast<float*>(room + AT_HIGHEST);
    float* const all_totals = reinterpret_cast<float*>(room + AT_TOTAL);
    auto outs_of = [&](int warp) { return reinterpret_cast<float*>(room + AT_ROOMS + warp * ROOM); };
    sums.total += __shfl_xor_sync(ALL, sums.total, 1);
    sums.total += __shfl_xor_sync(ALL, sums.total, 2);
    wait_for_copies<0>();  // the last ones only bring zeros, but not into outputs
    sync_warp();
    if (!is_alive) return;
    if (t == 0) all_highest[warp * QUERIES + g] = sums.highest, all_totals[warp * QUERIES + g] = sums.total;
#pragma unroll
    for (int q = 0; q < 2; q++)
        if (2 * t + q < GROUP)
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                float4* to = reinterpret_cast<float4*>(
                    outs_of(warp) + (2 * t + q) * OUT_ROW + h * 64 + g * 8);
                auto& o = sums.out[h];
                to[0] = make_float4(o[0][q], o[0][q + 2], o[1][q], o[1][q + 2]);
                to[1] = make_float4(o[2][q], o[2][q + 2], o[3][q], o[3][q + 2]);
            }
    sync_part<32 * WAYS>(r);
    constexpr int PAIRS = WIDTH / 2, STEP = 32 * WAYS / PAIRS > 0 ? 32 * WAYS / PAIRS : 1;
    const int mine = threadIdx.x % (32 * WAYS), pair = mine % PAIRS;
#pragma unroll
    for (int h = mine / PAIRS; h < GROUP; h += STEP) {
        const float of_new = scores_of_new[h];
        float highest = of_new;
#pragma unroll
        for (int w = 0; w < WAYS; w++) highest = fmaxf(highest, all_highest[(WAYS * r + w) * QUERIES + h]);
        float weight = power(of_new - highest), total = weight;
        float low = weight * low_of(new_value[pair]), high = weight * high_of(new_value[pair]);
#pragma unroll
        for (int w = 0; w < WAYS; w++) {
            const int from = (WAYS * r + w) * QUERIES + h;
            weight = power(all_highest[from] - highest);
            total += all_totals[from] * weight;
            float2 o = *reinterpret_cast<float2*>(outs_of(WAYS * r + w) + h * OUT_ROW + 2 * pair);
            low += o.x * weight, high += o.y * weight;
        }
        const float share = 1 / total;
        const long long at = static_cast<long long>(first_row + r) * GROUP * KV_HEADS + head * GROUP + h;
        reinterpret_cast<u32*>(out)[at * (WIDTH / 2) + pair] = pack(low * share, high * share);
    }
}
