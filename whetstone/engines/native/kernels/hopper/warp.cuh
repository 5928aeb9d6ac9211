// What a warp of the chip can do, in names: products by tensor cores, copies that run beside, waiting.
// A kernel's source is put behind this one. tests/hopper/warp_on_cpu.h says the same for a CPU, so that kernels can
// be tried where there is no GPU. Given by the compiler's options: BFLOAT16 (else float16).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Piece { u32 x[4]; };  // 8 numbers

constexpr u32 ALL = 0xffffffffu;
#define NONE __int_as_float(0xff800000)  // minus infinity

__device__ __forceinline__ Piece load_shared(const char* at) {
    uint4 v = *reinterpret_cast<const uint4*>(at);
    return Piece{{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ void store_piece(char* at, const Piece& p) {
    *reinterpret_cast<uint4*>(at) = make_uint4(p.x[0], p.x[1], p.x[2], p.x[3]);
}

// Zeros, if it is not wanted.
__device__ __forceinline__ void copy_piece(char* to, const char* from, bool wanted) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(at), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

// The copies of a thread since the last end are a group; all but the newest LEFT groups are waited for.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

// Part `which` of a block, THREADS_OF_PART long, waits for its own threads.
template <int THREADS_OF_PART>
__device__ __forceinline__ void sync_part(int which) {
    asm volatile("bar.sync %0, %1;" ::"r"(which + 1), "n"(THREADS_OF_PART) : "memory");
}

// A kernel may be launched while the one before it ends; here it waits for what that one wrote. Every kernel that is
// launched so waits, even if it has nothing to do: whoever waits for it relies on all before it.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next one may be launched once all blocks have said this, or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#if BFLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float low_of(u32 x) { return __int_as_float(x << 16); }
__device__ __forceinline__ float high_of(u32 x) { return __int_as_float(x & 0xffff0000u); }
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float low_of(u32 x) {
    float f;
    asm("{ .reg .f16 h; .reg .b16 o; mov.b32 {h, o}, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(x));
    return f;
}
__device__ __forceinline__ float high_of(u32 x) { return low_of(x >> 16); }
#endif

// c += a b: [16, 16] times [16, 8], all three spread over the lanes of a warp as the tensor cores have them.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(MMA "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float power(float x) {  // of two
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}
