// CUDA's words for a CPU: every thread of a block is a fiber, blocks run one after the other. For trying kernels
// whose source is put behind this one (whetstone/engines/native/kernels/warp.cuh is the GPU's). A block whose threads
// wait for each other for ever ends the program.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct Piece { u32 x[4]; };
struct Index { int x, y, z; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
constexpr u32 ALL = 0xffffffffu;
#define NONE (-INFINITY)

constexpr int ROOM_OF_BLOCK = 1 << 18, MOST_BLOCKS = 2;  // of a cluster
char room[MOST_BLOCKS * ROOM_OF_BLOCK] __attribute__((aligned(ROOM_OF_BLOCK)));
Index blockIdx, threadIdx, gridDim;

void make_copies(int left);

namespace fibers {
constexpr int MOST = 1024;
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool is_done;
    int waits[4];  // how many times it has waited for its warp, its part (or a barrier), its block and its cluster
} all[MOST];
ucontext_t home;
int count, now, blocks_of_cluster;  // threads of a block; the one that runs
struct { int arrived, passed; } parts[MOST_BLOCKS][16];
std::function<void()> body;
u64 told[MOST][6];  // what a lane shows the others

inline void run() {
    body();
    make_copies(0);
    all[now].is_done = true;
    swapcontext(&all[now].context, &home);
}
inline void pause() {
    int me = now;
    swapcontext(&all[me].context, &home);
}
// A fiber waits until the others of its `size` have waited as often, or are done.
inline void wait(int kind, int size) {
    int me = now, first = me / size * size, mine = ++all[me].waits[kind];
    for (;;) {
        bool ready = true;
        for (int i = first; i < first + size && ready; i++) ready = all[i].is_done || all[i].waits[kind] >= mine;
        if (ready) return;
        pause();
    }
}
inline void for_warp() { wait(0, 32); }
inline int block() { return now / count; }  // of the cluster
template <class Condition>
inline void until(Condition holds) {
    while (!holds()) pause();
    all[now].waits[1]++;
}
inline int waited(const Fiber& f) { return f.waits[0] + f.waits[1] + f.waits[2] + f.waits[3]; }
inline void run_block(int threads, std::function<void()> kernel, int blocks = 1) {  // or a cluster of them
    const Index first_block = blockIdx;
    body = kernel, count = threads, blocks_of_cluster = blocks;
    memset(room, 255, sizeof room);  // not a number
    memset(parts, 0, sizeof parts);
    for (int i = 0; i < blocks * threads; i++) {
        Fiber& f = all[i];
        f.stack.resize(1 << 16), f.is_done = false, memset(f.waits, 0, sizeof f.waits);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, run, 0);
    }
    for (int still = 0;;) {
        bool any = false, moved = false;
        for (int i = 0; i < blocks * threads; i++) {
            if (all[i].is_done) continue;
            any = true, now = i, threadIdx = {i % threads, 0, 0};
            blockIdx = {first_block.x + i / threads, first_block.y, first_block.z};
            int before = waited(all[i]);
            swapcontext(&home, &all[i].context);
            moved |= all[i].is_done || waited(all[i]) != before;
        }
        if (!any) return;
        if ((still = moved ? 0 : still + 1) < 5) continue;
        fprintf(stderr, "block (%d, %d): threads wait for each other for ever\n", blockIdx.x, blockIdx.y);
        exit(3);
    }
}
}  // namespace fibers

inline void __syncthreads() { fibers::wait(2, fibers::count); }
inline void sync_warp() { fibers::for_warp(); }
inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {}
template <int SIZE>
inline void sync_part(int which) {
    auto& part = fibers::parts[fibers::block()][which];
    int mine = part.passed;
    if (++part.arrived == SIZE) part.arrived = 0, part.passed++;
    fibers::until([&] { return part.passed > mine; });
}

