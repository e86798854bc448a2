// float32 arithmetic with the same operations in the same order as kernels/reference/float32.py.
// Compile with -fmad=false, because only explicit fused multiply-adds may be fused.
//
// `instructions.cuh` wraps single instructions; the CPU build of the tests replaces only that file.
#pragma once

#include <stdint.h>

typedef uint16_t bf16;
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

__device__ __forceinline__ unsigned abs_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) {
    return __uint_as_float(static_cast<unsigned>(x) << 16);
}

#include <instructions.cuh> // to_bf16

__device__ __forceinline__ void store(float *to, float x) { *to = x; }
__device__ __forceinline__ void store(bf16 *to, float x) { *to = to_bf16(x); }

// Returns e^x for x <= 88, and 0 below -87.
__device__ __forceinline__ float exp_frozen(float x) {
    const float magic = 12582912.0f;
    float shifted = __fmaf_rn(x, 1.44269504088896341f, magic);
    float n = shifted - magic;
    float r = __fmaf_rn(n, -0.693359375f, x);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __fmaf_rn(p, r, 1.3981999507e-3f);
    p = __fmaf_rn(p, r, 8.3334519073e-3f);
    p = __fmaf_rn(p, r, 4.1665795894e-2f);
    p = __fmaf_rn(p, r, 1.6666665459e-1f);
    p = __fmaf_rn(p, r, 5.0000001201e-1f);
    float y = __fmaf_rn(p, r * r, r) + 1.0f;
    unsigned power = (__float_as_uint(shifted) - __float_as_uint(magic) + 127u) << 23;
    return x < -87.0f ? 0.0f : y * __uint_as_float(power);
}

// Returns ln(x) for positive normal numbers; infinity and NaN are returned as they are.
__device__ __forceinline__ float log_frozen(float x) {
    unsigned bits = __float_as_uint(x);
    float m = __uint_as_float((bits & 0x7FFFFFu) | 0x3F000000u);
    int exponent = static_cast<int>(bits >> 23) - 126;
    bool is_low = m < 0.70710678118654752f;
    float e = static_cast<float>(is_low ? exponent - 1 : exponent);
    m = (is_low ? m + m : m) - 1.0f;
    float z = m * m;
    float p = 7.0376836292e-2f;
    p = __fmaf_rn(p, m, -1.1514610310e-1f);
    p = __fmaf_rn(p, m, 1.1676998740e-1f);
    p = __fmaf_rn(p, m, -1.2420140846e-1f);
    p = __fmaf_rn(p, m, 1.4249322787e-1f);
    p = __fmaf_rn(p, m, -1.6668057665e-1f);
    p = __fmaf_rn(p, m, 2.0000714765e-1f);
    p = __fmaf_rn(p, m, -2.4999993993e-1f);
    p = __fmaf_rn(p, m, 3.3333331174e-1f);
    float y = __fmaf_rn(e, -2.12194440e-4f, p * m * z);
    y = __fmaf_rn(z, -0.5f, y);
    float result = __fmaf_rn(e, 0.693359375f, m + y);
    return abs_bits(x) < 0x7F800000u ? result : x;
}

// Finishes a 128-lane sum in which thread l of a warp holds lanes 4l to 4l + 3. All threads get
// the sum.
__device__ __forceinline__ float fold_lanes(float (&lanes)[4]) {
    for (int mask = 16; mask; mask /= 2)
        for (int j = 0; j < 4; j++) lanes[j] += __shfl_xor_sync(FULL_WARP, lanes[j], mask);
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

__device__ __forceinline__ float warp_max(float x) {
    for (int mask = 16; mask; mask /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, mask));
    return x;
}

// Loads four elements of a row, starting at k, with zeros past its end. Vector loads need a width
// that is a multiple of four: only then are all rows aligned.
__device__ __forceinline__ void load4(const float *row, long long k, long long width,
                                      float (&to)[4]) {
    if (width % 4 == 0 && k < width) {
        float4 four = *reinterpret_cast<const float4 *>(row + k);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        for (int j = 0; j < 4; j++) to[j] = k + j < width ? row[k + j] : 0.0f;
    }
}
__device__ __forceinline__ void load4(const bf16 *row, long long k, long long width,
                                      float (&to)[4]) {
    if (width % 4 == 0 && k < width) {
        uint2 four = *reinterpret_cast<const uint2 *>(row + k);
        to[0] = __uint_as_float(four.x << 16), to[1] = __uint_as_float(four.x & 0xFFFF0000u);
        to[2] = __uint_as_float(four.y << 16), to[3] = __uint_as_float(four.y & 0xFFFF0000u);
    } else {
        for (int j = 0; j < 4; j++) to[j] = k + j < width ? to_float(row[k + j]) : 0.0f;
    }
}
__device__ __forceinline__ void store4(float *row, long long k, long long width,
                                       const float (&from)[4]) {
    if (width % 4 == 0 && k < width) {
        *reinterpret_cast<float4 *>(row + k) = make_float4(from[0], from[1], from[2], from[3]);
    } else {
        for (int j = 0; j < 4; j++)
            if (k + j < width) row[k + j] = from[j];
    }
}
__device__ __forceinline__ void store4(bf16 *row, long long k, long long width,
                                       const float (&from)[4]) {
    if (width % 4 == 0 && k < width) {
        *reinterpret_cast<uint2 *>(row + k) =
            make_uint2(to_bf16(from[0]) | static_cast<unsigned>(to_bf16(from[1])) << 16,
                       to_bf16(from[2]) | static_cast<unsigned>(to_bf16(from[3])) << 16);
    } else {
        for (int j = 0; j < 4; j++)
            if (k + j < width) row[k + j] = to_bf16(from[j]);
    }
}
