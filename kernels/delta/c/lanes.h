/* Operations on 64 elements whose results are bits of a mask, e.g. which of them differ.
 *
 * Each operation is plain C that compilers vectorize. Operations that they do not vectorize well
 * have a second version for CPUs with AVX-512, AVX2 or BMI2. */
#ifndef PENSTOCK_LANES_H
#define PENSTOCK_LANES_H
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__BMI2__)
#include <immintrin.h>
#endif

#define BLOCK 64
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t load(const uint8_t *array, int64_t i, const int itemsize) {
    if (itemsize == 1) return array[i];
    uint16_t half;
    uint32_t whole;
    if (itemsize == 2) return memcpy(&half, array + 2 * i, 2), half;
    return memcpy(&whole, array + 4 * i, 4), whole;
}

INLINE void store(uint8_t *array, int64_t i, uint32_t value, const int itemsize) {
    memcpy(array + i * itemsize, &value, (size_t)itemsize);
}

/* Packs 64 flags, each 0 or 1, into bits. */
INLINE uint64_t pack_flags(const uint8_t *flags) {
    uint64_t bits = 0;
#if defined(__AVX512BW__)
    bits = _mm512_test_epi8_mask(_mm512_loadu_si512(flags), _mm512_set1_epi8(1));
#elif defined(__AVX2__)
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

INLINE uint64_t differ(const uint8_t *a, const uint8_t *b, const int itemsize) {
#ifdef __AVX512BW__
    uint64_t bits = 0;
    for (int i = 0; i < itemsize; i++) {
        __m512i x = _mm512_loadu_si512(a + 64 * i), y = _mm512_loadu_si512(b + 64 * i);
        if (itemsize == 1) bits = _mm512_cmpneq_epu8_mask(x, y);
        if (itemsize == 2) bits |= (uint64_t)_mm512_cmpneq_epu16_mask(x, y) << (32 * i);
        if (itemsize == 4) bits |= (uint64_t)_mm512_cmpneq_epu32_mask(x, y) << (16 * i);
    }
    return bits;
#else
    uint8_t flags[BLOCK];
    for (int i = 0; i < BLOCK; i++) flags[i] = load(a, i, itemsize) != load(b, i, itemsize);
    return pack_flags(flags);
#endif
}

/* Extracts the keys of a block; `bits` is the mask of keys, shifted down to bit 0. */
INLINE void keys_of(
    const uint8_t *block, int shift, uint32_t bits, uint8_t *keys, const int itemsize) {
#ifdef __AVX512BW__
    __m128i by = _mm_cvtsi32_si128(shift);
    for (int i = 0; i < itemsize; i++) {
        __m512i part = _mm512_loadu_si512(block + 64 * i);
        if (itemsize == 1) {
            part = _mm512_and_si512(_mm512_srl_epi16(part, by), _mm512_set1_epi8((char)bits));
            _mm512_storeu_si512(keys, part);
        } else if (itemsize == 2) {
            part = _mm512_and_si512(_mm512_srl_epi16(part, by), _mm512_set1_epi16((short)bits));
            _mm256_storeu_si256((__m256i *)(keys + 32 * i), _mm512_cvtepi16_epi8(part));
        } else {
            part = _mm512_and_si512(_mm512_srl_epi32(part, by), _mm512_set1_epi32((int)bits));
            _mm_storeu_si128((__m128i *)(keys + 16 * i), _mm512_cvtepi32_epi8(part));
        }
    }
#else
    for (int i = 0; i < BLOCK; i++) keys[i] = (uint8_t)(load(block, i, itemsize) >> shift & bits);
#endif
}

INLINE uint64_t at_least(const uint8_t *keys, uint8_t least) {
#ifdef __AVX512BW__
    return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(keys), _mm512_set1_epi8((char)least));
#else
    uint8_t flags[BLOCK];
    for (int i = 0; i < BLOCK; i++) flags[i] = keys[i] >= least;
    return pack_flags(flags);
#endif
}

/* Lists the positions of set bits, starting from `first`; the list must have room for 64. */
INLINE int list_block(uint64_t bits, int first, uint16_t *list) {
    int own = __builtin_popcountll(bits);
#ifdef __AVX512VBMI2__
    static const uint8_t COUNT[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    __m512i count = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)COUNT));
    __m512i low = _mm512_add_epi16(count, _mm512_set1_epi16((short)first));
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(32));
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi16((uint32_t)bits, low));
    list += __builtin_popcount((uint32_t)bits);
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi16((uint32_t)(bits >> 32), high));
#else
    for (int i = 0; i < own; i++, bits &= bits - 1)
        list[i] = (uint16_t)(first + __builtin_ctzll(bits));
#endif
    return own;
}

/* Returns the position of the set bit that has `rank` set bits below it. */
INLINE int select_bit(uint64_t mask, uint64_t rank) {
#ifdef __BMI2__
    return __builtin_ctzll(_pdep_u64(UINT64_C(1) << rank, mask));
#else
    while (rank--) mask &= mask - 1;
    return __builtin_ctzll(mask);
#endif
}

/* Returns how many of 16 numbers are at most `bound`. */
INLINE int count_at_most(const uint16_t *numbers, uint16_t bound) {
#ifdef __AVX512BW__
    __m256i all = _mm256_loadu_si256((const __m256i *)numbers);
    return __builtin_popcount(_mm256_cmple_epu16_mask(all, _mm256_set1_epi16((short)bound)));
#else
    int count = 0;
    for (int i = 0; i < 16; i++) count += numbers[i] <= bound;
    return count;
#endif
}

#endif
