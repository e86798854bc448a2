/* Encoding: counts changes, collects ranks and steps by class, and writes them to the streams. */
#ifndef PENSTOCK_ENCODE_H
#define PENSTOCK_ENCODE_H
#include "blocks.h"
#include "rice.h"

typedef struct {
    uint32_t *ranks[CLASSES_MAX], *steps[CLASSES_MAX]; /* next of each class */
} lists_t;

/* Counts elements by key in [2][256]: unchanged ones, then changed ones. */
INLINE void tally(const shape_t *s, int64_t *counts, const int itemsize) {
    uint32_t parts[4][512] = {{0}}; /* four sets, so that adjacent elements do not wait */
    for (int64_t i = 0; i < s->num_elements; i++) {
        uint32_t from = load(s->base, i, itemsize);
        int is_changed = from != load(s->target, i, itemsize);
        parts[i % 4][256 * is_changed + (from >> s->key_shift & s->key_bits)]++;
    }
    for (int i = 0; i < 512; i++)
        counts[i] = (int64_t)parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i];
}

INLINE int class_at(
    const shape_t *s, const uint8_t *class_of, int64_t place, const int itemsize) {
    return class_of[load(s->base, place, itemsize) >> s->key_shift & s->key_bits];
}

/* Counts the changed elements of each class from `start` to `end`. `changed` holds the masks of all
 * groups of the array. */
INLINE void count(
    const shape_t *s, int64_t start, int64_t end, record_t *records, uint64_t *changed,
    const int itemsize) {
    int64_t counts[CLASSES_MAX] = {0};
    uint8_t class_of[256];
    uint16_t list[LIST_ROOM];
    fill_class_table(s, class_of);
    for (changed += start / BLOCK; start < end; start += GROUP_ELEMENTS, changed += GROUP) {
        compare(s, s->target, start, changed, itemsize);
        int num = s->num_classes > 1 ? list_bits(changed, list) : 0;
        for (int i = 0; i < num; i++) counts[class_at(s, class_of, start + list[i], itemsize)]++;
        if (s->num_classes == 1) counts[0] += count_bits(changed);
    }
    for (int c = 0; c < s->num_classes; c++) records[c].num_changed += counts[c];
}

INLINE void put_mask(const shape_t *s, int64_t start, const uint64_t *bits, uint8_t *mask) {
    int64_t bytes = (s->num_elements - start + 7) / 8;
    memcpy(mask + start / 8, bits, bytes < GROUP * 8 ? (size_t)bytes : GROUP * 8);
}

INLINE void put_rank(lists_t *lists, const group_t *group, int c, int place) {
    int b = place / BLOCK;
    uint64_t below = group->masks[c][b] & ((UINT64_C(1) << place % BLOCK) - 1);
    *lists->ranks[c]++ =
        (uint32_t)group->firsts[c] + group->ranks[c][b] + (uint32_t)__builtin_popcountll(below);
}

INLINE uint32_t step_at(
    const shape_t *s, order_t order, int64_t place, const int itemsize) {
    uint32_t from = load(s->base, place, itemsize), to = load(s->target, place, itemsize);
    uint32_t down = (0 - (from >> order.top)) & order.turned, step = ((to - from) ^ down) - down;
    if (__builtin_expect((from ^ to) & order.sign & order.turned, 0)) /* the sign changes */
        step = ordered(order, to) - ordered(order, from);
    return step & order.ones;
}

/* Collects the changes of a group if there is one class, whose ranks are positions. */
INLINE void put_plain(
    const shape_t *s, lists_t *lists, int64_t start, const uint16_t *list, int count,
    const int itemsize) {
    const order_t order = order_of(s);
    uint32_t *ranks = lists->ranks[0], *steps = lists->steps[0];
    for (int i = 0; i < count; i++) steps[i] = step_at(s, order, start + list[i], itemsize);
    lists->steps[0] += count;
    for (int i = 0; i < count && !s->has_mask; i++) ranks[i] = (uint32_t)start + list[i];
    lists->ranks[0] += s->has_mask ? 0 : count;
}

/* Collects the changes of a group if there are several classes. */
INLINE void put_sorted(
    const shape_t *s, const uint8_t *class_of, lists_t *lists, const group_t *group,
    int64_t start, const uint16_t *list, int count, const int itemsize) {
    const order_t order = order_of(s);
    for (int i = 0; i < count; i++) {
        int c = class_at(s, class_of, start + list[i], itemsize);
        put_rank(lists, group, c, list[i]);
        *lists->steps[c]++ = step_at(s, order, start + list[i], itemsize);
    }
}

/* Collects ranks and steps of the changed elements by class, in order; `seen` gets the number of
 * elements of each class. */
static void collect(
    const shape_t *s, const uint64_t *changed, lists_t lists, int64_t *seen, uint8_t *mask,
    const int itemsize) {
    uint8_t class_of[256];
    group_t group;
    uint16_t list[LIST_ROOM];
    fill_class_table(s, class_of);
    if (s->num_classes == 1) seen[0] = s->num_elements;
    for (int64_t start = 0; start < s->num_elements; start += GROUP_ELEMENTS, changed += GROUP) {
        int num = list_bits(changed, list);
        if (s->has_mask) put_mask(s, start, changed, mask);
        if (s->num_classes == 1) {
            put_plain(s, &lists, start, list, num, itemsize);
        } else {
            classify(s, start, &group, itemsize);
            rank(s, seen, &group);
            put_sorted(s, class_of, &lists, &group, start, list, num, itemsize);
        }
    }
}

