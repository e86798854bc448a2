/* Damages encoded deltas at random and decodes them, each string in a block of memory of its own, so
 * that a sanitizer sees the first byte read or written out of bounds. Arguments: seed, rounds. */
#include <stdio.h>
#include <stdlib.h>

#include "../../kernels/delta/c/delta.c"

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return below ? (state >> 33) % below : 0;
}

static uint8_t *exact_copy(const uint8_t *data, int64_t bytes) {
    uint8_t *copy = malloc((size_t)bytes);
    if (bytes) memcpy(copy, data, (size_t)bytes);
    return copy;
}

static void damage(uint8_t *data, int64_t bytes, int flips) {
    for (int i = 0; bytes && i < flips; i++) data[draw((uint64_t)bytes)] ^= (uint8_t)(1 << draw(8));
}

static int64_t count_numbers(const shape_t *s, const record_t *records, int changed, int each) {
    int64_t all = 0;
    for (int c = 0; c < s->num_classes; c++)
        all += records[c].num_coded + changed * records[c].num_changed + each;
    return all;
}

static int one_round(void) {
    static const int ITEMSIZES[] = {1, 2, 4, 1}, BITS[] = {8, 16, 32, 4}, SHIFTS[] = {3, 7, 23, 0};
    static const uint32_t KEYS[] = {15, 255, 255, 0};
    int kind = (int)draw(4), itemsize = ITEMSIZES[kind];
    int64_t count = (int64_t)draw(draw(8) ? 1500 : 20000), room = 5 * count + 4096;
    shape_t s = {.num_elements = count, .itemsize = itemsize, .bits = BITS[kind]};
    s.is_float = kind != 3;
    s.key_shift = SHIFTS[kind];
    s.key_bits = KEYS[kind];
    s.has_mask = draw(4) == 0;
    s.num_classes = 1;
    for (uint32_t key = 1 + (uint32_t)draw(4); !s.has_mask && key <= KEYS[kind] && s.num_classes < 16;
         key += 1 + (uint32_t)draw(20))
        s.first_keys[s.num_classes++] = (int32_t)key;
    uint8_t *base = malloc((size_t)(count * itemsize)), *target = malloc((size_t)(count * itemsize));
    uint64_t density = 1 + draw(20);
    for (int64_t i = 0; i < count * itemsize; i++) {
        base[i] = (uint8_t)draw(kind == 3 ? 16 : 256);
        target[i] = draw(density) ? base[i] : (uint8_t)draw(kind == 3 ? 16 : 256);
    }
    s.base = base;
    s.target = target;
    record_t records[CLASSES_MAX] = {{0}};
    int64_t mask_bytes = s.has_mask ? (count + 7) / 8 : 0;
    uint8_t *mask = malloc((size_t)mask_bytes), *signs = malloc((size_t)(count + 7) / 8 + 8);
    uint8_t *unary = malloc((size_t)room), *low = malloc((size_t)room);
    streams_t out = {mask, signs, unary, low, room, room};
    uint64_t *marks = malloc((size_t)(count + GROUP_ELEMENTS - 1) / GROUP_ELEMENTS * GROUP * 8);
    int64_t cut = (int64_t)draw((uint64_t)count / TILE_ELEMENTS + 1) * TILE_ELEMENTS;
    penstock_delta_count(0, cut, &s, records, marks);
    penstock_delta_count(cut, count, &s, records, marks);
    uint32_t *numbers = malloc(4 * (size_t)(1 + count_numbers(&s, records, 3, 0)));
    if (penstock_delta_encode(&s, records, marks, numbers, &out)) return 1;
    free(numbers);
    int64_t changed = 0, unary_bytes = out.unary_bytes, low_bytes = out.low_bytes;
    for (int c = 0; c < s.num_classes; c++) {
        if (draw(8) == 0) records[c].num_coded = (int64_t)draw((uint64_t)count / 16 + 1);
        if (draw(8) == 0) records[c].num_large_coded = (int64_t)draw((uint64_t)records[c].num_changed + 1);
        if (draw(8) == 0) records[c].inverted ^= 1;
        if (draw(8) == 0) records[c].large_inverted ^= 1;
        changed += records[c].num_changed;
    }
    if (draw(4) == 0) unary_bytes = (int64_t)draw((uint64_t)unary_bytes + 1);
    if (draw(4) == 0) low_bytes = (int64_t)draw((uint64_t)low_bytes + 1);
    streams_t in = {exact_copy(mask, mask_bytes), exact_copy(signs, (changed + 7) / 8),
                    exact_copy(unary, unary_bytes), exact_copy(low, low_bytes), unary_bytes, low_bytes};
    damage(in.mask, mask_bytes, (int)draw(3));
    damage(in.unary, unary_bytes, (int)draw(4));
    damage(in.low, low_bytes, (int)draw(4));
    int64_t *places = malloc(8 * (size_t)changed);
    uint8_t *values = malloc((size_t)(changed * itemsize));
    numbers = malloc(4 * (size_t)count_numbers(&s, records, 3, 1));
    series_t series[2];
    int is_read = penstock_delta_read(&s, records, &in, numbers, &series[0]) == OK;
    series[1] = series[0];
    int status = is_read ? penstock_delta_decode(&s, &series[0], places, values) : CORRUPT;
    uint8_t *made = malloc((size_t)(count * itemsize));
    int again = is_read ? penstock_delta_apply(0, cut, &s, &series[1], made) : CORRUPT;
    if (again == OK) again = penstock_delta_apply(cut, count, &s, &series[1], made);
    if (again != status) return 1;
    for (int64_t i = 0; !status && i < changed; i++)
        if (memcmp(made + places[i] * itemsize, values + i * itemsize, (size_t)itemsize)) return 1;
    for (int64_t i = 0; !status && i < changed; i++)
        if (places[i] < 0 || places[i] >= count || (i && places[i] <= places[i - 1])) return 1;
    void *blocks[] = {base, target, mask, signs, unary, low, in.mask, in.signs, in.unary, in.low, places, values, marks, numbers, made};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
    return 0;
}

int main(int argc, char **argv) {
    state = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 1000;
    for (long i = 0; i < rounds; i++)
        if (one_round()) return printf("round %ld: a place out of order or bounds\n", i), 1;
    return 0;
}
