// Number formats of MXFP8; kernels/reference/quantize.py defines the rounding.
#pragma once

#include "numbers.cuh"

constexpr int MX_BLOCK = 32;

// Returns the scale code of a block, given its largest abs_bits: amax / 448 rounded up to a power
// of two.
__device__ __forceinline__ unsigned e8m0_scale(unsigned amax) {
    unsigned bits = __float_as_uint(__fdiv_rn(__uint_as_float(amax), 448.0f));
    unsigned exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    unsigned code = exponent + (mantissa > (exponent ? 0u : 0x400000u));
    return amax > 0x7F800000u ? 255u : min(code, 254u);
}

// Returns 2^(code - 127), or NaN for 255.
__device__ __forceinline__ float e8m0_value(unsigned code) {
    if (code == 255u) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(code ? code << 23 : 0x00400000u);
}
__device__ __forceinline__ float e8m0_inverse(unsigned code) {
    return e8m0_value(code == 255u ? code : 254u - code);
}

__device__ __forceinline__ unsigned e4m3_encode4(const float *four, float inverse) {
    return e4m3_encode2(four[0] * inverse, four[1] * inverse) |
           e4m3_encode2(four[2] * inverse, four[3] * inverse) << 16;
}

// Unpacks 16 bytes into 8 bf16 or 4 float values.
__device__ __forceinline__ void unpack16(const uint4 &bytes, float (&to)[8]) {
    const unsigned words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    for (int i = 0; i < 4; i++) {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
}
__device__ __forceinline__ void unpack16(const uint4 &bytes, float (&to)[4]) {
    to[0] = __uint_as_float(bytes.x), to[1] = __uint_as_float(bytes.y);
    to[2] = __uint_as_float(bytes.z), to[3] = __uint_as_float(bytes.w);
}
