// Tiles of operands in shared memory, and copies to them from global memory.
#pragma once

#include "numbers.cuh"

constexpr int TILE_M = 64, TILE_N = 64, TILE_K = 64, STAGES = 3, GEMM_THREADS = 128;
constexpr int CHUNK = 8, ROW_CHUNKS = TILE_K / CHUNK;

// 64 rows of 64 values. The order of the 16-byte chunks depends on the row, so that the eight rows
// that a fragment reads are in different banks. This is the hardware's 128-byte swizzle, which
// requires an alignment of 1024 bytes.
struct alignas(1024) Panel {
    uint4 chunks[TILE_M][ROW_CHUNKS];

    __device__ __forceinline__ uint4 *at(int row, int chunk) {
        return &chunks[row][chunk ^ (row % ROW_CHUNKS)];
    }
    __device__ __forceinline__ unsigned pair(int row, int column) {
        return reinterpret_cast<unsigned *>(at(row, column / CHUNK))[column % CHUNK / 2];
    }
};
struct Stages {
    Panel left[STAGES], right[STAGES];
};

// Starts to copy 64 rows from `first` on and 64 columns from k on; rows past the end become zeros.
__device__ __forceinline__ void copy_panel(Panel &to, const bf16 *from, long long first,
                                           long long end, long long depth, long long k) {
#pragma unroll
    for (int i = 0; i < TILE_M * ROW_CHUNKS / GEMM_THREADS; i++) {
        int index = i * GEMM_THREADS + threadIdx.x;
        int row = index / ROW_CHUNKS, chunk = index % ROW_CHUNKS;
        bool is_inside = first + row < end;
        long long place = is_inside ? (first + row) * depth + k + chunk * CHUNK : 0;
        copy16_async(to.at(row, chunk), from + place, is_inside);
    }
}
