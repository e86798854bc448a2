/* Marks and steps of a delta, compiled: the same bytes as `portable.py`, which says what they
 * mean.
 *
 * Elements go by blocks of 64: a block's changes, and the members of each class, are one 64-bit mask
 * each, so that an element's rank in its class is a count of bits. Sixteen blocks are a group: its
 * changes are listed before any is worked on, so that branches are guessed wrong once a group, not
 * once a change. Nothing is allocated here: callers bring all room. Everything read from a payload
 * is checked before it is used as an index; one that contradicts itself gives CORRUPT.
 *
 * `lanes.h` works on 64 elements, `blocks.h` on groups, `rice.h` on strings of bits; `encode.h` and
 * `decode.h` are the two ways. */
#include "decode.h"
#include "encode.h"

/* Make a call for each size of elements apart, so that compilers know it. */
#define BY_ITEMSIZE(function, itemsize, ...)                 \
    ((itemsize) == 1   ? function(__VA_ARGS__, 1)            \
     : (itemsize) == 2 ? function(__VA_ARGS__, 2)            \
                       : function(__VA_ARGS__, 4))

/* Count the elements of each key, first those that did not change, in [2][256]. */
void penstock_delta_tally(const shape_t *s, int64_t *counts) {
    BY_ITEMSIZE(tally, s->itemsize, s, counts);
}

/* Count the changed elements of the classes, from `start`, where a group begins, to `end`, where one
 * or all ends; records come zeroed first. `changed` gets one bit an element, up to whole groups of
 * 128 bytes. */
void penstock_delta_count(
    int64_t start, int64_t end, const shape_t *s, record_t *records, uint64_t *changed) {
    BY_ITEMSIZE(count, s->itemsize, s, start, end, records, changed);
}

/* Write the streams, after `penstock_delta_count`; `numbers` has room for three times the changed
 * elements and one more, signs for 8 bytes beyond their own. */
int penstock_delta_encode(
    const shape_t *s, record_t *records, const uint64_t *changed, uint32_t *numbers,
    streams_t *out) {
    return BY_ITEMSIZE(encode, s->itemsize, s, records, changed, numbers, out);
}

_Static_assert(sizeof(series_t) <= 1024, "callers bring so much");

/* Read all series, to be walked once. Numbers of the records are already checked: none is negative,
 * those of all classes' coded places add up to at most the elements, the large coded to at most a
 * class's changes; mask and signs are as long as their counts say. `numbers` has room for the coded
 * and three times the changed, and one more a class, and stays until the walk ends. */
int penstock_delta_read(
    const shape_t *s, const record_t *records, const streams_t *in, uint32_t *numbers,
    series_t *series) {
    series->mask = in->mask;
    return read_series(s, records, in, numbers, series);
}

/* Write the target, elsewhere than over the base, from `start`, which is 0 or where the call before
 * ended, to `end`, where a tile or all ends. */
int penstock_delta_apply(
    int64_t start, int64_t end, const shape_t *s, series_t *series, uint8_t *target) {
    return BY_ITEMSIZE(apply, s->itemsize, s, series, start, end, target);
}

/* The same, but for what it makes, at once: the changed places, rising, and their values. */
int penstock_delta_decode(const shape_t *s, series_t *series, int64_t *places, uint8_t *values) {
    return BY_ITEMSIZE(decode, s->itemsize, s, series, places, values);
}
