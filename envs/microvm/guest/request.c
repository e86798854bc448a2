#include "request.h"

#include <stdlib.h>
#include <string.h>

static bool is_string_array(struct view encoded) {
    if (encoded.data == NULL) return true;
    struct mp_reader r = mp_reader_over(encoded);
    uint32_t n = mp_read_array(&r);
    for (uint32_t i = 0; i < n && !r.bad; i++) mp_read_bytes(&r);
    return !r.bad;
}

static bool is_file_array(struct view encoded) {
    if (encoded.data == NULL) return true;
    struct mp_reader r = mp_reader_over(encoded);
    uint32_t n = mp_read_array(&r);
    for (uint32_t i = 0; i < n && !r.bad; i++) {
        if (mp_read_array(&r) != 4) return false;
        mp_read_bytes(&r);
        mp_read_uint(&r);
        mp_read_uint(&r);
        mp_read_bytes(&r);
    }
    return !r.bad;
}

static void read_field(struct mp_reader *r, struct view key, struct request *out, uint64_t *version) {
    if (view_is(key, "v")) *version = mp_read_uint(r);
    else if (view_is(key, "id")) out->id = mp_read_uint(r);
    else if (view_is(key, "deadline_ms")) out->deadline_ms = mp_read_uint(r);
    else if (view_is(key, "bytes_max")) out->bytes_max = mp_read_uint(r);
    else if (view_is(key, "offset")) out->offset = mp_read_uint(r);
    else if (view_is(key, "target")) out->target = mp_read_uint(r);
    else if (view_is(key, "epoch")) out->epoch = mp_read_uint(r);
    else if (view_is(key, "clock_ns")) out->clock_ns = mp_read_uint(r);
    else if (view_is(key, "data")) out->data = mp_read_bytes(r);
    else if (view_is(key, "entropy")) out->entropy = mp_read_bytes(r);
    else if (view_is(key, "hostname")) out->hostname = mp_read_bytes(r);
    else if (view_is(key, "machine_id")) out->machine_id = mp_read_bytes(r);
    else if (view_is(key, "op")) out->op = mp_read_bytes(r);
    else if (view_is(key, "op_key")) out->op_key = mp_read_bytes(r);
    else if (view_is(key, "path")) out->path = mp_read_bytes(r);
    else if (view_is(key, "argv")) out->argv = mp_skip(r);
    else if (view_is(key, "env")) out->env = mp_skip(r);
    else if (view_is(key, "files")) out->files = mp_skip(r);
    else if (view_is(key, "peer")) out->peer = mp_skip(r);
    else if (view_is(key, "covers")) out->covers = mp_skip(r);
    else mp_skip(r); /* a newer host may send more fields */
}

bool request_decode(struct view frame, struct request *out) {
    memset(out, 0, sizeof *out);
    struct mp_reader r = mp_reader_over(frame);
    uint64_t version = 0;
    uint32_t pairs = mp_read_map(&r);
    for (uint32_t i = 0; i < pairs && !r.bad; i++) {
        struct view key = mp_read_bytes(&r);
        if (!r.bad) read_field(&r, key, out, &version);
    }
    return !r.bad && r.at == r.end && version == PROTOCOL_VERSION && out->op.data != NULL &&
           is_string_array(out->argv) && is_string_array(out->env) && is_file_array(out->files) &&
           is_string_array(out->peer) && is_string_array(out->covers);
}

char **request_strings(struct view encoded, uint32_t items_max) {
    struct mp_reader r = mp_reader_over(encoded);
    uint32_t n = encoded.data == NULL ? 0 : mp_read_array(&r);
    if (n > items_max) return NULL;
    char **items = malloc((n + 1) * sizeof *items + encoded.len + n);
    if (items == NULL) return NULL;
    char *text = (char *)(items + n + 1);
    for (uint32_t i = 0; i < n; i++) {
        struct view v = mp_read_bytes(&r);
        if (r.bad || (v.len > 0 && memchr(v.data, 0, v.len) != NULL)) {
            free(items);
            return NULL;
        }
        items[i] = text;
        if (v.len > 0) memcpy(text, v.data, v.len);
        text[v.len] = 0;
        text += v.len + 1;
    }
    items[n] = NULL;
    return items;
}
