// Wrappers of single instructions: conversions, asynchronous copies, matrix products on tensor
// cores. `tests/simt/instructions.cuh` is the equivalent for CPUs. `numbers.cuh` includes this
// file.
#pragma once

__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(x));
    return result;
}

// Convert two floats to two E4M3 codes, saturating, and back.
__device__ __forceinline__ unsigned e4m3_encode2(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ void e4m3_decode2(unsigned pair, float &low, float &high) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(halves));
}

// Starts to copy 16 bytes to shared memory, or to clear them if not `is_inside`.
__device__ __forceinline__ void copy16_async(void *shared, const void *global, bool is_inside) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(is_inside ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;");
}
// Waits until at most PENDING of this thread's committed copy groups are in flight.
template <int PENDING> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

// sum[16x8] += a[16x16] * b[16x8]. With g = lane / 4 and t = lane % 4, a lane holds these elements,
// with two of a or b per register: a (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b (2t, g),
// (2t + 8, g); sum (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The 64 x 64 sums of a warpgroup, 32 per thread. With g = lane / 4 and t = lane % 4, sums[n] holds
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of the warp's 16 rows, and
// of columns 8n to 8n + 7.
typedef float GroupSums[8][4];

// Makes this thread's writes to shared memory visible to wgmma after the next barrier.
__device__ __forceinline__ void publish_to_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Prevents the compiler from moving sums while tensor cores use them.
__device__ __forceinline__ void pin(GroupSums &sums) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sums[n][i])::"memory");
}
// Returns the wgmma descriptor of a panel: rows of 128 bytes with the 128-byte swizzle (1 << 62),
// and 1024 bytes per eight rows. Sizes are in units of 16 bytes.
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

// Starts sums += left [64 rows, K = 64] * right [64 columns, K = 64], with panels laid out as in
// `describe`. All four warps of the warpgroup must call it.
__device__ __forceinline__ void multiply_group(const void *left, const void *right,
                                               GroupSums &sums) {
    unsigned long long a = describe(left), b = describe(right);
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_16(sums, a + 2 * k, b + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    pin(sums);
}

// Waits for all products started so far.
__device__ __forceinline__ void wait_group(GroupSums &sums) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(sums);
}
