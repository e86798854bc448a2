/* Marks and steps of a delta, compiled: the same bytes as `portable.py` and `rice.py`, which say
 * what they mean.
 *
 * Elements go by blocks of 64: a block's changes, and the members of each class, are one 64-bit mask
 * each, so that an element's rank in its class is a count of bits. Eight blocks are a group: its
 * changes are listed before any is worked on, so that branches are guessed wrong once a group, not
 * once a change. Everything read from a payload is checked before it is used as an index; a payload
 * that contradicts itself gives CORRUPT.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define BLOCK 64
#define GROUP 8
#define CLASSES_MAX 16
#define RICE_BLOCK 128
#define ESCAPE 32
#define K_MAX 31
#define INLINE static inline __attribute__((always_inline))

enum { OK = 0, NO_MEMORY = -1, CORRUPT = -2 };

typedef struct {
    const uint8_t *base, *target;
    int64_t num_elements;
    int32_t itemsize, bits, is_float, key_shift;
    uint32_t key_mask;
    int32_t num_classes, has_mask;
    int32_t first_keys[CLASSES_MAX];
} shape_t;

typedef struct {
    int64_t num_changed, num_coded, inverted, num_large_coded, large_inverted;
} record_t;

typedef struct {
    uint8_t *mask, *signs, *unary, *low;
    int64_t unary_bytes, low_bytes; /* room when encoding begins, length when it ends */
} streams_t;

/* ---- bits of a block ---------------------------------------------------------------------- */

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

INLINE uint64_t valid_mask(int64_t left) {
    if (left >= BLOCK) return ~UINT64_C(0);
    return left > 0 ? (UINT64_C(1) << left) - 1 : 0;
}

/* A block, or a padded copy of one that reaches over the end. */
INLINE const uint8_t *block_at(
    const uint8_t *array, int64_t start, int64_t left, uint8_t *room, const int itemsize) {
    if (left >= BLOCK) return array + start * itemsize;
    memset(room, 0, (size_t)BLOCK * itemsize);
    if (left > 0) memcpy(room, array + start * itemsize, (size_t)(left * itemsize));
    return room;
}

INLINE int select_bit(uint64_t mask, uint64_t rank) {
#ifdef __BMI2__
    return __builtin_ctzll(_pdep_u64(UINT64_C(1) << rank, mask));
#else
    while (rank--) mask &= mask - 1;
    return __builtin_ctzll(mask);
#endif
}

typedef struct {
    uint64_t changed[GROUP];
    uint64_t masks[CLASSES_MAX][GROUP]; /* the members of each class */
    int64_t ranks[CLASSES_MAX][GROUP];  /* members before each block */
} group_t;

/* Look at the blocks from `start`; `seen` counts each class's members so far. */
INLINE void scan(
    const shape_t *s, int64_t start, int64_t *seen, group_t *group, const int has_target,
    const int itemsize) {
    uint8_t old_room[4 * BLOCK], new_room[4 * BLOCK];
    for (int b = 0; b < GROUP; b++) {
        int64_t at = start + BLOCK * b, left = s->num_elements - at;
        lanes_t old = lanes_at(block_at(s->base, at, left, old_room, itemsize), itemsize);
        if (has_target)
            group->changed[b] = differ(
                old, lanes_at(block_at(s->target, at, left, new_room, itemsize), itemsize),
                itemsize);
        uint64_t valid = valid_mask(left), above = valid;
        lanes_t keys = keys_of(old, s->key_mask, itemsize);
        for (int c = 0; c + 1 < s->num_classes; c++) {
            uint32_t least = (uint32_t)s->first_keys[c + 1] << s->key_shift;
            uint64_t next = at_least(keys, least, itemsize) & valid;
            group->masks[c][b] = above & ~next;
            above = next;
        }
        group->masks[s->num_classes - 1][b] = above;
    }
    for (int c = 0; c < s->num_classes; c++)
        for (int b = 0; b < GROUP; b++) {
            group->ranks[c][b] = seen[c];
            seen[c] += __builtin_popcountll(group->masks[c][b]);
        }
}

