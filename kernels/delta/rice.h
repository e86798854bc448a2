/* Rice strings, as `rice.py` describes them. */
#ifndef PENSTOCK_RICE_H
#define PENSTOCK_RICE_H
#include "lanes.h"

#define RICE_BLOCK 128
#define ESCAPE 32
#define K_MAX 31

enum { OK = 0, NO_MEMORY = -1, CORRUPT = -2 };

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

static int best_param(const uint32_t *values, int count) {
    uint32_t any = 0;
    for (int i = 0; i < count; i++) any |= values[i];
    int best = 0, last = any ? 32 - __builtin_clz(any) : 0;
    int64_t least = INT64_MAX;
    for (int k = 0; k <= last && k <= K_MAX; k++) {
        uint32_t sum = 0;
        for (int i = 0; i < count; i++) {
            uint32_t high = values[i] >> k;
            sum += high < ESCAPE ? high + 1 + (uint32_t)k : ESCAPE + 1 + 32;
        }
        if (sum < least) {
            least = sum;
            best = k;
        }
    }
    return best;
}

static int rice_write(writer_t *unary, writer_t *low, const uint32_t *values, int64_t count) {
    int before = 0;
    for (int64_t start = 0; start < count; start += RICE_BLOCK) {
        int own = count - start < RICE_BLOCK ? (int)(count - start) : RICE_BLOCK;
        if (unary->room - unary->at < 1024 || low->room - low->at < 1024) return NO_MEMORY;
        int k = best_param(values + start, own), turn = k - before;
        before = k;
        put_unary(unary, (uint64_t)(turn < 0 ? -2 * turn - 1 : 2 * turn));
        for (int i = 0; i < own; i++) {
            uint32_t value = values[start + i], high = value >> k;
            if (high >= ESCAPE) {
                put_unary(unary, ESCAPE);
                put(low, value, 32);
            } else {
                put_unary(unary, high);
                put(low, value & ((UINT64_C(1) << k) - 1), k);
            }
        }
    }
    return OK;
}

typedef struct {
    const uint8_t *data;
    int64_t num_bytes, at; /* at: in bits */
} reader_t;

INLINE uint64_t peek(const reader_t *r) {
    uint64_t word = 0;
    int64_t byte = r->at >> 3;
    if (byte + 8 <= r->num_bytes)
        memcpy(&word, r->data + byte, 8);
    else if (byte < r->num_bytes)
        memcpy(&word, r->data + byte, (size_t)(r->num_bytes - byte));
    return word >> (r->at & 7);
}

/* Count zeros up to the next one; more than 64 if there is none in bounds. */
INLINE uint64_t take_unary(reader_t *r) {
    uint64_t zeros = 0, word;
    while (!(word = peek(r))) {
        uint64_t seen = 64 - (uint64_t)(r->at & 7);
        zeros += seen;
        r->at += (int64_t)seen;
        if (zeros > 64) return zeros;
    }
    int more = __builtin_ctzll(word);
    r->at += more + 1;
    return zeros + (uint64_t)more;
}

INLINE uint64_t take(reader_t *r, int width) {
    uint64_t value = peek(r) & ((UINT64_C(1) << width) - 1);
    r->at += width;
    return value;
}

static int rice_read(reader_t *unary, reader_t *low, uint32_t *values, int64_t count) {
    int64_t k = 0;
    for (int64_t start = 0; start < count; start += RICE_BLOCK) {
        int own = count - start < RICE_BLOCK ? (int)(count - start) : RICE_BLOCK;
        int64_t turn = (int64_t)take_unary(unary);
        k += turn & 1 ? -(turn + 1) / 2 : turn / 2;
        if (k < 0 || k > K_MAX) return CORRUPT;
        for (int i = 0; i < own; i++) {
            uint64_t high = take_unary(unary);
            if (high > ESCAPE) return CORRUPT;
            uint64_t value = high == ESCAPE ? take(low, 32) : (high << k) + take(low, (int)k);
            if (value > UINT32_MAX) return CORRUPT;
            values[start + i] = (uint32_t)value;
        }
        if (low->at > 8 * low->num_bytes) return CORRUPT;
    }
    return OK;
}

static int is_used_up(reader_t *r) {
    int64_t left = 8 * r->num_bytes - r->at;
    return left >= 0 && left < 8;
}

#endif
