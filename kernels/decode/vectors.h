/* Vectors of sixteen floats, whose sums always have the same order. */
#ifndef PENSTOCK_DECODE_VECTORS_H
#define PENSTOCK_DECODE_VECTORS_H
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));

static inline v16 select16(i16 mask, v16 yes, v16 no) {
    return (v16)((mask & (i16)yes) | (~mask & (i16)no));
}

static inline v16 splat(float x) { return (v16){0} + x; }

static inline float sum16(v16 a) {
    float s[16];
    memcpy(s, &a, sizeof s);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

static inline float max16(v16 a) {
    float m = a[0];
    for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m;
    return m;
}

/* Returns e^x to about one ulp: splits off a power of two, then uses a degree-6 polynomial. */
static inline v16 exp16(v16 x) {
    const v16 low = splat(-87.0f), high = splat(88.0f);
    x = select16(x < low, low, x);
    x = select16(x > high, high, x);
    const v16 magic = splat(12582912.0f); /* 1.5 * 2^23; adding it rounds to an integer */
    v16 shifted = x * 1.44269504088896341f + magic;
    v16 n = shifted - magic;
    v16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i16 power = ((i16)shifted - (i16)magic + 127) << 23;
    return p * (v16)power;
}

static inline v16 exp_or_zero(v16 x) {
    return select16(x == splat(-INFINITY), splat(0.0f), exp16(x));
}

#endif