/* List the places of a group's bits; the list has room for 8 more than there are. */
INLINE int list_bits(const uint64_t *bits, uint16_t *list) {
    int count = 0;
    for (int b = 0; b < GROUP; b++) {
        uint64_t rest = bits[b];
        int own = __builtin_popcountll(rest);
        for (int i = 0; i < 8; i++) {
            list[count + i] = (uint16_t)(BLOCK * b + __builtin_ctzll(rest | UINT64_C(1) << 63));
            rest &= rest - 1;
        }
        for (int i = 8; i < own; i++) {
            list[count + i] = (uint16_t)(BLOCK * b + __builtin_ctzll(rest));
            rest &= rest - 1;
        }
        count += own;
    }
    return count;
}

/* ---- steps -------------------------------------------------------------------------------- */

INLINE uint32_t ones(int bits) { return bits == 32 ? ~UINT32_C(0) : (UINT32_C(1) << bits) - 1; }

INLINE uint32_t ordered(const shape_t *s, uint32_t value) {
    uint32_t sign = UINT32_C(1) << (s->bits - 1);
    if (!s->is_float) return value;
    return value & sign ? ~value & ones(s->bits) : value | sign;
}

INLINE uint32_t from_ordered(const shape_t *s, uint32_t rank) {
    uint32_t sign = UINT32_C(1) << (s->bits - 1);
    if (!s->is_float) return rank;
    return rank & sign ? rank ^ sign : ~rank & ones(s->bits);
}

/* ---- Rice strings ------------------------------------------------------------------------- */

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

/* ---- encoding ----------------------------------------------------------------------------- */

typedef struct {
    uint32_t *gaps[CLASSES_MAX], *sizes[CLASSES_MAX]; /* the next of each class */
    int64_t signs[CLASSES_MAX];                       /* place of its next sign */
    int64_t ranks[CLASSES_MAX];                       /* of its last, or next, coded element */
    int64_t seen[CLASSES_MAX];                        /* its elements before the block */
    uint64_t inverted[CLASSES_MAX];                   /* all ones or zero */
} series_t;

/* Turn over the bits of the classes whose coded elements are the unmarked ones. */
INLINE void invert(const shape_t *s, const series_t *series, const group_t *group, uint64_t *bits) {
    for (int c = 0; c < s->num_classes; c++)
        for (int b = 0; b < GROUP; b++) bits[b] ^= group->masks[c][b] & series->inverted[c];
}

INLINE void count_changes(
    const shape_t *s, record_t *records, int64_t *populations, const int itemsize) {
    group_t group;
    for (int64_t start = 0; start < s->num_elements; start += GROUP * BLOCK) {
        scan(s, start, populations, &group, 1, itemsize);
        for (int c = 0; c < s->num_classes; c++)
            for (int b = 0; b < GROUP; b++)
                records[c].num_changed +=
                    __builtin_popcountll(group.masks[c][b] & group.changed[b]);
    }
}

INLINE void put_mask(const shape_t *s, int64_t start, const uint64_t *bits, uint8_t *mask) {
    int64_t bytes = (s->num_elements - start + 7) / 8;
    memcpy(mask + start / 8, bits, bytes < GROUP * 8 ? (size_t)bytes : GROUP * 8);
}

INLINE void put_gap(series_t *series, const group_t *group, int c, int place) {
    uint64_t below = group->masks[c][place / BLOCK] & ((UINT64_C(1) << place % BLOCK) - 1);
    int64_t rank = group->ranks[c][place / BLOCK] + __builtin_popcountll(below);
    *series->gaps[c]++ = (uint32_t)(rank - series->ranks[c] - 1);
    series->ranks[c] = rank;
}

INLINE void put_step(
    const shape_t *s, series_t *series, int c, uint32_t from, uint32_t to, uint8_t *signs) {
    uint32_t step = (ordered(s, to) - ordered(s, from)) & ones(s->bits);
    uint32_t down = step >> (s->bits - 1);
    int64_t sign = series->signs[c]++;
    signs[sign >> 3] |= (uint8_t)(down << (sign & 7));
    *series->sizes[c]++ = (down ? -step : step) & ones(s->bits);
}