template <class T>
inline T shuffle(T value, int from) {
    int me = fibers::now, first = me / 32 * 32;
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    fibers::told[me][0] = bits;
    fibers::for_warp();
    bits = fibers::told[first + from][0];
    fibers::for_warp();
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
inline T __shfl_sync(u32, T value, int from) { return shuffle(value, from & 31); }
template <class T>
inline T __shfl_xor_sync(u32, T value, int step) { return shuffle(value, (fibers::now & 31) ^ step); }
inline u32 __ballot_sync(u32, bool x) {
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (u32)shuffle((int)x, i) << i;
    return bits;
}
inline bool __all_sync(u32, bool x) { return __ballot_sync(ALL, x) == ALL; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
inline u32 __byte_perm(u32 x, u32 y, u32 which) {
    u64 both = (u64)y << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float power(float x) { return std::exp2(x); }
inline float sum_of_warp(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

inline void store_piece(char* at, const Piece& p) { memcpy(at, p.x, 16); }
inline Piece load_shared(const char* at) {
    Piece p;
    memcpy(&p, at, 16);
    return p;
}
// Copies are made when they are waited for, or when their thread ends, and not before: what is read too early is not a
// number, and a copy that nobody waited for comes over whatever is written there since.
struct Copy { char* to; const char* from; bool is_wanted; int group; };
struct Copies { std::vector<Copy> pending; int groups; } copies[fibers::MOST];
inline void make_copies(int left) {  // all but the newest groups
    Copies& mine = copies[fibers::now];
    std::vector<Copy> still;
    for (Copy& copy : mine.pending)
        if (copy.group >= mine.groups - left) still.push_back(copy);
        else if (copy.is_wanted) memcpy(copy.to, copy.from, 16);
        else memset(copy.to, 0, 16);
    mine.pending = still;
}
inline void copy_piece(char* to, const char* from, bool wanted) {
    Copies& mine = copies[fibers::now];
    mine.pending.push_back({to, from, wanted, mine.groups});
}
inline void end_copies() { copies[fibers::now].groups++; }
template <int LEFT>
inline void wait_for_copies() { make_copies(LEFT); }

#if BFLOAT16
inline float number(u16 x) {
    u32 bits = (u32)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline u16 rounded(float f) {
    u32 bits;
    memcpy(&bits, &f, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
inline float number(u16 x) {
    int exponent = x >> 10 & 31, digits = x & 1023;
    float size = std::ldexp((float)(exponent ? digits + 1024 : digits), (exponent ? exponent : 1) - 25);
    if (exponent == 31) size = digits ? NAN : INFINITY;
    return x >> 15 ? -size : size;
}
inline u16 rounded(float f) {  // to the nearest, ties to even, as nearbyint does
    u16 sign = std::signbit(f) ? 0x8000 : 0;
    if (std::isnan(f)) return 0x7fff;
    f = std::fabs(f);
    int exponent = f > 0 ? std::ilogb(f) : -14;
    if (exponent < -14) exponent = -14;
    int digits = exponent > 15 ? 1 << 20 : (int)std::nearbyint(std::ldexp(f, 10 - exponent));
    int bits = digits < 1024 ? digits : (exponent + 15 << 10) + digits - 1024;
    return sign | (bits > 0x7c00 ? 0x7c00 : bits);
}
#endif
inline u32 pack(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
inline float low_of(u32 x) { return number(x & 0xffff); }
inline float high_of(u32 x) { return number(x >> 16); }

// As PTX lays out m16n8k16: lane (g, t) shows a0 (row g, places 2t and 2t + 1), a1 (row g + 8), a2 and a3 (places 8
// later), b0 and b1 (column g, the same places), and has c of rows g and g + 8, columns 2t and 2t + 1.
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    int me = fibers::now, first = me / 32 * 32, g = me % 32 / 4, t = me % 4;
    u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    for (int i = 0; i < 6; i++) fibers::told[me][i] = mine[i];
    fibers::for_warp();
    for (int i = 0; i < 4; i++) {
        int row = i / 2, column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            int from = k % 8 / 2, later = k / 8;
            u32 a = fibers::told[first + 4 * g + from][row + 2 * later];
            u32 b = fibers::told[first + 4 * column + from][4 + later];
            sum += (k % 2 ? high_of(a) : low_of(a)) * (k % 2 ? high_of(b) : low_of(b));
        }
        c[i] += sum;
    }
    fibers::for_warp();
}
