/* 64 elements at once: which differ, and which have a key that is high enough, as bits of a mask. */
#ifndef PENSTOCK_LANES_H
#define PENSTOCK_LANES_H
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define BLOCK 64
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t load(const uint8_t *array, int64_t i, const int itemsize) {
    uint32_t value = 0;
    memcpy(&value, array + i * itemsize, (size_t)itemsize);
    return value;
}

#ifdef __AVX512BW__

typedef struct {
    __m512i part[4];
} lanes_t;

INLINE lanes_t lanes_at(const uint8_t *block, const int itemsize) {
    lanes_t lanes;
    for (int i = 0; i < itemsize; i++) lanes.part[i] = _mm512_loadu_si512(block + 64 * i);
    return lanes;
}

INLINE __m512i every(uint32_t value, const int itemsize) {
    if (itemsize == 1) return _mm512_set1_epi8((char)value);
    if (itemsize == 2) return _mm512_set1_epi16((short)value);
    return _mm512_set1_epi32((int)value);
}

INLINE uint64_t differ(lanes_t a, lanes_t b, const int itemsize) {
    uint64_t bits = 0;
    if (itemsize == 1) return _mm512_cmpneq_epu8_mask(a.part[0], b.part[0]);
    for (int i = 0; i < itemsize; i++)
        bits |= itemsize == 2
                    ? (uint64_t)_mm512_cmpneq_epu16_mask(a.part[i], b.part[i]) << (32 * i)
                    : (uint64_t)_mm512_cmpneq_epu32_mask(a.part[i], b.part[i]) << (16 * i);
    return bits;
}

INLINE lanes_t keys_of(lanes_t lanes, uint32_t key_mask, const int itemsize) {
    for (int i = 0; i < itemsize; i++)
        lanes.part[i] = _mm512_and_si512(lanes.part[i], every(key_mask, itemsize));
    return lanes;
}

INLINE uint64_t at_least(lanes_t a, uint32_t least, const int itemsize) {
    __m512i bound = every(least, itemsize);
    uint64_t bits = 0;
    if (itemsize == 1) return _mm512_cmpge_epu8_mask(a.part[0], bound);
    for (int i = 0; i < itemsize; i++)
        bits |= itemsize == 2 ? (uint64_t)_mm512_cmpge_epu16_mask(a.part[i], bound) << (32 * i)
                              : (uint64_t)_mm512_cmpge_epu32_mask(a.part[i], bound) << (16 * i);
    return bits;
}

#else

typedef struct {
    uint32_t part[BLOCK];
} lanes_t;

INLINE uint64_t pack_flags(const uint8_t *flags) {
    uint64_t bits = 0;
#ifdef __AVX2__
    for (int i = 0; i < 2; i++) {
        __m256i part = _mm256_loadu_si256((const __m256i *)(flags + 32 * i));
        part = _mm256_sub_epi8(_mm256_setzero_si256(), part);
        bits |= (uint64_t)(uint32_t)_mm256_movemask_epi8(part) << (32 * i);
    }
#else
    for (int i = 0; i < 8; i++) {
        uint64_t eight;
        memcpy(&eight, flags + 8 * i, 8);
        for (int j = 0; j < 8; j++) bits |= (eight >> (8 * j) & 1) << (8 * i + j);
    }
#endif
    return bits;
}

INLINE lanes_t lanes_at(const uint8_t *block, const int itemsize) {
    lanes_t lanes;
    for (int i = 0; i < BLOCK; i++) lanes.part[i] = load(block, i, itemsize);
    return lanes;
}

INLINE uint64_t differ(lanes_t a, lanes_t b, const int itemsize) {
    uint8_t flags[BLOCK];
    (void)itemsize;
    for (int i = 0; i < BLOCK; i++) flags[i] = a.part[i] != b.part[i];
    return pack_flags(flags);
}

INLINE lanes_t keys_of(lanes_t lanes, uint32_t key_mask, const int itemsize) {
    (void)itemsize;
    for (int i = 0; i < BLOCK; i++) lanes.part[i] &= key_mask;
    return lanes;
}

INLINE uint64_t at_least(lanes_t a, uint32_t least, const int itemsize) {
    uint8_t flags[BLOCK];
    (void)itemsize;
    for (int i = 0; i < BLOCK; i++) flags[i] = a.part[i] >= least;
    return pack_flags(flags);
}

#endif

/* The place of the set bit that has `rank` set bits below it. */
INLINE int select_bit(uint64_t mask, uint64_t rank) {
#ifdef __BMI2__
    return __builtin_ctzll(_pdep_u64(UINT64_C(1) << rank, mask));
#else
    while (rank--) mask &= mask - 1;
    return __builtin_ctzll(mask);
#endif
}

#endif
