// What a Hopper chip can do beyond a warp, in names: tiles fetched by a unit of their own, products by four warps,
// barriers that count bytes, two blocks that share what they fetch. Put behind warp.cuh and before a kernel's source.
// tests/hopper/hopper_on_cpu.h says the same for a CPU.

struct __align__(64) TensorMap { u64 words[16]; };  // where a matrix lies and what a tile of it is, by the driver

__device__ __forceinline__ char* shared_room() {
    extern __shared__ __align__(1024) char whole_room[];
    return whole_room;
}
__device__ __forceinline__ u32 address_of(const char* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// Barriers. One has been passed for the n-th time when as many as it counts arrived, and all bytes that were expected.
__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier, int block) {  // of the cluster
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void wait_at(u32 barrier, int parity) {  // for its parity-th passing, counted by two
    asm volatile(
        "{ .reg .pred passed; again: mbarrier.try_wait.parity.shared::cta.b64 passed, [%0], %1;"
        " @!passed bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Waiting for the other blocks in two halves. `relaxed`, since nothing that a thread wrote is read by others after it:
// else all writes to memory so far would be waited for, which takes a microsecond.
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Four numbers into the shared memory of another block, whose barrier counts their bytes.
__device__ __forceinline__ void send(u32 to, u32 barrier, int block, float a, float b, float c, float d) {
    asm volatile(
        "{ .reg .b32 there, counts; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 counts, %1, %2;"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counts]; }"
        ::"r"(to), "r"(barrier), "r"(block), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void look_ahead(const TensorMap* map) {  // it is used soon
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A tile into shared memory; what lies outside the matrix is zero. By one thread. Rows of a tile have 128 bytes, whose
// pieces of 16 are exchanged as the tensor cores want them.
__device__ __forceinline__ void fetch_2d(u32 to, const TensorMap* map, u32 barrier, int x, int y, u16 blocks) {
    asm volatile(  // the same place in all of `blocks`, a bit for each block of the cluster
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks) : "memory");
}
__device__ __forceinline__ void fetch_2d(u32 to, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void fetch_4d(u32 to, const TensorMap* map, u32 barrier, int x, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(w) : "memory");
}

// Products of four warps, which run beside. A tile is told by where it begins, rows in eights.
__device__ __forceinline__ u64 tile_at(u32 address) {
    return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int COUNT>
__device__ __forceinline__ void hold(float (&sums)[COUNT]) {  // nothing reads them before this
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 multiply_pairs(u32 x, u32 y) {  // of numbers in half precision, rounded
    u32 z;
#if BFLOAT16
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
#endif
    return z;
}

template <int COUNT>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
