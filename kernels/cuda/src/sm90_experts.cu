// MXFP8 experts on tensor cores (wgmma): products of rows sorted by expert and dequantized weights.
//
// Weights are dequantized to bfloat16 on their way to shared memory, which is exact for scales
// 3..246, while tensor cores multiply the previous step. The order of each sum over K, 16 at a
// time, does not depend on the number of rows.

#include "formats.cuh"
#include "panels.cuh"

// A 1x32 block of a weight row, held in registers between load and use.
struct Codes {
    uint4 codes[2];
    unsigned scale;
};

__device__ __forceinline__ Codes load_codes(const uint8_t *codes, const uint8_t *scales,
                                            long long row, long long num_columns, long long depth,
                                            long long k) {
    if (row >= num_columns) return {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}, 0};
    long long first = row * depth + k;
    const uint4 *from = reinterpret_cast<const uint4 *>(codes + first);
    return {{from[0], from[1]}, scales[first / MX_BLOCK]};
}

__device__ __forceinline__ void dequantize_into(Panel &to, const Codes &from, int row, int half) {
    float scale = e8m0_value(from.scale);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 &sixteen = from.codes[i / 2];
        const unsigned words[2] = {i % 2 ? sixteen.z : sixteen.x, i % 2 ? sixteen.w : sixteen.y};
        unsigned pairs[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float low, high;
            e4m3_decode2(words[j / 2] >> (j % 2 * 16) & 0xFFFFu, low, high);
            pairs[j] = to_bf16(low * scale) | static_cast<unsigned>(to_bf16(high * scale)) << 16;
        }
        *to.at(row, half * 4 + i) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

__device__ __forceinline__ void write_group(const GroupSums &sums, bf16 *out, long long first_row,
                                            long long end_row, long long first_column,
                                            long long num_columns) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    first_row += warp * 16 + lane / 4;
    first_column += lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            long long row = first_row + i / 2 * 8, column = first_column + n * 8 + i % 2;
            if (row < end_row && column < num_columns)
                store(out + row * num_columns + column, sums[n][i]);
        }
}

// Returns the first expert whose tiles end after `tile`.
__device__ __forceinline__ int find_expert(const int *tile_ends, int num_experts, int tile) {
    int low = 0, high = num_experts - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (tile < tile_ends[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

// x [R, K] sorted by expert, codes [E, N, K], scales [E, N, K/32] -> out [R, N]. tile_ends [E]:
// running sum of ceil(rows / 64). Grid: [ceil(N / 64), at least tile_ends[E - 1]]. Blocks whose
// offsets are out of range write nothing, because offsets are checked only later
// (kernels/ops/checks.py).
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    mxfp8_grouped_matmul(const bf16 *x, const uint8_t *codes, const uint8_t *scales,
                         const int *offsets, const int *tile_ends, bf16 *out, int num_experts,
                         long long num_rows, long long num_columns, long long depth) {
    __shared__ Stages stages;
    int tile = static_cast<int>(blockIdx.y);
    if (tile >= tile_ends[num_experts - 1]) return;
    int expert = find_expert(tile_ends, num_experts, tile);
    int tiles_before = expert ? tile_ends[expert - 1] : 0;
    long long first_row = offsets[expert] + static_cast<long long>(tile - tiles_before) * TILE_M;
    long long end_row = offsets[expert + 1];
    if (first_row < 0 || end_row > num_rows) return;
    long long first_column = static_cast<long long>(blockIdx.x) * TILE_N;
    const uint8_t *own_codes = codes + expert * num_columns * depth;
    const uint8_t *own_scales = scales + expert * num_columns * (depth / MX_BLOCK);
    int row = threadIdx.x / 2, half = threadIdx.x % 2;
    int num_steps = static_cast<int>(depth / TILE_K);
    GroupSums sums = {};
    auto load = [&](int step) {
        long long k = static_cast<long long>(step < num_steps ? step : 0) * TILE_K + half * MX_BLOCK;
        return load_codes(own_codes, own_scales, first_column + row, num_columns, depth, k);
    };
    auto copy = [&](int step) {
        long long k = static_cast<long long>(step) * TILE_K;
        if (step < num_steps)
            copy_panel(stages.left[step % STAGES], x, first_row, end_row, depth, k);
        commit_copies();
    };
    for (int ahead = 0; ahead < STAGES - 1; ahead++) copy(ahead);
    Codes next = load(0);
    for (int step = 0; step < num_steps; step++) {
        int stage = step % STAGES;
        dequantize_into(stages.right[stage], next, row, half);  // during the previous products
        next = load(step + 1);
        wait_copies<STAGES - 2>();
        publish_to_tensor_cores();
        wait_group(sums);
        __syncthreads();
        copy(step + STAGES - 1);
        multiply_group(&stages.left[stage], &stages.right[stage], sums);
    }
    wait_group(sums);
    write_group(sums, out, first_row, end_row, first_column, num_columns);
}
