// bfloat16 products on tensor cores (mma.sync) for decode shapes and for MXFP8 experts.
//
// Every output adds its K in one order, 16 at a time, fixed by the tile and the split of K; neither
// depends on the number of rows, so a row's bits are the same in any batch. MXFP8 weights are
// dequantized to bfloat16 on the way to shared memory, which is exact for scales 3..246.

#include "formats.cuh"
#include "tensor_cores.cuh"

constexpr int TILE_M = 64, TILE_N = 64, TILE_K = 64, STAGES = 3, GEMM_THREADS = 128;
constexpr int CHUNK = 8, ROW_CHUNKS = TILE_K / CHUNK;

// 64 rows of 64 values; the 16-byte chunks of a row are swapped by row, so that the eight rows that a
// fragment reads lie in different banks.
struct Panel {
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

// Starts copying 64 rows from `first` on, and 64 columns from k on; rows past the end are zeros.
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

// A warp's quarter of the tile: 32 x 32 as 2 x 4 products of 16 x 8.
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

// Part z of K into partial[z] [M, N]; grid [ceil(N / 64), ceil(M / 64) * num_splits].
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

// Adds the parts of K in order and rounds once.
extern "C" __global__ void __launch_bounds__(256)
    matmul_join(const float *partial, bf16 *out, long long count, int num_splits) {
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float total = partial[i];
    for (int split = 1; split < num_splits; split++) total += partial[split * count + i];
    out[i] = to_bf16(total);
}

// One 1x32 block of a weight's row, held in registers between its load and its use.
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

// The first expert whose tiles end after `tile`.
__device__ __forceinline__ int find_expert(const int *tile_ends, int num_experts, int tile) {
    int low = 0, high = num_experts - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (tile < tile_ends[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

// x [R, K] sorted by expert, codes [E, N, K], scales [E, N, K/32] -> out [R, N]. tile_ends [E]: the
// running sum of ceil(rows / 64). grid [ceil(N / 64), at least tile_ends[E - 1]]. Offsets that are not
// those of R rows give nothing.
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
    Sums sums = {};
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
        dequantize_into(stages.right[stage], next, row, half);
        next = load(step + 1);
        wait_copies<STAGES - 2>();
        __syncthreads();
        copy(step + STAGES - 1);
        multiply_panels(stages.left[stage], stages.right[stage], sums);
    }
    write_sums(sums, out, first_row, end_row, first_column, num_columns);
}
