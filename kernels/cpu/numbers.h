/* The frozen float32 arithmetic on the CPU: the operations of kernels/reference/float32.py, in their
 * order, so the same bits. Compile with -ffp-contract=off: what is fused says so.
 *
 * bf16 is uint16_t; dtype 0 is float32, 1 bf16. Loops over lanes become vectors.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 128
#define CHUNK 1024
#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE uint32_t abs_bits(float x) { return to_bits(x) & 0x7FFFFFFFu; }
INLINE float from_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }
INLINE uint16_t to_bf16(float x) {
    uint32_t bits = to_bits(x), rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(abs_bits(x) > 0x7F800000u ? 0x7FC0u : rounded);
}
INLINE float max_of(float a, float b) { return b > a ? b : a; } /* a NaN in b is passed over */

/* n elements from `first` on, as float. */
INLINE void load(const void *x, int dtype, long first, long n, float *to) {
    if (dtype)
        for (long i = 0; i < n; i++) to[i] = from_bf16(((const uint16_t *)x)[first + i]);
    else
        memcpy(to, (const float *)x + first, n * sizeof(float));
}
INLINE void store(void *x, int dtype, long first, long n, const float *from) {
    if (dtype)
        for (long i = 0; i < n; i++) ((uint16_t *)x)[first + i] = to_bf16(from[i]);
    else
        memcpy((float *)x + first, from, n * sizeof(float));
}

INLINE float exp_frozen(float x) {
    const float magic = 12582912.0f;
    float shifted = __builtin_fmaf(x, 1.44269504088896341f, magic), n = shifted - magic;
    float r = __builtin_fmaf(n, -0.693359375f, x), p = 1.9875691500e-4f;
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    float y = __builtin_fmaf(p, r * r, r) + 1.0f;
    y *= from_bits((to_bits(shifted) - to_bits(magic) + 127u) << 23);
    return x < -87.0f ? 0.0f : y;
}

INLINE float log_frozen(float x) {
    static const float terms[] = {
        -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
        -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    uint32_t bits = to_bits(x);
    if (abs_bits(x) >= 0x7F800000u) return x;
    float m = from_bits((bits & 0x7FFFFFu) | 0x3F000000u);
    int is_low = m < 0.70710678118654752f;
    float e = (float)((int)(bits >> 23) - 126 - is_low), p = 7.0376836292e-2f;
    m = (is_low ? m + m : m) - 1.0f;
    float z = m * m;
    for (int i = 0; i < 8; i++) p = __builtin_fmaf(p, m, terms[i]);
    float y = __builtin_fmaf(e, -2.12194440e-4f, p * m * z);
    y = __builtin_fmaf(z, -0.5f, y);
    return __builtin_fmaf(e, 0.693359375f, m + y);
}

INLINE float fold_lanes(float *lanes) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