/* Replaces ranks by those of the unchanged elements if more than half of a class changed, because
 * the smaller set is coded. */
static void choose_coded(
    const shape_t *s, record_t *record, int64_t population, uint32_t *ranks, uint32_t *room) {
    int64_t next = 0, num_coded = 0;
    record->inverted = !s->has_mask && 2 * record->num_changed > population;
    record->num_coded = s->has_mask ? 0 : record->num_changed;
    if (!record->inverted) return;
    for (int64_t i = 0; i < record->num_changed; i++, next++)
        for (; next < ranks[i]; next++) room[num_coded++] = (uint32_t)next;
    for (; next < population; next++) room[num_coded++] = (uint32_t)next;
    memcpy(ranks, room, 4 * (size_t)num_coded);
    record->num_coded = num_coded;
}

/* Converts steps to sizes and ranks to gaps, and writes the signs. */
static void part_steps(
    const shape_t *s, const record_t *record, uint32_t *ranks, uint32_t *steps,
    writer_t *to_signs) {
    writer_t signs = *to_signs;
    const order_t order = order_of(s);
    for (int64_t i = 0; i < record->num_changed; i += 32) {
        int own = record->num_changed - i < 32 ? (int)(record->num_changed - i) : 32;
        uint32_t down = 0;
        if (own == 32)
            for (int j = 0; j < 32; j++) down |= (steps[i + j] >> order.top) << j;
        else
            for (int j = 0; j < own; j++) down |= (steps[i + j] >> order.top) << j;
        put(&signs, down, own);
    }
    *to_signs = signs;
    for (int64_t i = 0; i < record->num_changed; i++)
        steps[i] = steps[i] & order.sign ? (0 - steps[i]) & order.ones : steps[i];
    for (int64_t i = record->num_coded - 1; i > 0; i--) ranks[i] -= ranks[i - 1] + 1;
}

/* Returns which of up to 64 sizes are large, as bits. */
INLINE uint64_t large_of(const uint32_t *sizes, int64_t count) {
    uint8_t flags[BLOCK] = {0};
    if (count >= BLOCK)
        for (int i = 0; i < BLOCK; i++) flags[i] = sizes[i] >= 2;
    else
        for (int i = 0; i < count; i++) flags[i] = sizes[i] >= 2;
    return pack_flags(flags);
}

/* Writes the large sizes of a class: gaps between them, then the sizes. */
static int write_sizes(
    record_t *record, const uint32_t *sizes, uint32_t *room, writer_t *unary, writer_t *low) {
    int64_t count = record->num_changed, num_large = 0, num_coded = 0, last = -1;
    for (int64_t i = 0; i < count; i++) num_large += sizes[i] >= 2;
    record->large_inverted = 2 * num_large > count;
    record->num_large_coded = record->large_inverted ? count - num_large : num_large;
    uint32_t *large = room + record->num_large_coded;
    uint16_t list[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        uint64_t own = large_of(sizes + start, count - start);
        uint64_t coded = record->large_inverted ? ~own & valid_mask(count - start) : own;
        int num = list_block(own, 0, list);
        for (int i = 0; i < num; i++) *large++ = sizes[start + list[i]] - 2;
        num = list_block(coded, 0, list);
        for (int i = 0; i < num; i++, last = start + list[i - 1])
            room[num_coded++] = (uint32_t)(start + list[i] - last - 1);
    }
    if (rice_write(unary, low, room, num_coded)) return NO_ROOM;
    return rice_write(unary, low, room + num_coded, num_large);
}

INLINE int encode(
    const shape_t *s, record_t *records, const uint64_t *changed, uint32_t *room, streams_t *out,
    const int itemsize) {
    int64_t populations[CLASSES_MAX] = {0};
    lists_t lists;
    for (int c = 0; c < s->num_classes; c++) {
        lists.ranks[c] = room;
        lists.steps[c] = room += records[c].num_changed;
        room += records[c].num_changed;
    }
    collect(s, changed, lists, populations, out->mask, itemsize);
    writer_t signs = {out->signs, 0, 0, 0, 0};
    writer_t unary = {out->unary, out->unary_bytes, 0, 0, 0};
    writer_t low = {out->low, out->low_bytes, 0, 0, 0};
    for (int c = 0; c < s->num_classes; c++) {
        choose_coded(s, &records[c], populations[c], lists.ranks[c], room);
        part_steps(s, &records[c], lists.ranks[c], lists.steps[c], &signs);
    }
    for (int c = 0; c < s->num_classes; c++) {
        if (rice_write(&unary, &low, lists.ranks[c], records[c].num_coded)) return NO_ROOM;
        if (write_sizes(&records[c], lists.steps[c], room, &unary, &low)) return NO_ROOM;
    }
    out->unary_bytes = finish(&unary);
    out->low_bytes = finish(&low);
    return OK;
}

#endif
