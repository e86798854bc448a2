// MXFP8: quantization of row-major x [M, K] by rows, by columns or both in one pass, and
// dequantization.

#include "formats.cuh"

// Each thread takes 16 elements, half of a 1x32 block; num_halves = M * K / 16.
template <class T>
__device__ __forceinline__ void quantize_rows(const T *x, uint8_t *codes, uint8_t *scales,
                                              long long num_halves) {
    constexpr int PER_LOAD = 16 / sizeof(T), LOADS = 16 / PER_LOAD;
    long long half = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    bool is_inside = half < num_halves;
    float values[LOADS][PER_LOAD];
    unsigned amax = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        uint4 bytes = make_uint4(0, 0, 0, 0);
        if (is_inside) bytes = reinterpret_cast<const uint4 *>(x)[half * LOADS + i];
        unpack16(bytes, values[i]);
#pragma unroll
        for (int j = 0; j < PER_LOAD; j++) amax = max(amax, abs_bits(values[i][j]));
    }
    amax = max(amax, __shfl_xor_sync(FULL_WARP, amax, 1));
    unsigned scale = e8m0_scale(amax);
    float inverse = e8m0_inverse(scale);
    const float *flat = &values[0][0];
    uint4 packed = make_uint4(e4m3_encode4(flat, inverse), e4m3_encode4(flat + 4, inverse),
                              e4m3_encode4(flat + 8, inverse), e4m3_encode4(flat + 12, inverse));
    if (!is_inside) return;
    reinterpret_cast<uint4 *>(codes)[half] = packed;
    if (half % 2 == 0) scales[half / 2] = static_cast<uint8_t>(scale);
}

constexpr int TILE_ROWS = MX_BLOCK, TILE_COLUMNS = 256, TILE_THREADS = 256;

template <class T> struct Tile {
    T values[TILE_ROWS][TILE_COLUMNS];
    uint8_t codes[TILE_ROWS][TILE_COLUMNS];
};

// Copies the codes of a tile to global memory, 16 bytes per thread and iteration.
__device__ __forceinline__ void write_codes(const uint8_t (&codes)[TILE_ROWS][TILE_COLUMNS],
                                            uint8_t *to, long long first_row,
                                            long long first_column, long long num_columns) {
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_ROWS * TILE_COLUMNS / 16; i += TILE_THREADS) {
        int row = i / (TILE_COLUMNS / 16), column = i % (TILE_COLUMNS / 16) * 16;
        if (first_column + column < num_columns)
            *reinterpret_cast<uint4 *>(to + (first_row + row) * num_columns + first_column +
                                       column) =
                *reinterpret_cast<const uint4 *>(&codes[row][column]);
    }
    __syncthreads();
}

// Each thread takes a 32x1 block.
template <class T>
__device__ __forceinline__ void tile_columns(Tile<T> &tile, uint8_t *codes, uint8_t *scales,
                                             long long first_column, long long num_columns) {
    int column = threadIdx.x;
    unsigned amax = 0;
#pragma unroll 8
    for (int row = 0; row < TILE_ROWS; row++)
        amax = max(amax, abs_bits(to_float(tile.values[row][column])));
    unsigned scale = e8m0_scale(amax);
    float inverse = e8m0_inverse(scale);
#pragma unroll 4
    for (int row = 0; row < TILE_ROWS; row += 2) {
        unsigned pair = e4m3_encode2(to_float(tile.values[row][column]) * inverse,
                                     to_float(tile.values[row + 1][column]) * inverse);
        tile.codes[row][column] = static_cast<uint8_t>(pair);
        tile.codes[row + 1][column] = static_cast<uint8_t>(pair >> 8);
    }
    if (first_column + column < num_columns)
        scales[blockIdx.y * num_columns + first_column + column] = static_cast<uint8_t>(scale);
    write_codes(tile.codes, codes, blockIdx.y * TILE_ROWS, first_column, num_columns);
}

// Each thread takes a 1x32 block. Threads start at different 16-byte chunks, to avoid bank
// conflicts within a quarter warp.
template <class T>
__device__ __forceinline__ void tile_rows(Tile<T> &tile, uint8_t *codes, uint8_t *scales,
                                          long long first_column, long long num_columns) {
    constexpr int CHUNKS = MX_BLOCK * sizeof(T) / 16, PER_CHUNK = 16 / sizeof(T);
    constexpr int BLOCKS = TILE_COLUMNS / MX_BLOCK;
    int row = threadIdx.x / BLOCKS, block = threadIdx.x % BLOCKS;
    int turn = threadIdx.x * CHUNKS / 8;
    const T *values = &tile.values[row][block * MX_BLOCK];
    float chunk[PER_CHUNK];
    unsigned amax = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        int place = (i + turn) % CHUNKS * PER_CHUNK;
        unpack16(*reinterpret_cast<const uint4 *>(values + place), chunk);
#pragma unroll
        for (int j = 0; j < PER_CHUNK; j++) amax = max(amax, abs_bits(chunk[j]));
    }
    unsigned scale = e8m0_scale(amax);
    float inverse = e8m0_inverse(scale);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        int place = (i + turn) % CHUNKS * PER_CHUNK;
        unpack16(*reinterpret_cast<const uint4 *>(values + place), chunk);
