/* Groups of blocks of elements: changed elements, members of classes, and the order of values. */
#ifndef PENSTOCK_BLOCKS_H
#define PENSTOCK_BLOCKS_H
#include "lanes.h"

#define GROUP 16
#define GROUP_ELEMENTS (GROUP * BLOCK)
#define LIST_ROOM (GROUP_ELEMENTS + BLOCK)
#define CLASSES_MAX 16

typedef struct {
    const uint8_t *base, *target;
    int64_t num_elements;
    int32_t itemsize, bits, is_float, key_shift;
    uint32_t key_bits; /* mask of keys, shifted down to bit 0 */
    int32_t num_classes, has_mask;
    int32_t first_keys[CLASSES_MAX];
} shape_t;

typedef struct {
    int64_t num_changed, num_coded, inverted, num_large_coded, large_inverted;
} record_t;

typedef struct {
    uint8_t *mask, *signs, *unary, *low;
    int64_t unary_bytes, low_bytes; /* room before encoding, length afterwards */
} streams_t;

typedef struct {
    uint64_t masks[CLASSES_MAX][GROUP]; /* members of each class */
    uint16_t ranks[CLASSES_MAX][GROUP]; /* number of members in the group before each block */
    int64_t firsts[CLASSES_MAX];        /* rank of the first member in the group */
} group_t;

INLINE uint64_t valid_mask(int64_t left) {
    if (left >= BLOCK) return ~UINT64_C(0);
    return left > 0 ? (UINT64_C(1) << left) - 1 : 0;
}

/* Returns a block, or a padded copy of it if it extends past the end of the array. */
INLINE const uint8_t *block_at(
    const uint8_t *array, int64_t start, int64_t left, uint8_t *room, const int itemsize) {
    if (left >= BLOCK) return array + start * itemsize;
    memset(room, 0, (size_t)BLOCK * itemsize);
    if (left > 0) memcpy(room, array + start * itemsize, (size_t)(left * itemsize));
    return room;
}

/* Finds the elements of the group at `start` that differ between the arrays. */
static void compare(
    const shape_t *s, const uint8_t *target, int64_t start, uint64_t *changed,
    const int itemsize) {
    uint8_t old_room[4 * BLOCK], new_room[4 * BLOCK];
    _Pragma("GCC unroll 1") for (int b = 0; b < GROUP; b++) {
        int64_t at = start + BLOCK * b, left = s->num_elements - at;
        const uint8_t *from = block_at(s->base, at, left, old_room, itemsize);
        changed[b] = differ(from, block_at(target, at, left, new_room, itemsize), itemsize);
    }
}

/* Sorts the elements of the group at `start` into classes; padding belongs to none. */
static void classify(const shape_t *s, int64_t start, group_t *group, const int itemsize) {
    uint8_t room[4 * BLOCK], keys[BLOCK];
    _Pragma("GCC unroll 1") for (int b = 0; b < GROUP; b++) {
        int64_t at = start + BLOCK * b, left = s->num_elements - at;
        group->masks[0][b] = valid_mask(left);
        if (s->num_classes == 1) continue;
        const uint8_t *block = block_at(s->base, at, left, room, itemsize);
        keys_of(block, s->key_shift, s->key_bits, keys, itemsize);
        for (int c = 1; c < s->num_classes; c++)
            group->masks[c][b] = at_least(keys, (uint8_t)s->first_keys[c]);
    }
    for (int c = 0; c + 1 < s->num_classes; c++)
        for (int b = 0; b < GROUP; b++) group->masks[c][b] &= ~group->masks[c + 1][b];
}

/* Counts the members of each class in a group; `seen` counts those of earlier groups. */
static void rank(const shape_t *s, int64_t *seen, group_t *group) {
    for (int c = 0; c < s->num_classes; c++) {
        int before = 0;
        for (int b = 0; b < GROUP; b++) {
            group->ranks[c][b] = (uint16_t)before;
            before += __builtin_popcountll(group->masks[c][b]);
        }
        group->firsts[c] = seen[c];
        seen[c] += before;
    }
}

static int64_t count_bits(const uint64_t *bits) {
    int64_t count = 0;
    for (int b = 0; b < GROUP; b++) count += __builtin_popcountll(bits[b]);
    return count;
}

/* Lists the positions of the set bits of a group, in a list of LIST_ROOM entries. */
static int list_bits(const uint64_t *bits, uint16_t *list) {
    int count = 0;
    _Pragma("GCC unroll 1") for (int b = 0; b < GROUP; b++)
        count += list_block(bits[b], BLOCK * b, list + count);
    return count;
}

/* Order of the bit patterns of an element type. Its functions have no branches: signs are
 * unpredictable, and one branch on them took a third of the decoding time. */
typedef struct {
    uint32_t ones, sign, turned; /* all bits; the sign bit; bits that negative floats invert */
    int top;
} order_t;

INLINE order_t order_of(const shape_t *s) {
    uint32_t sign = UINT32_C(1) << (s->bits - 1), ones = sign | (sign - 1);
    return (order_t){ones, sign, s->is_float ? ones : 0, s->bits - 1};
}

INLINE uint32_t ordered(order_t order, uint32_t value) {
    return value ^ (((0 - (value >> order.top)) | order.sign) & order.turned);
}

INLINE uint32_t from_ordered(order_t order, uint32_t rank) {
    return rank ^ ((((rank >> order.top) - 1) | order.sign) & order.turned);
}

static void fill_class_table(const shape_t *s, uint8_t *class_of) {
    for (int key = 0, c = 0; key < 256; key++) {
        while (c + 1 < s->num_classes && key >= s->first_keys[c + 1]) c++;
        class_of[key] = (uint8_t)c;
    }
}

#endif
