// The three instructions of the tensor-core kernels, each beside a twin for the CPU. The twin of the
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
