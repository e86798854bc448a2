// bfloat16 matrix products on tensor cores (mma.sync) for decode shapes.
//
// The order of each sum over K, 16 at a time, is fixed by the tile and the split of K. Neither
// depends on the number of rows, so a row has the same bits in any batch.

#include "panels.cuh"

// The quarter of a tile that a warp computes: 32 x 32, as 2 x 4 products of 16 x 8.
typedef float Sums[2][4][4];

__device__ __forceinline__ void multiply_panels(Panel &left, Panel &right, Sums &sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row = warp / 2 * 32 + lane / 4, column = warp % 2 * 32 + lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
        unsigned a[2][4], b[2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = left.pair(row + m * 16 + i % 2 * 8, k + pair + i / 2 * 8);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            b[0] = right.pair(column + n * 8, k + pair);
            b[1] = right.pair(column + n * 8, k + pair + 8);
#pragma unroll
            for (int m = 0; m < 2; m++) multiply_add(sums[m][n], a[m], b);
        }
    }
}

template <class T>
__device__ __forceinline__ void write_sums(const Sums &sums, T *out, long long first_row,
                                           long long end_row, long long first_column,
                                           long long num_columns) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    first_row += warp / 2 * 32 + lane / 4;
    first_column += warp % 2 * 32 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                long long row = first_row + m * 16 + i / 2 * 8;
                long long column = first_column + n * 8 + i % 2;
                if (row < end_row && column < num_columns)
                    store(out + row * num_columns + column, sums[m][n][i]);
            }
}

// Writes part z of K to partial[z] [M, N]. Grid: [ceil(N / 64), ceil(M / 64) * num_splits].
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    matmul_bf16(const bf16 *x, const bf16 *weight, float *partial, long long num_rows,
                long long num_columns, long long depth, int num_splits) {
    __shared__ Stages stages;
    long long split = blockIdx.y % num_splits, first_row = blockIdx.y / num_splits * TILE_M;
    long long first_column = static_cast<long long>(blockIdx.x) * TILE_N;
    int num_steps = static_cast<int>(depth / TILE_K);
    int step = static_cast<int>(num_steps * split / num_splits);
    int end = static_cast<int>(num_steps * (split + 1) / num_splits);
    Sums sums = {};
    auto copy = [&](int at) {
        if (at < end) {
            long long k = static_cast<long long>(at) * TILE_K;
            copy_panel(stages.left[at % STAGES], x, first_row, num_rows, depth, k);
            copy_panel(stages.right[at % STAGES], weight, first_column, num_columns, depth, k);
        }
        commit_copies();
    };
    for (int ahead = 0; ahead < STAGES - 1; ahead++) copy(step + ahead);
    for (; step < end; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        copy(step + STAGES - 1);
        multiply_panels(stages.left[step % STAGES], stages.right[step % STAGES], sums);
    }
    write_sums(sums, partial + split * num_rows * num_columns, first_row, num_rows, first_column,
               num_columns);
}

// Adds the parts of K in order, and rounds once.
extern "C" __global__ void __launch_bounds__(256)
    matmul_join(const float *partial, bf16 *out, long long count, int num_splits) {
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float total = partial[i];
    for (int split = 1; split < num_splits; split++) total += partial[split * count + i];
    out[i] = to_bf16(total);
}
