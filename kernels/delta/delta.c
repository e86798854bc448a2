/* Marks and steps of a delta, compiled: the same bytes as `portable.py` and `rice.py`, which say
 * what they mean.
 *
 * Elements go by blocks of 64: a block's changes, and the members of each class, are one 64-bit mask
 * each, so that an element's rank in its class is a count of bits. Eight blocks are a group: its
 * changes are listed before any is worked on, so that branches are guessed wrong once a group, not
 * once a change. Everything read from a payload is checked before it is used as an index; a payload
 * that contradicts itself gives CORRUPT.
 */
#include <stdlib.h>

#include "blocks.h"
#include "rice.h"

typedef struct {
    int64_t num_changed, num_coded, inverted, num_large_coded, large_inverted;
} record_t;

typedef struct {
    uint8_t *mask, *signs, *unary, *low;
    int64_t unary_bytes, low_bytes; /* room when encoding begins, length when it ends */
} streams_t;

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
