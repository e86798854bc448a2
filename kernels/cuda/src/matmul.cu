// Product of float32 x [M, K] and the transpose of weight [N, K], for router gates and small heads.
// Each output is one 128-lane sum, so its bits are those of the CPU and do not depend on M.

#include "numbers.cuh"

constexpr int WARP_ROWS = 4, WARP_COLUMNS = 4;
constexpr int WARPS_DOWN = 2, WARPS_ACROSS = 4;

// A warp computes 4 x 4 outputs. Grid: [ceil(N / 16), ceil(M / 8)].
extern "C" __global__ void __launch_bounds__(32 * WARPS_DOWN * WARPS_ACROSS)
    matmul_f32(const float *x, const float *weight, float *out, long long num_rows,
               long long num_columns, long long depth) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long first_row = (blockIdx.y * WARPS_DOWN + warp / WARPS_ACROSS) * WARP_ROWS;
    long long first_column =
        (static_cast<long long>(blockIdx.x) * WARPS_ACROSS + warp % WARPS_ACROSS) * WARP_COLUMNS;
    if (first_row >= num_rows || first_column >= num_columns) return;
    float sums[WARP_ROWS][WARP_COLUMNS][4] = {};
    for (long long k = lane * 4; k - lane * 4 < depth; k += 128) {
        float left[WARP_ROWS][4];
#pragma unroll
        for (int m = 0; m < WARP_ROWS; m++)
            load4(x + min(first_row + m, num_rows - 1) * depth, k, depth, left[m]);
#pragma unroll
        for (int n = 0; n < WARP_COLUMNS; n++) {
            float right[4];
            load4(weight + min(first_column + n, num_columns - 1) * depth, k, depth, right);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; m++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sums[m][n][j] = __fmaf_rn(left[m][j], right[j], sums[m][n][j]);
        }
    }
#pragma unroll
    for (int m = 0; m < WARP_ROWS; m++)
#pragma unroll
        for (int n = 0; n < WARP_COLUMNS; n++) {
            float total = fold_lanes(sums[m][n]);
            if (lane == 0 && first_row + m < num_rows && first_column + n < num_columns)
                out[(first_row + m) * num_columns + first_column + n] = total;
        }
}
