/* Sum modulo 2^64 of a hash of position and value over elements; see `element_sum` in digest.py. */
#include <stdint.h>

static inline uint64_t mix(uint64_t place, uint64_t value) {
    uint64_t x = place * UINT64_C(0x9E3779B97F4A7C15) + UINT64_C(0xBF58476D1CE4E5B9);
    x ^= (x >> 31) + (value + 1) * UINT64_C(0xD6E8FEB86659FD93);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

#define RUN(type)                                              \
    for (int64_t i = 0; i < count; i++)                        \
        sum += mix((uint64_t)(start + i), ((const type *)values)[i])

uint64_t penstock_run_sum(int64_t start, const void *values, int64_t count, int64_t itemsize) {
    uint64_t sum = 0;
    if (itemsize == 1) RUN(uint8_t);
    if (itemsize == 2) RUN(uint16_t);
    if (itemsize == 4) RUN(uint32_t);
    if (itemsize == 8) RUN(uint64_t);
    return sum;
}
