/* MXFP8: quantize by rows and by columns, dequantize. x is [M, K] row-major; rules in
 * kernels/reference/formats.py.
 */
#include "numbers.h"

#define BLOCK 32

INLINE uint8_t scale_of(uint32_t amax) {
    uint32_t bits = to_bits(from_bits(amax) / 448.0f), exponent = bits >> 23;
    uint32_t code = exponent + ((bits & 0x7FFFFFu) > (exponent ? 0u : 0x400000u));
    return amax > 0x7F800000u ? 255 : (uint8_t)(code < 254u ? code : 254u);
}
INLINE float scale_value(uint32_t code) {
    return from_bits(code == 255 ? 0x7FC00000u : code ? code << 23 : 0x00400000u);
}
INLINE float scale_inverse(uint32_t code) { return scale_value(code == 255 ? code : 254 - code); }

INLINE uint8_t e4m3(float x) {
    uint32_t bits = abs_bits(x), sign = (to_bits(x) >> 24) & 0x80u;
    uint32_t size = bits < 0x43E00000u ? bits : 0x43E00000u;
    uint32_t normal = ((size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
    /* Adding 2^14 rounds to a multiple of 2^-9, the smallest step. */
    uint32_t small = to_bits(from_bits(size) + 16384.0f) - 0x46800000u;
    uint32_t code = sign | (size < (121u << 23) ? small : normal);
    return (uint8_t)(bits > 0x7F800000u ? 0x7Fu : code);
}

void penstock_mxfp8_rows(const void *x, int dtype, long rows, long columns, uint8_t *codes,
                         uint8_t *scales) {
    for (long block = 0; block < rows * (columns / BLOCK); block++) {
        float values[BLOCK];
        uint32_t amax = 0;
        load(x, dtype, block * BLOCK, BLOCK, values);
        for (int i = 0; i < BLOCK; i++) {
            uint32_t bits = abs_bits(values[i]);
            amax = bits > amax ? bits : amax;
        }
        scales[block] = scale_of(amax);
        float inverse = scale_inverse(scales[block]);
        for (int i = 0; i < BLOCK; i++) codes[block * BLOCK + i] = e4m3(values[i] * inverse);
    }
}

void penstock_mxfp8_columns(const void *x, int dtype, long rows, long columns, uint8_t *codes,
                            uint8_t *scales) {
    for (long band = 0; band < rows / BLOCK; band++)
        for (long first = 0; first < columns; first += BLOCK) {
            float values[BLOCK][BLOCK], inverse[BLOCK];
            uint32_t amax[BLOCK] = {0};
            long corner = band * BLOCK * columns + first;
            for (int r = 0; r < BLOCK; r++) {
                load(x, dtype, corner + r * columns, BLOCK, values[r]);
                for (int c = 0; c < BLOCK; c++) {
                    uint32_t bits = abs_bits(values[r][c]);
                    amax[c] = bits > amax[c] ? bits : amax[c];
                }
            }
            for (int c = 0; c < BLOCK; c++) {
                uint8_t scale = scale_of(amax[c]);
                scales[band * columns + first + c] = scale;
                inverse[c] = scale_inverse(scale);
            }
            for (int r = 0; r < BLOCK; r++)
                for (int c = 0; c < BLOCK; c++)
                    codes[corner + r * columns + c] = e4m3(values[r][c] * inverse[c]);
        }
}

static float e4m3_values[256];

__attribute__((constructor)) static void fill_e4m3_values(void) {
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        float size = exponent ? ldexpf(8.0f + mantissa, exponent - 10) : ldexpf(mantissa, -9);
        if ((code & 0x7F) == 0x7F) size = NAN;
        e4m3_values[code] = code & 0x80 ? -size : size;
    }
}

void penstock_mxfp8_dequantize(const uint8_t *codes, const uint8_t *scales, int by_rows, int dtype,
                               long rows, long columns, void *out) {
    for (long row = 0; row < rows; row++)
        for (long first = 0; first < columns; first += BLOCK) {
            float values[BLOCK];
            long place = row * columns + first;
            for (int i = 0; i < BLOCK; i++) values[i] = e4m3_values[codes[place + i]];
            if (by_rows) {
                float scale = scale_value(scales[place / BLOCK]);
                for (int i = 0; i < BLOCK; i++) values[i] *= scale;
            } else {
                const uint8_t *own = scales + row / BLOCK * columns + first;
                for (int i = 0; i < BLOCK; i++) values[i] *= scale_value(own[i]);
            }
            store(out, dtype, place, BLOCK, values);
        }
}
