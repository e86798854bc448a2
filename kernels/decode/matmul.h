/* Matrix products with packed panels, and norms. */
#ifndef PENSTOCK_DECODE_MATMUL_H
#define PENSTOCK_DECODE_MATMUL_H
#include "vectors.h"

#define PANEL 32
#ifdef __AVX512F__
#define ROWS_MAX 12
#else
#define ROWS_MAX 4
#endif

/* Multiplies rows of x [.., K] by one panel -> rows of out. `rows` must be a constant, so that the
 * compiler keeps the sums in registers. */
static inline __attribute__((always_inline)) void panel_rows(
    const int rows, const float *x, long x_stride, const float *panel, long K, float *out,
    long out_stride, int columns) {
    v16 sum[ROWS_MAX][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = splat(0.0f);
    for (long k = 0; k < K; k++) {
        v16 w0 = *(const v16 *)(panel + k * PANEL), w1 = *(const v16 *)(panel + k * PANEL + 16);
        for (int r = 0; r < rows; r++) {
            float value = x[r * x_stride + k];
            sum[r][0] += value * w0;
            sum[r][1] += value * w1;
        }
    }
    for (int r = 0; r < rows; r++) {
        if (columns == PANEL) {
            *(v16 *)(out + r * out_stride) = sum[r][0];
            *(v16 *)(out + r * out_stride + 16) = sum[r][1];
        } else {
            memcpy(out + r * out_stride, sum[r], (size_t)columns * sizeof(float));
        }
    }
}

/* Multiplies x [M, K] by W^T (packed, N columns) -> out [M, N]. Each output is one sum over k in
 * order, so it does not depend on how rows are grouped. */
static void matmul(const float *x, long M, long K, const float *packed, long N, float *out) {
    for (long n = 0; n < N; n += PANEL) {
        const float *panel = packed + n * K;
        int columns = N - n < PANEL ? (int)(N - n) : PANEL;
        long m = 0;
        for (; m + ROWS_MAX <= M; m += ROWS_MAX)
            panel_rows(ROWS_MAX, x + m * K, K, panel, K, out + m * N + n, N, columns);
        const float *rest = x + m * K;
        float *to = out + m * N + n;
        switch (M - m) {
#define CASE(R) case R: panel_rows(R, rest, K, panel, K, to, N, columns); break;
#if ROWS_MAX > 4
            CASE(11) CASE(10) CASE(9) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4)
#endif
            CASE(3) CASE(2) CASE(1)
        }
    }
}

static void rms_norm(const float *x, const float *weight, float eps, long n, float *out) {
    v16 squares = splat(0.0f);
    for (long i = 0; i < n; i += 16) squares += *(const v16 *)(x + i) * *(const v16 *)(x + i);
    float scale = 1.0f / sqrtf(sum16(squares) / (float)n + eps);
    for (long i = 0; i < n; i += 16)
        *(v16 *)(out + i) = *(const v16 *)(x + i) * scale * *(const v16 *)(weight + i);
}

static void norm_and_rotate(float *x, const float *weight, float eps, long D, const float *cos,
                            const float *sin) {
    if (weight) rms_norm(x, weight, eps, D, x);
    long half = D / 2;
    for (long i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i] + first * sin[i];
    }
}

#endif
