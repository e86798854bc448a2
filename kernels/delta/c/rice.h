/* Strings of Rice codes, as described in `portable.py`. */
#ifndef PENSTOCK_RICE_H
#define PENSTOCK_RICE_H
#include "lanes.h"

#define RICE_BLOCK 128
#define ESCAPE 32
#define K_MAX 31

enum { OK = 0, NO_ROOM = -1, CORRUPT = -2 };

typedef struct {
    uint8_t *data;
    int64_t room, at;
    uint64_t word;
    int fill;
} writer_t;

INLINE void put(writer_t *w, uint64_t value, int width) {
    w->word |= value << w->fill;
    w->fill += width;
    memcpy(w->data + w->at, &w->word, 8);
    w->at += w->fill >> 3;
    w->word = w->fill >= 64 ? 0 : w->word >> (w->fill & ~7);
    w->fill &= 7;
}

INLINE void put_unary(writer_t *w, uint64_t zeros) {
    while (zeros > 40) {
        put(w, 0, 40);
        zeros -= 40;
    }
    put(w, UINT64_C(1) << zeros, (int)zeros + 1);
}

static int64_t finish(writer_t *w) {
    w->at += w->fill > 0;
    return w->at;
}

INLINE uint32_t cost(const uint32_t *values, int count, int k) {
    uint32_t sum = 0;
    for (int i = 0; i < count; i++) {
        uint32_t high = values[i] >> k;
        sum += high < ESCAPE ? high + 1 + (uint32_t)k : ESCAPE + 1 + 32;
    }
    return sum;
}

/* Returns the k with the lowest cost, the smallest on a tie. A number takes at least k + 1 bits,
 * which ends the search early. */
INLINE int best_param(const uint32_t *values, int count, uint32_t any) {
    uint32_t least = UINT32_MAX;
    int best = 0, last = any ? 32 - __builtin_clz(any) : 0;
    for (int k = 0; k <= last && k <= K_MAX && (uint32_t)(count * (k + 1)) < least; k++) {
        uint32_t sum = cost(values, count, k);
        best = sum < least ? k : best;
        least = sum < least ? sum : least;
    }
    return best;
}

INLINE void put_number(writer_t *unary, writer_t *low, uint32_t value, int k) {
    uint32_t high = value >> k;
    int is_whole = high >= ESCAPE;
    put_unary(unary, is_whole ? ESCAPE : high);
    put(low, is_whole ? value : value & ((UINT32_C(1) << k) - 1), is_whole ? 32 : k);
}

#define QUAD_K_MAX 14 /* largest k for which four low parts fit in one `put` of 56 bits */

/* Writes four numbers whose high parts are below ESCAPE, which makes encoding 15-25% faster. */
INLINE void put_quad(writer_t *unary, writer_t *low, const uint32_t *values, int k) {
    uint32_t mask = (UINT32_C(1) << k) - 1;
    uint64_t parts = 0, ones = 0;
    int ends = -1;
    for (int i = 3; i >= 0; i--) parts = parts << k | (values[i] & mask);
    put(low, parts, 4 * k);
    for (int i = 0; i < 4; i++) {
        ends += 1 + (int)(values[i] >> k);
        ones |= UINT64_C(1) << (ends & 63);
    }
    if (ends < 56)
        put(unary, ones, ends + 1);
    else
        for (int i = 0; i < 4; i++) put_unary(unary, values[i] >> k);
}

/* Works on local copies of the writers: otherwise the compiler would reload them after each store
 * to their data, which might alias them. */
static int rice_write(writer_t *to_unary, writer_t *to_low, const uint32_t *values, int64_t count) {
    writer_t unary = *to_unary, low = *to_low;
    int before = 0;
    for (int64_t start = 0; start < count; start += RICE_BLOCK, values += RICE_BLOCK) {
        int own = count - start < RICE_BLOCK ? (int)(count - start) : RICE_BLOCK, i = 0;
        if (unary.room - unary.at < 1024 || low.room - low.at < 1024) return NO_ROOM;
        uint32_t any = 0;
        for (int j = 0; j < own; j++) any |= values[j];
        int k = own == RICE_BLOCK ? best_param(values, RICE_BLOCK, any) : best_param(values, own, any);
        int turn = k - before;
        before = k;
        put_unary(&unary, (uint64_t)(turn < 0 ? -2 * turn - 1 : 2 * turn));
        if (k <= QUAD_K_MAX && any >> k < ESCAPE)
            for (; i + 4 <= own; i += 4) put_quad(&unary, &low, values + i, k);
        for (; i < own; i++) put_number(&unary, &low, values[i], k);
    }
    *to_unary = unary;
    *to_low = low;
    return OK;
}

/* Reader of unary numbers, a word at a time; ones are cleared from the word when they are read. */
typedef struct {
    const uint8_t *data;
    int64_t num_bytes, next; /* next: byte after the word */
    int64_t after;           /* bit after the last one that was read, relative to the word */
    uint64_t word;
} unary_t;

INLINE unary_t unary_of(const uint8_t *data, int64_t num_bytes) {
    return (unary_t){data, num_bytes, 0, 64, 0};
}

INLINE uint64_t load_word(const uint8_t *data, int64_t num_bytes, int64_t at) {
    uint64_t word = 0;
    if (at + 8 <= num_bytes)
        memcpy(&word, data + at, 8);
    else if (at < num_bytes)
        memcpy(&word, data + at, (size_t)(num_bytes - at));
    return word;
}

#define UNARY_MAX (RICE_BLOCK + 1)
#define JOIN_SLACK 512 /* number of bits that may be read past the last low part */

/* Reads up to UNARY_MAX numbers. It is an error if the string ends too early or has no one for more
 * than two words. */