#pragma unroll
        for (int j = 0; j < PER_CHUNK; j += 4)
            *reinterpret_cast<unsigned *>(&tile.codes[row][block * MX_BLOCK + place + j]) =
                e4m3_encode4(chunk + j, inverse);
    }
    long long column = first_column / MX_BLOCK + block, width = num_columns / MX_BLOCK;
    if (column < width)
        scales[(blockIdx.y * TILE_ROWS + row) * width + column] = static_cast<uint8_t>(scale);
    write_codes(tile.codes, codes, blockIdx.y * TILE_ROWS, first_column, num_columns);
}

// Each thread block takes a tile of 32 x 256. Grid: [ceil(K / 256), M / 32]. row_codes may be null.
template <class T>
__device__ __forceinline__ void quantize_tile(Tile<T> &tile, const T *x, uint8_t *row_codes,
                                              uint8_t *row_scales, uint8_t *column_codes,
                                              uint8_t *column_scales, long long num_columns) {
    constexpr int PER_LOAD = 16 / sizeof(T), LOADS = TILE_COLUMNS / PER_LOAD;
    long long first_column = static_cast<long long>(blockIdx.x) * TILE_COLUMNS;
    const T *from = x + blockIdx.y * TILE_ROWS * num_columns + first_column;
    for (int i = threadIdx.x; i < TILE_ROWS * LOADS; i += TILE_THREADS) {
        int row = i / LOADS, column = i % LOADS * PER_LOAD;
        uint4 bytes = make_uint4(0, 0, 0, 0);
        if (first_column + column < num_columns)
            bytes = *reinterpret_cast<const uint4 *>(from + row * num_columns + column);
        *reinterpret_cast<uint4 *>(&tile.values[row][column]) = bytes;
    }
    __syncthreads();
    tile_columns(tile, column_codes, column_scales, first_column, num_columns);
    if (row_codes) tile_rows(tile, row_codes, row_scales, first_column, num_columns);
}

// Each thread takes a group of 16 consecutive codes of a row.
template <class T, bool BY_ROWS>
__device__ __forceinline__ void dequantize(const uint8_t *codes, const uint8_t *scales, T *out,
                                           long long num_groups, long long num_columns) {
    long long group = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (group >= num_groups) return;
    uint4 code_bytes = reinterpret_cast<const uint4 *>(codes)[group], scale_bytes;
    if (BY_ROWS) {
        unsigned scale = scales[group / 2] * 0x01010101u;
        scale_bytes = make_uint4(scale, scale, scale, scale);
    } else {
        long long row = group * 16 / num_columns, column = group * 16 % num_columns;
        scale_bytes =
            *reinterpret_cast<const uint4 *>(scales + row / MX_BLOCK * num_columns + column);
    }
    const unsigned code_words[4] = {code_bytes.x, code_bytes.y, code_bytes.z, code_bytes.w};
    const unsigned scale_words[4] = {scale_bytes.x, scale_bytes.y, scale_bytes.z, scale_bytes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float four[4];
        e4m3_decode2(code_words[i] & 0xFFFFu, four[0], four[1]);
        e4m3_decode2(code_words[i] >> 16, four[2], four[3]);
#pragma unroll
        for (int j = 0; j < 4; j++) four[j] *= e8m0_value(scale_words[i] >> (8 * j) & 0xFFu);
        store4(out + group * 16, 4 * i, 16, four);
    }
}

#define QUANTIZE(NAME, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) mxfp8_rows_##NAME(                         \
        const T *x, uint8_t *codes, uint8_t *scales, long long num_halves) {                     \
        quantize_rows(x, codes, scales, num_halves);                                             \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) mxfp8_tile_##NAME(                         \
        const T *x, uint8_t *row_codes, uint8_t *row_scales, uint8_t *column_codes,              \
        uint8_t *column_scales, long long num_columns) {                                         \
        __shared__ Tile<T> tile;                                                                 \
        quantize_tile(tile, x, row_codes, row_scales, column_codes, column_scales, num_columns); \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) mxfp8_dequantize_rows_##NAME(              \
        const uint8_t *codes, const uint8_t *scales, T *out, long long num_groups,               \
        long long num_columns) {                                                                 \
        dequantize<T, true>(codes, scales, out, num_groups, num_columns);                        \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) mxfp8_dequantize_columns_##NAME(           \
        const uint8_t *codes, const uint8_t *scales, T *out, long long num_groups,               \
        long long num_columns) {                                                                 \
        dequantize<T, false>(codes, scales, out, num_groups, num_columns);                       \
    }

QUANTIZE(f32, float)
QUANTIZE(bf16, bf16)
