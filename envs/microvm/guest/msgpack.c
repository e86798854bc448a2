#include "msgpack.h"

#include <stdlib.h>
#include <string.h>

struct mp_reader mp_reader_over(struct view bytes) {
    return (struct mp_reader){.at = bytes.data, .end = bytes.data + bytes.len, .bad = false};
}

static uint64_t read_be(struct mp_reader *r, unsigned width) {
    if (r->bad || (size_t)(r->end - r->at) < width) {
        r->bad = true;
        return 0;
    }
    uint64_t value = 0;
    for (unsigned i = 0; i < width; i++) value = value << 8 | r->at[i];
    r->at += width;
    return value;
}

static struct view take(struct mp_reader *r, uint64_t n) {
    if (r->bad || (uint64_t)(r->end - r->at) < n) {
        r->bad = true;
        return (struct view){NULL, 0};
    }
    struct view v = {r->at, (uint32_t)n};
    r->at += n;
    return v;
}

/* A count of items can never exceed the bytes left: each item takes at least one. */
static uint32_t read_count(struct mp_reader *r, uint64_t n) {
    if (r->bad || n > (uint64_t)(r->end - r->at)) {
        r->bad = true;
        return 0;
    }
    return (uint32_t)n;
}

uint32_t mp_read_map(struct mp_reader *r) {
    uint8_t tag = (uint8_t)read_be(r, 1);
    if ((tag & 0xf0) == 0x80) return read_count(r, tag & 0x0f);
    if (tag == 0xde) return read_count(r, read_be(r, 2));
    if (tag == 0xdf) return read_count(r, read_be(r, 4));
    r->bad = true;
    return 0;
}

uint32_t mp_read_array(struct mp_reader *r) {
    uint8_t tag = (uint8_t)read_be(r, 1);
    if ((tag & 0xf0) == 0x90) return read_count(r, tag & 0x0f);
    if (tag == 0xdc) return read_count(r, read_be(r, 2));
    if (tag == 0xdd) return read_count(r, read_be(r, 4));
    r->bad = true;
    return 0;
}

uint64_t mp_read_uint(struct mp_reader *r) {
    uint8_t tag = (uint8_t)read_be(r, 1);
    if (tag < 0x80 && !r->bad) return tag;
    switch (tag) {
    case 0xc2: return 0;
    case 0xc3: return 1;
    case 0xcc: return read_be(r, 1);
    case 0xcd: return read_be(r, 2);
    case 0xce: return read_be(r, 4);
    case 0xcf: return read_be(r, 8);
    default: r->bad = true; return 0;
    }
}

struct view mp_read_bytes(struct mp_reader *r) {
    uint8_t tag = (uint8_t)read_be(r, 1);
    if ((tag & 0xe0) == 0xa0) return take(r, tag & 0x1f);
    switch (tag) {
    case 0xc4: case 0xd9: return take(r, read_be(r, 1));
    case 0xc5: case 0xda: return take(r, read_be(r, 2));
    case 0xc6: case 0xdb: return take(r, read_be(r, 4));
    default: r->bad = true; return (struct view){NULL, 0};
    }
}

static void skip_value(struct mp_reader *r, int depth);

static void skip_items(struct mp_reader *r, uint64_t n, int depth) {
    n = read_count(r, n);
    for (uint64_t i = 0; i < n && !r->bad; i++) skip_value(r, depth - 1);
}

static void skip_value(struct mp_reader *r, int depth) {
    if (depth <= 0) r->bad = true;
    uint8_t tag = (uint8_t)read_be(r, 1);
    if (r->bad || tag < 0x80 || tag >= 0xe0) return; /* fixint: the tag is the value */
    if (tag < 0x90) return skip_items(r, 2 * (uint64_t)(tag & 0x0f), depth);
    if (tag < 0xa0) return skip_items(r, tag & 0x0f, depth);
    if (tag < 0xc0) { take(r, tag & 0x1f); return; }
    switch (tag) {
    case 0xc0: case 0xc2: case 0xc3: return;
    case 0xc4: case 0xd9: take(r, read_be(r, 1)); return;
    case 0xc5: case 0xda: take(r, read_be(r, 2)); return;
    case 0xc6: case 0xdb: take(r, read_be(r, 4)); return;
    case 0xcc: case 0xd0: take(r, 1); return;
    case 0xcd: case 0xd1: take(r, 2); return;
    case 0xca: case 0xce: case 0xd2: take(r, 4); return;
    case 0xcb: case 0xcf: case 0xd3: take(r, 8); return;
    case 0xdc: skip_items(r, read_be(r, 2), depth); return;
    case 0xdd: skip_items(r, read_be(r, 4), depth); return;
    case 0xde: skip_items(r, 2 * read_be(r, 2), depth); return;
    case 0xdf: skip_items(r, 2 * read_be(r, 4), depth); return;
    default: r->bad = true; /* extension types are not supported */
    }
}

struct view mp_skip(struct mp_reader *r) {
    const uint8_t *start = r->at;
    skip_value(r, MP_DEPTH_MAX);
    if (r->bad) return (struct view){NULL, 0};
    return (struct view){start, (uint32_t)(r->at - start)};
}

bool view_is(struct view v, const char *text) {
    size_t n = strlen(text);
    return v.data != NULL && v.len == n && memcmp(v.data, text, n) == 0;
}

void buffer_put(struct buffer *b, const void *bytes, size_t n) {
    if (b->cap - b->len < n) {
        size_t cap = b->cap * 2 > b->len + n ? b->cap * 2 : b->len + n + 64;
        uint8_t *data = realloc(b->data, cap);
        if (data == NULL) abort();
        b->data = data;
        b->cap = cap;
    }
    if (n > 0) memcpy(b->data + b->len, bytes, n);
    b->len += n;
}

static void put_tagged(struct buffer *b, uint8_t tag, uint64_t value, unsigned width) {
    uint8_t out[9] = {tag};
    for (unsigned i = 0; i < width; i++) out[1 + i] = (uint8_t)(value >> (8 * (width - 1 - i)));
    buffer_put(b, out, 1 + width);
}

void mp_write_map(struct buffer *b, uint32_t pairs) { put_tagged(b, 0xdf, pairs, 4); }

void mp_write_array(struct buffer *b, uint32_t items) { put_tagged(b, 0xdd, items, 4); }

void mp_write_uint(struct buffer *b, uint64_t value) {
    if (value < 0x80)
        put_tagged(b, (uint8_t)value, 0, 0);
    else
        put_tagged(b, 0xcf, value, 8);
}

void mp_write_bool(struct buffer *b, bool value) { put_tagged(b, value ? 0xc3 : 0xc2, 0, 0); }

void mp_write_int(struct buffer *b, int64_t value) {
    if (value >= 0)
        mp_write_uint(b, (uint64_t)value);
    else
        put_tagged(b, 0xd3, (uint64_t)value, 8);
}

void mp_write_str(struct buffer *b, const char *text) {
    size_t n = strlen(text);
    put_tagged(b, 0xdb, n, 4);
    buffer_put(b, text, n);
}

void mp_write_bin(struct buffer *b, const void *bytes, uint32_t n) {
    put_tagged(b, 0xc6, n, 4);
    buffer_put(b, bytes, n);
}