INLINE void collect(
    const shape_t *s, const uint8_t *class_of, series_t *series, streams_t *out,
    const int itemsize) {
    group_t group;
    uint16_t list[GROUP * BLOCK + 8];
    for (int64_t start = 0; start < s->num_elements; start += GROUP * BLOCK) {
        uint64_t coded[GROUP] = {0}, either[GROUP];
        scan(s, start, series->seen, &group, 1, itemsize);
        if (s->has_mask) {
            put_mask(s, start, group.changed, out->mask);
        } else {
            memcpy(coded, group.changed, sizeof coded);
            invert(s, series, &group, coded);
        }
        for (int b = 0; b < GROUP; b++) either[b] = coded[b] | group.changed[b];
        int count = list_bits(either, list);
        for (int i = 0; i < count; i++) {
            int place = list[i];
            uint32_t from = load(s->base, start + place, itemsize);
            int c = class_of[(from & s->key_mask) >> s->key_shift];
            if (coded[place / BLOCK] >> place % BLOCK & 1) put_gap(series, &group, c, place);
            if (group.changed[place / BLOCK] >> place % BLOCK & 1)
                put_step(s, series, c, from, load(s->target, start + place, itemsize), out->signs);
        }
    }
}

/* The large sizes of a class: their gaps among all, then the sizes, to the strings. */
static int write_sizes(
    record_t *record, const uint32_t *sizes, uint32_t *room, writer_t *unary, writer_t *low) {
    int64_t num_large = 0, num_coded = 0, last = -1;
    for (int64_t i = 0; i < record->num_changed; i++) num_large += sizes[i] >= 2;
    record->large_inverted = 2 * num_large > record->num_changed;
    for (int64_t i = 0; i < record->num_changed; i++) {
        room[num_coded] = (uint32_t)(i - last - 1);
        int is_coded = (sizes[i] >= 2) != record->large_inverted;
        num_coded += is_coded;
        last = is_coded ? i : last;
    }
    record->num_large_coded = num_coded;
    if (rice_write(unary, low, room, num_coded)) return NO_MEMORY;
    num_coded = 0;
    for (int64_t i = 0; i < record->num_changed; i++) {
        room[num_coded] = sizes[i] - 2;
        num_coded += sizes[i] >= 2;
    }
    return rice_write(unary, low, room, num_coded);
}

static void fill_class_table(const shape_t *s, uint8_t *class_of) {
    for (int key = 0, c = 0; key < 256; key++) {
        while (c + 1 < s->num_classes && key >= s->first_keys[c + 1]) c++;
        class_of[key] = (uint8_t)c;
    }
}

INLINE int encode(const shape_t *s, record_t *records, streams_t *out, const int itemsize) {
    int64_t populations[CLASSES_MAX] = {0}, num_coded = 0, num_changed = 0;
    uint8_t class_of[256];
    series_t series;
    memset(&series, 0, sizeof series);
    uint32_t *gaps[CLASSES_MAX], *sizes[CLASSES_MAX];
    fill_class_table(s, class_of);
    count_changes(s, records, populations, itemsize);
    for (int c = 0; c < s->num_classes; c++) {
        record_t *r = &records[c];
        r->inverted = !s->has_mask && 2 * r->num_changed > populations[c];
        r->num_coded = r->inverted ? populations[c] - r->num_changed : r->num_changed;
        if (s->has_mask) r->num_coded = 0;
        series.inverted[c] = r->inverted ? ~UINT64_C(0) : 0;
        series.signs[c] = num_changed;
        series.ranks[c] = -1;
        num_coded += r->num_coded;
        num_changed += r->num_changed;
    }
    uint32_t *numbers = malloc(4 * (size_t)(num_coded + 2 * num_changed + 1)), *room = numbers;
    if (!numbers) return NO_MEMORY;
    for (int c = 0; c < s->num_classes; c++) {
        gaps[c] = series.gaps[c] = room;
        sizes[c] = series.sizes[c] = room + records[c].num_coded;
        room += records[c].num_coded + records[c].num_changed;
    }
    collect(s, class_of, &series, out, itemsize);
    writer_t unary = {out->unary, out->unary_bytes, 0, 0, 0};
    writer_t low = {out->low, out->low_bytes, 0, 0, 0};
    int status = OK;
    for (int c = 0; c < s->num_classes && !status; c++) {
        status = rice_write(&unary, &low, gaps[c], records[c].num_coded);
        if (!status) status = write_sizes(&records[c], sizes[c], room, &unary, &low);
    }
    free(numbers);
    out->unary_bytes = finish(&unary);
    out->low_bytes = finish(&low);
    return status;
}

