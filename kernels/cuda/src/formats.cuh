// MXFP8's formats; the rules stand in kernels/reference/formats.py.
#pragma once

#include "numbers.cuh"

constexpr int MX_BLOCK = 32;

// The scale code of a block from its largest abs_bits: amax / 448 rounded up to a power of two.
__device__ __forceinline__ unsigned e8m0_scale(unsigned amax) {
    unsigned bits = __float_as_uint(__fdiv_rn(__uint_as_float(amax), 448.0f));
    unsigned exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    unsigned code = exponent + (mantissa > (exponent ? 0u : 0x400000u));
    return amax > 0x7F800000u ? 255u : min(code, 254u);
}

// 2^(code - 127); NaN for 255.
__device__ __forceinline__ float e8m0_value(unsigned code) {
    if (code == 255u) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(code ? code << 23 : 0x00400000u);
}
__device__ __forceinline__ float e8m0_inverse(unsigned code) {
    return e8m0_value(code == 255u ? code : 254u - code);
}

#ifdef __CUDACC__
__device__ __forceinline__ unsigned e4m3_encode2(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ void e4m3_decode2(unsigned pair, float &low, float &high) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(halves));
}
#else
static inline unsigned e4m3_encode1(float x) {
    unsigned bits = abs_bits(x), sign = (__float_as_uint(x) >> 24) & 0x80u;
    if (bits > 0x7F800000u) return 0x7Fu;
    unsigned clamped = min(bits, 0x43E00000u);
    if (clamped < (121u << 23))
        return sign | static_cast<unsigned>(nearbyintf(__uint_as_float(clamped) * 512.0f));
    return sign | (((clamped + 0x7FFFFu + ((clamped >> 20) & 1u)) >> 20) - (120u << 3));
}
static inline unsigned e4m3_encode2(float low, float high) {
    return e4m3_encode1(low) | e4m3_encode1(high) << 8;
}
static inline float e4m3_decode1(unsigned code) {
    unsigned exponent = (code >> 3) & 15u, mantissa = code & 7u;
    float size = exponent ? ldexpf(8.0f + mantissa, static_cast<int>(exponent) - 10)
                          : ldexpf(static_cast<float>(mantissa), -9);
    if ((code & 0x7Fu) == 0x7Fu) size = NAN;
    return code & 0x80u ? -size : size;
}
static inline void e4m3_decode2(unsigned pair, float &low, float &high) {
    low = e4m3_decode1(pair & 0xFFu);
    high = e4m3_decode1((pair >> 8) & 0xFFu);
}
#endif

__device__ __forceinline__ unsigned e4m3_encode4(const float *four, float inverse) {
    return e4m3_encode2(four[0] * inverse, four[1] * inverse) |
           e4m3_encode2(four[2] * inverse, four[3] * inverse) << 16;
}

// 16 bytes of values: 8 bf16 or 4 float.
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
