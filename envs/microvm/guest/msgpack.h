/* The subset of msgpack that the guest agent needs: a bounded reader and a growing writer.
 *
 * The reader never allocates and never reads past its end. Every failure sets `bad`, which stays set, so
 * callers may check once after several reads. Nesting is limited to MP_DEPTH_MAX.
 */
#ifndef PENSTOCK_MSGPACK_H
#define PENSTOCK_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MP_DEPTH_MAX 8

struct view {
    const uint8_t *data;
    uint32_t len;
};

struct mp_reader {
    const uint8_t *at;
    const uint8_t *end;
    bool bad;
};

struct mp_reader mp_reader_over(struct view bytes);
uint32_t mp_read_map(struct mp_reader *r);
uint32_t mp_read_array(struct mp_reader *r);
uint64_t mp_read_uint(struct mp_reader *r);
/* Reads a str or a bin; the guest treats both as bytes. */
struct view mp_read_bytes(struct mp_reader *r);
/* Skips one value of any type and returns its encoding. */
struct view mp_skip(struct mp_reader *r);
bool view_is(struct view v, const char *text);

struct buffer {
    uint8_t *data;
    size_t len;
    size_t cap;
};

/* Appends bytes. Aborts when out of memory, which ends the machine (the agent is PID 1). */
void buffer_put(struct buffer *b, const void *bytes, size_t n);
void mp_write_map(struct buffer *b, uint32_t pairs);
void mp_write_array(struct buffer *b, uint32_t items);
void mp_write_uint(struct buffer *b, uint64_t value);
void mp_write_bool(struct buffer *b, bool value);
void mp_write_int(struct buffer *b, int64_t value);
void mp_write_str(struct buffer *b, const char *text);
void mp_write_bin(struct buffer *b, const void *bytes, uint32_t n);

#endif