/* Records come zeroed; signs zeroed. */
int penstock_delta_encode(const shape_t *s, record_t *records, streams_t *out) {
    if (s->itemsize == 1) return encode(s, records, out, 1);
    if (s->itemsize == 2) return encode(s, records, out, 2);
    return encode(s, records, out, 4);
}

/* ---- decoding ----------------------------------------------------------------------------- */

/* The sizes of a class's steps; `room` holds as many numbers as there are changes. */
static int read_sizes(
    const shape_t *s, const record_t *record, uint32_t *sizes, uint32_t *room, reader_t *unary,
    reader_t *low) {
    int64_t count = record->num_changed, place = -1, taken = 0;
    uint32_t usual = record->large_inverted ? 2 : 1;
    if (rice_read(unary, low, room, record->num_large_coded)) return CORRUPT;
    for (int64_t i = 0; i < count; i++) sizes[i] = usual;
    for (int64_t i = 0; i < record->num_large_coded; i++) {
        place += 1 + (int64_t)room[i];
        if (place >= count) return CORRUPT;
        sizes[place] = 3 - usual;
    }
    int64_t coded = record->num_large_coded;
    int64_t num_large = record->large_inverted ? count - coded : coded;
    if (rice_read(unary, low, room, num_large)) return CORRUPT;
    for (int64_t i = 0; i < count; i++) {
        if (sizes[i] != 2) continue;
        uint64_t size = (uint64_t)room[taken++] + 2;
        if (size > UINT64_C(1) << (s->bits - 1)) return CORRUPT;
        sizes[i] = (uint32_t)size;
    }
    return OK;
}

/* Take from a class's series what lies in a group. */
INLINE void take_coded(
    series_t *series, const group_t *group, int c, uint64_t *bits) {
    int64_t rank = series->ranks[c], end = series->seen[c];
    uint32_t *gaps = series->gaps[c];
    while (rank < end) {
        int b = 0;
        for (int i = 1; i < GROUP; i++) b += group->ranks[c][i] <= rank;
        uint64_t own = (uint64_t)(rank - group->ranks[c][b]);
        bits[b] |= UINT64_C(1) << select_bit(group->masks[c][b], own);
        rank += 1 + (int64_t)*gaps++;
    }
    series->ranks[c] = rank;
    series->gaps[c] = gaps;
}

INLINE void take_mask(const shape_t *s, int64_t start, const uint8_t *mask, uint64_t *bits) {
    int64_t bytes = (s->num_elements - start + 7) / 8;
    memset(bits, 0, GROUP * 8);
    memcpy(bits, mask + start / 8, bytes < GROUP * 8 ? (size_t)bytes : GROUP * 8);
    for (int b = 0; b < GROUP; b++) bits[b] &= valid_mask(s->num_elements - start - BLOCK * b);
}

