// The instructions of the tensor-core kernels, each beside a twin for the CPU. The twin of the
// matrix product adds in its own order: on a CPU, inputs whose sums are exact check the indexing;
// the rounding of the chip's sums can only be seen on the chip.
#pragma once

#include "numbers.cuh"

// Copies 16 bytes to shared memory, or clears them, without waiting.
__device__ __forceinline__ void copy16_async(void *shared, const void *global, bool is_inside) {
#ifdef __CUDACC__
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(is_inside ? 16 : 0));
#else
    if (is_inside) memcpy(shared, global, 16);
    else memset(shared, 0, 16);
#endif
}
__device__ __forceinline__ void commit_copies() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;");
#endif
}
// Waits until at most PENDING of this thread's committed groups are under way.
template <int PENDING> __device__ __forceinline__ void wait_copies() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
#endif
}

// sum[16x8] += a[16x16] * b[16x8]. With g = lane / 4 and t = lane % 4 a lane holds, two a register,
// a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b: (2t, g), (2t + 8, g);
// sum: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
#ifdef __CUDACC__
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    struct Fragments {
        unsigned a[4], b[2];
    } own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, of[32];
    simt::gather(own, of);
    auto half = [](unsigned pair, int i) {
        return to_float(static_cast<bf16>(i ? pair >> 16 : pair));
    };
    unsigned g = simt::lane() / 4, t = simt::lane() % 4;
    for (int i = 0; i < 4; i++) {
        unsigned row = g, column = 2 * t + i % 2, upper = i / 2;
        for (int k = 0; k < 16; k++) {
            unsigned pair = k % 8 / 2, high = k / 8;
            sum[i] += half(of[row * 4 + pair].a[2 * high + upper], k % 2) *
                      half(of[column * 4 + pair].b[high], k % 2);
        }
    }
#endif
}

// A warpgroup's 64 x 64 sums, 32 a thread: with g = lane / 4 and t = lane % 4, sums[n] holds
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of the warp's 16 rows and of columns 8n to 8n + 7.
typedef float GroupSums[8][4];

// Makes what this thread wrote to shared memory seen by wgmma, after the next barrier.
__device__ __forceinline__ void publish_to_tensor_cores() {
#ifdef __CUDACC__
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#ifdef __CUDACC__
// Keeps the compiler from moving sums while the tensor cores own them.
__device__ __forceinline__ void pin(GroupSums &sums) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sums[n][i])::"memory");
}
// A panel in rows of 128 bytes, swizzled by 128 bytes (1 << 62); 1024 bytes from eight rows to the
// next. All in units of 16 bytes.
__device__ __forceinline__ unsigned long long describe(const void *panel) {
    unsigned long long address = __cvta_generic_to_shared(panel);
    return (address & 0x3FFFFull) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void multiply_16(GroupSums &d, unsigned long long left,
                                            unsigned long long right) {
    asm volatile(
        "{ .reg .pred adds; setp.eq.b32 adds, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, adds, 1, 1, 0, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
          "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(left), "l"(right));
}
#else
// Where the swizzle puts 16-byte chunks: address bits 4..6 are xored with bits 7..9.
inline float swizzled(const void *panel, unsigned row, unsigned k) {
    unsigned place = row * 128 + k * 2;
    bf16 value;
    memcpy(&value, static_cast<const char *>(panel) + (place ^ (place >> 7 & 7) << 4), 2);
    return to_float(value);
}
#endif

// Starts sums += left [64 rows of K = 64] * right [64 columns of K = 64]; both panels lie as
// `describe` says. Four warps together.
__device__ __forceinline__ void multiply_group(const void *left, const void *right,
                                               GroupSums &sums) {
#ifdef __CUDACC__
    unsigned long long a = describe(left), b = describe(right);
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_16(sums, a + 2 * k, b + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    pin(sums);
#else
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned n = 0; n < 8; n++)
        for (unsigned i = 0; i < 4; i++)
            for (unsigned k = 0; k < 64; k++)
                sums[n][i] += swizzled(left, warp * 16 + lane / 4 + i / 2 * 8, k) *
                              swizzled(right, n * 8 + lane % 4 * 2 + i % 2, k);
#endif
}

// Waits for all products that were started.
__device__ __forceinline__ void wait_group(GroupSums &sums) {
#ifdef __CUDACC__
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(sums);
#endif
}
