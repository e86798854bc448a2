// Row-wise kernels: the bits of a row's result depend only on that row.

#include "numbers.cuh"

constexpr int NORM_WARPS = 8;

// Each warp takes a row of [M, H].
template <class T>
__device__ __forceinline__ void rms_norm(const T *x, const T *weight, float eps, T *out,
                                         long long num_rows, long long width) {
    unsigned lane = threadIdx.x % 32;
    long long row = static_cast<long long>(blockIdx.x) * NORM_WARPS + threadIdx.x / 32;
    if (row >= num_rows) return;
    const T *from = x + row * width;
    float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f}, four[4], scale[4];
#pragma unroll 4
    for (long long k = lane * 4; k - lane * 4 < width; k += 128) {
        load4(from, k, width, four);
#pragma unroll
        for (int j = 0; j < 4; j++) lanes[j] = __fmaf_rn(four[j], four[j], lanes[j]);
    }
    float mean = __fdiv_rn(fold_lanes(lanes), static_cast<float>(width));
    float inverse = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll 4
    for (long long k = lane * 4; k < width; k += 128) {
        load4(from, k, width, four);
        load4(weight, k, width, scale);
#pragma unroll
        for (int j = 0; j < 4; j++) four[j] = four[j] * inverse * scale[j];
        store4(out + row * width, k, width, four);
    }
}

constexpr int LOGIT_CHUNK = 1024, NUM_CHUNKS_MAX = 512, LOGIT_THREADS = 512;
constexpr int ROUNDS = LOGIT_CHUNK / 128;

// Computes the maximum of a chunk and the sum of exponentials relative to it, for all lanes of a
// warp.
template <class T>
__device__ __forceinline__ void chunk_sum(const T *row, long long first, long long width,
                                          unsigned lane, float &top, float &sum) {
    float values[ROUNDS][4];
    top = -__uint_as_float(0x7F800000u);
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        long long k = first + i * 128 + lane * 4;
        load4(row, k, width, values[i]);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (k + j < width) top = fmaxf(top, values[i][j]);
    }
    top = warp_max(top);
    float shift = top < -3.4028234e38f ? 0.0f : top, lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < ROUNDS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first + i * 128 + lane * 4 + j < width)
                lanes[j] += exp_frozen(values[i][j] - shift);
    sum = fold_lanes(lanes);
}

// Each block takes a row of [N, V]: its warps take chunks in turn, then the first warp combines
// them.
template <class T>
__device__ __forceinline__ void token_logprobs(float *tops, float *sums, const T *logits,
                                               const long long *targets, float *out,
                                               long long width) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T *row = logits + blockIdx.x * width;
    int num_chunks = static_cast<int>((width + LOGIT_CHUNK - 1) / LOGIT_CHUNK);
    for (int chunk = warp; chunk < num_chunks; chunk += LOGIT_THREADS / 32) {
        float top, sum;
        chunk_sum(row, static_cast<long long>(chunk) * LOGIT_CHUNK, width, lane, top, sum);
        if (lane == 0) tops[chunk] = top, sums[chunk] = sum;
    }
    __syncthreads();
    if (warp) return;
    float top = -__uint_as_float(0x7F800000u), lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int chunk = lane; chunk < num_chunks; chunk += 32) top = fmaxf(top, tops[chunk]);
    top = warp_max(top);
    for (int first = lane * 4; first < num_chunks; first += 128)
        for (int j = 0; j < 4; j++)
            if (first + j < num_chunks)
                lanes[j] += sums[first + j] * exp_frozen(tops[first + j] - top);
    float total = fold_lanes(lanes);
    if (lane == 0) {
        long long target = targets[blockIdx.x];
        bool is_inside = target >= 0 && target < width;
        float chosen = is_inside ? to_float(row[target]) : __uint_as_float(0x7FC00000u);
        out[blockIdx.x] = (chosen - top) - log_frozen(total);
    }
}

// Each thread sums four elements of a token's [K, H] in slot order.
template <class T>
__device__ __forceinline__ void moe_combine(const T *per_slot, const float *weights, T *out,
                                            long long num_tokens, int num_chosen, long long width) {
    long long fours = (width + 3) / 4;
    long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long long token = index / fours, k = index % fours * 4;
    if (token >= num_tokens) return;
    const T *slots = per_slot + token * num_chosen * width;
    float four[4], total[4], weight = weights[token * num_chosen];
    load4(slots, k, width, four);
#pragma unroll
    for (int j = 0; j < 4; j++) total[j] = four[j] * weight;
#pragma unroll 4
    for (int slot = 1; slot < num_chosen; slot++) {
        weight = weights[token * num_chosen + slot];
        load4(slots + slot * width, k, width, four);
#pragma unroll
        for (int j = 0; j < 4; j++) total[j] = __fmaf_rn(four[j], weight, total[j]);
    }
    store4(out + token * width, k, width, total);
}

#define ROWS(NAME, T)                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * NORM_WARPS) rms_norm_##NAME(                 \
        const T *x, const T *weight, float eps, T *out, long long num_rows, long long width) {     \
        rms_norm(x, weight, eps, out, num_rows, width);                                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(LOGIT_THREADS, 1) token_logprobs_##NAME(             \
        const T *logits, const long long *targets, float *out, long long width) {                  \
        __shared__ float tops[NUM_CHUNKS_MAX], sums[NUM_CHUNKS_MAX];                               \
        token_logprobs(tops, sums, logits, targets, out, width);                                   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) moe_combine_##NAME(                          \
        const T *per_slot, const float *weights, T *out, long long num_tokens, int num_chosen,     \
        long long width) {                                                                         \
        moe_combine(per_slot, weights, out, num_tokens, num_chosen, width);                        \
    }

ROWS(f32, float)
ROWS(bf16, bf16)