/* Each class's gaps end with one that leads over the end. */
INLINE int scatter(
    const shape_t *s, const uint8_t *class_of, series_t *series, const int64_t *sign_ends,
    const streams_t *in, int64_t *places, uint8_t *values, const int itemsize) {
    group_t group;
    uint16_t list[GROUP * BLOCK + 8];
    int64_t written = 0;
    for (int64_t start = 0; start < s->num_elements; start += GROUP * BLOCK) {
        uint64_t bits[GROUP] = {0};
        scan(s, start, series->seen, &group, 0, itemsize);
        for (int c = 0; c < s->num_classes; c++) take_coded(series, &group, c, bits);
        invert(s, series, &group, bits);
        if (s->has_mask) take_mask(s, start, in->mask, bits);
        int count = list_bits(bits, list);
        for (int i = 0; i < count; i++) {
            int64_t place = start + list[i];
            uint32_t from = load(s->base, place, itemsize);
            int c = class_of[(from & s->key_mask) >> s->key_shift];
            int64_t sign = series->signs[c]++;
            if (sign == sign_ends[c]) return CORRUPT;
            uint32_t size = *series->sizes[c]++;
            uint32_t step = in->signs[sign >> 3] >> (sign & 7) & 1 ? -size : size;
            uint32_t to = from_ordered(s, (ordered(s, from) + step) & ones(s->bits));
            places[written] = place;
            memcpy(values + written++ * itemsize, &to, (size_t)itemsize);
        }
    }
    for (int c = 0; c < s->num_classes; c++)
        if (series->signs[c] != sign_ends[c] || series->ranks[c] < UINT32_MAX) return CORRUPT;
    return OK;
}

INLINE int decode(
    const shape_t *s, const record_t *records, const streams_t *in, int64_t num_changed,
    int64_t *places, uint8_t *values, const int itemsize) {
    uint8_t class_of[256];
    series_t series;
    memset(&series, 0, sizeof series);
    int64_t sign_ends[CLASSES_MAX], num_coded = 0, sign = 0;
    fill_class_table(s, class_of);
    for (int c = 0; c < s->num_classes; c++) num_coded += records[c].num_coded + 1;
    uint32_t *numbers = malloc(4 * (size_t)(num_coded + 2 * num_changed));
    if (!numbers) return NO_MEMORY;
    uint32_t *gaps = numbers, *sizes = gaps + num_coded, *room = sizes + num_changed;
    reader_t unary = {in->unary, in->unary_bytes, 0}, low = {in->low, in->low_bytes, 0};
    int status = OK;
    for (int c = 0; c < CLASSES_MAX; c++) series.ranks[c] = INT64_MAX;
    for (int c = 0; c < s->num_classes && !status; c++) {
        status = rice_read(&unary, &low, gaps, records[c].num_coded);
        if (!status) status = read_sizes(s, &records[c], sizes, room, &unary, &low);
        for (int64_t i = 0; i < records[c].num_coded; i++)
            if (gaps[i] >= s->num_elements) status = CORRUPT;
        gaps[records[c].num_coded] = UINT32_MAX;
        series.ranks[c] = gaps[0];
        series.gaps[c] = gaps + 1;
        series.sizes[c] = sizes;
        series.inverted[c] = records[c].inverted ? ~UINT64_C(0) : 0;
        series.signs[c] = sign;
        sign_ends[c] = sign += records[c].num_changed;
        gaps += records[c].num_coded + 1;
        sizes += records[c].num_changed;
    }
    if (!status && !(is_used_up(&unary) && peek(&unary) == 0 && is_used_up(&low))) status = CORRUPT;
    if (!status)
        status = scatter(
            s, class_of, &series, sign_ends, in, places, values, itemsize);
    free(numbers);
    return status;
}

/* Numbers of the records, already checked: none is negative, those of all classes' coded places add
 * up to at most the elements, their changes to `num_changed`, the large coded to at most a class's
 * changes; mask and signs are as long as their counts say. */
int penstock_delta_decode(
    const shape_t *s, const record_t *records, const streams_t *in, int64_t num_changed,
    int64_t *places, uint8_t *values) {
    if (s->itemsize == 1) return decode(s, records, in, num_changed, places, values, 1);
    if (s->itemsize == 2) return decode(s, records, in, num_changed, places, values, 2);
    return decode(s, records, in, num_changed, places, values, 4);
}
