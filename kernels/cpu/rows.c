/* Norms, log-probabilities and products whose bits depend on their own row alone. */
#include "numbers.h"

/* lanes += a * b over n <= LANES elements. */
INLINE void add_products(float *lanes, const float *a, const float *b, long n) {
    if (n == LANES)
        for (int i = 0; i < LANES; i++) lanes[i] = __builtin_fmaf(a[i], b[i], lanes[i]);
    else
        for (long i = 0; i < n; i++) lanes[i] = __builtin_fmaf(a[i], b[i], lanes[i]);
}

void penstock_rms_norm(const void *x, const void *weight, int dtype, float eps, long rows, long width,
                       void *out) {
    for (long row = 0; row < rows; row++) {
        float lanes[LANES] = {0.0f}, values[LANES], scale[LANES];
        for (long k = 0; k < width; k += LANES) {
            long n = width - k < LANES ? width - k : LANES;
            load(x, dtype, row * width + k, n, values);
            add_products(lanes, values, values, n);
        }
        float inverse = 1.0f / sqrtf(fold_lanes(lanes) / (float)width + eps);
        for (long k = 0; k < width; k += LANES) {
            long n = width - k < LANES ? width - k : LANES;
            load(x, dtype, row * width + k, n, values);
            load(weight, dtype, k, n, scale);
            for (long i = 0; i < n; i++) values[i] = values[i] * inverse * scale[i];
            store(out, dtype, row * width + k, n, values);
        }
    }
}

INLINE void chunk_sum(const float *values, long n, float *top, float *sum) {
    float lanes[LANES] = {0.0f}, terms[CHUNK], largest = -INFINITY;
    for (long i = 0; i < n; i++) largest = max_of(largest, values[i]);
    float shift = largest == -INFINITY ? 0.0f : largest;
    for (long i = 0; i < n; i++) terms[i] = exp_frozen(values[i] - shift);
    for (long i = n; i < CHUNK; i++) terms[i] = 0.0f;
    for (int k = 0; k < CHUNK; k += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] += terms[k + i];
    *top = largest;
    *sum = fold_lanes(lanes);
}

void penstock_token_logprobs(const void *logits, int dtype, const int64_t *targets, long rows,
                             long width, float *out) {
    float tops[512], sums[512], values[CHUNK];
    for (long row = 0; row < rows; row++) {
        float top = -INFINITY, lanes[LANES] = {0.0f}, chosen;
        int chunks = 0;
        for (long first = 0; first < width; first += CHUNK, chunks++) {
            long n = width - first < CHUNK ? width - first : CHUNK;
            load(logits, dtype, row * width + first, n, values);
            chunk_sum(values, n, tops + chunks, sums + chunks);
            top = max_of(top, tops[chunks]);
        }
        for (int c = 0; c < chunks; c++) lanes[c % LANES] += sums[c] * exp_frozen(tops[c] - top);
        load(logits, dtype, row * width + targets[row], 1, &chosen);
        out[row] = (chosen - top) - log_frozen(fold_lanes(lanes));
    }
}

/* x [M, K] times weight [N, K] transposed. */
void penstock_matmul(const float *x, const float *weight, long rows, long columns, long depth,
                     float *out) {
    for (long n = 0; n < columns; n++)
        for (long m = 0; m < rows; m++) {
            float lanes[LANES] = {0.0f};
            const float *a = x + m * depth, *b = weight + n * depth;
            long k = 0;
            for (; k + LANES <= depth; k += LANES) add_products(lanes, a + k, b + k, LANES);
            if (k < depth) add_products(lanes, a + k, b + k, depth - k);
            out[m * columns + n] = fold_lanes(lanes);
        }
}