INLINE int take_unary(unary_t *r, uint32_t *values, int count) {
    uint16_t ones[UNARY_MAX + 2 * BLOCK]; /* positions; the first bit of the word is BLOCK */
    int have = 0, start = BLOCK;
    int64_t after = r->after + BLOCK;
    for (;; start += BLOCK) {
        int own = list_block(r->word, start, ones + have);
        if (have + own >= count) break;
        have += own;
        if (r->next >= r->num_bytes || start + BLOCK - (have ? ones[have - 1] : after) > 2 * BLOCK)
            return CORRUPT;
        r->word = load_word(r->data, r->num_bytes, r->next);
        r->next += 8;
    }
    int last = ones[count - 1] - start;
    r->word &= ~UINT64_C(0) << last << 1;
    r->after = last + 1;
    values[0] = (uint32_t)(ones[0] - after);
    for (int i = 1; i < count; i++) values[i] = (uint32_t)(ones[i] - ones[i - 1] - 1);
    return OK;
}

typedef struct {
    const uint8_t *data;
    int64_t num_bytes, at; /* at: position in bits */
} reader_t;

INLINE uint64_t take(reader_t *r, int width) {
    uint64_t word = load_word(r->data, r->num_bytes, r->at >> 3) >> (r->at & 7);
    r->at += width;
    return word & ((UINT64_C(1) << width) - 1);
}

#ifdef __AVX512VBMI__
#define LOW_LANES 16
#define LOW_LANES_K_MAX 25 /* largest part that is within four bytes at any bit offset */

/* Returns 16 numbers of k bits, starting at bit `at`; reads 64 bytes. */
INLINE __m512i low_lanes(const uint8_t *data, int64_t at, int k) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(k));
    places = _mm512_add_epi32(places, _mm512_set1_epi32((int)(at & 7)));
    __m512i bytes = _mm512_mullo_epi32(_mm512_srli_epi32(places, 3), _mm512_set1_epi32(0x01010101));
    bytes = _mm512_add_epi32(bytes, _mm512_set1_epi32(0x03020100));
    __m512i words = _mm512_permutexvar_epi8(bytes, _mm512_loadu_si512(data + (at >> 3)));
    words = _mm512_srlv_epi32(words, _mm512_and_si512(places, _mm512_set1_epi32(7)));
    return _mm512_and_si512(words, _mm512_set1_epi32((1 << k) - 1));
}
#endif

/* Joins high parts below ESCAPE, in `values`, with low parts of k bits, which must be JOIN_SLACK
 * bits within bounds. */
INLINE void join_parts(reader_t *low, uint32_t *values, int count, int k) {
    int i = 0;
#ifdef __AVX512VBMI__
    for (; i + LOW_LANES <= count && k <= LOW_LANES_K_MAX; i += LOW_LANES, low->at += LOW_LANES * k) {
        __m512i highs = _mm512_sll_epi32(_mm512_loadu_si512(values + i), _mm_cvtsi32_si128(k));
        _mm512_storeu_si512(values + i, _mm512_or_si512(highs, low_lanes(low->data, low->at, k)));
    }
#endif
    uint64_t mask = (UINT64_C(1) << k) - 1;
    for (; i < count; i++, low->at += k) {
        uint64_t word;
        memcpy(&word, low->data + (low->at >> 3), 8);
        values[i] = (values[i] << k) + (uint32_t)(word >> (low->at & 7) & mask);
    }
}

/* Joins any high and low parts, with checks. */
static int join_any_parts(reader_t *low, uint32_t *values, int count, int k) {
    int is_corrupt = 0;
    for (int i = 0; i < count; i++) {
        uint64_t high = values[i];
        int is_whole = high == ESCAPE;
        uint64_t value = take(low, is_whole ? 32 : k) + (is_whole ? 0 : high << k);
        is_corrupt |= high > ESCAPE || value > UINT32_MAX;
        values[i] = (uint32_t)value;
    }
    return is_corrupt || low->at > 8 * low->num_bytes ? CORRUPT : OK;
}

static int rice_read(unary_t *from_unary, reader_t *low, uint32_t *values, int64_t count) {
    unary_t unary = *from_unary;
    int64_t k = 0;
    for (int64_t start = 0; start < count; start += RICE_BLOCK, values += RICE_BLOCK) {
        int own = count - start < RICE_BLOCK ? (int)(count - start) : RICE_BLOCK;
        uint32_t numbers[UNARY_MAX], turn, highest = 0;
        if (take_unary(&unary, numbers, own + 1)) return CORRUPT;
        turn = numbers[0];
        k += turn & 1 ? -(int64_t)(turn / 2) - 1 : (int64_t)(turn / 2);
        if (k < 0 || k > K_MAX) return CORRUPT;
        for (int i = 0; i < own; i++) {
            values[i] = numbers[i + 1];
            highest = values[i] > highest ? values[i] : highest;
        }
        if (highest < ESCAPE && k + 5 <= 32 && low->at + own * k + JOIN_SLACK <= 8 * low->num_bytes)
            join_parts(low, values, own, (int)k);
        else if (join_any_parts(low, values, own, (int)k))
            return CORRUPT;
    }
    *from_unary = unary;
    return OK;
}

/* Returns whether less than a byte is left in each string, and only zeros in the unary one. */
static int are_used_up(const unary_t *unary, const reader_t *low) {
    int64_t unary_left = 8 * (unary->num_bytes - unary->next + 8) - unary->after;
    int64_t low_left = 8 * low->num_bytes - low->at;
    return !unary->word && unary_left < 8 && low_left >= 0 && low_left < 8;
}

#endif
