/* Compiled coding of the marks and steps of a delta. It produces the same bytes as `portable.py`,
 * which documents their meaning.
 *
 * Elements are processed in blocks of 64. The changes of a block and the members of each class are
 * 64-bit masks, so the rank of an element in its class is a count of bits. Sixteen blocks are a
 * group. The changes of a group are listed before any is processed, which costs one branch
 * misprediction per group instead of one per change. Nothing is allocated here: callers provide all
 * memory. Everything read from a payload is checked before it is used as an index; contradictions
 * return CORRUPT.
 *
 * `lanes.h` works on 64 elements, `blocks.h` on groups, `rice.h` on strings of bits; `encode.h` and
 * `decode.h` are the two directions. */
#include "decode.h"
#include "encode.h"

/* Calls a function with the element size as a constant, so that the compiler specializes it. */
#define BY_ITEMSIZE(function, itemsize, ...)                 \
    ((itemsize) == 1   ? function(__VA_ARGS__, 1)            \
     : (itemsize) == 2 ? function(__VA_ARGS__, 2)            \
                       : function(__VA_ARGS__, 4))

/* Counts the elements by key in [2][256]: unchanged ones, then changed ones. */
void penstock_delta_tally(const shape_t *s, int64_t *counts) {
    BY_ITEMSIZE(tally, s->itemsize, s, counts);
}

/* Counts the changed elements of each class from `start` to `end`, which are at group boundaries or
 * at the end of the array. The first call gets zeroed records. `changed` gets one bit per element,
 * padded to whole groups of 128 bytes. */
void penstock_delta_count(
    int64_t start, int64_t end, const shape_t *s, record_t *records, uint64_t *changed) {
    BY_ITEMSIZE(count, s->itemsize, s, start, end, records, changed);
}

/* Writes the streams, after `penstock_delta_count`. `numbers` must have room for three times the
 * number of changed elements plus one, and the signs 8 bytes of slack. */
int penstock_delta_encode(
    const shape_t *s, record_t *records, const uint64_t *changed, uint32_t *numbers,
    streams_t *out) {
    return BY_ITEMSIZE(encode, s->itemsize, s, records, changed, numbers, out);
}

_Static_assert(sizeof(series_t) <= 1024, "callers provide 1024 bytes");

/* Reads all series, which can be walked once. Callers have checked the records: no number is
 * negative, the coded places of all classes add up to at most the number of elements, the coded
 * large steps of a class are at most its changes, and mask and signs have the length that their
 * counts imply. `numbers` must have room for the coded elements, three times the changed ones and
 * one more per class, and must be kept until the walk ends. */
int penstock_delta_read(
    const shape_t *s, const record_t *records, const streams_t *in, uint32_t *numbers,
    series_t *series) {
    series->mask = in->mask;
    return read_series(s, records, in, numbers, series);
}

/* Writes the target, which must not overlap the base, from `start`, which is 0 or the end of the
 * previous call, to `end`, at a tile boundary or the end of the array. */
int penstock_delta_apply(
    int64_t start, int64_t end, const shape_t *s, series_t *series, uint8_t *target) {
    return BY_ITEMSIZE(apply, s->itemsize, s, series, start, end, target);
}

/* Writes all changed positions, rising, and their values, instead of the target. */
int penstock_delta_decode(const shape_t *s, series_t *series, int64_t *places, uint8_t *values) {
    return BY_ITEMSIZE(decode, s->itemsize, s, series, places, values);
}
