/* Rounding to values that MXFP8 can represent. */
#ifndef PENSTOCK_DECODE_MXFP8_H
#define PENSTOCK_DECODE_MXFP8_H
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Returns 2^(code - 127). */
static inline float e8m0_value(uint32_t code) {
    return from_bits(code ? code << 23 : 0x00400000u);
}

/* Returns the code of the smallest power of two that is at least largest / 448. */
static inline uint32_t e8m0_scale(uint32_t largest) {
    uint32_t bits = to_bits(from_bits(largest) / 448.0f);
    uint32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    uint32_t code = exponent + (mantissa > (exponent ? 0u : 0x400000u));
    return code < 254u ? code : 254u;
}

/* Rounds n floats in blocks of 32 to values that MXFP8 can represent, by the rules of
 * kernels/reference/quantize.py. */
static void round_mxfp8(float *x, long n) {
    for (float *block = x; block < x + n; block += 32) {
        uint32_t largest = 0;
        for (int i = 0; i < 32; i++) {
            uint32_t size = to_bits(block[i]) & 0x7FFFFFFFu;
            largest = size > largest ? size : largest;
        }
        int is_nan = largest > 0x7F800000u;
        uint32_t code = e8m0_scale(largest);
        float scale = is_nan ? NAN : e8m0_value(code), inverse = e8m0_value(254u - code);
        for (int i = 0; i < 32; i++) {
            float value = block[i] * inverse;
            uint32_t bits = to_bits(value), size = bits & 0x7FFFFFFFu;
            size = size < 0x43E00000u ? size : 0x43E00000u; /* 448 */
            uint32_t normal = (size + 0x7FFFFu + (size >> 20 & 1u)) & 0xFFF00000u;
            /* Below 2^-6 the spacing is 2^-9; adding 1.5 * 2^14 rounds to it. */
            float small = (from_bits(size) + 24576.0f) - 24576.0f;
            float rounded = size < 0x3C800000u ? small : from_bits(normal);
            block[i] = from_bits(to_bits(rounded) | (bits & 0x80000000u)) * scale;
        }
    }
}

#endif
