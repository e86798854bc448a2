/* One decoded request. All views point into the frame it came from. */
#ifndef PENSTOCK_REQUEST_H
#define PENSTOCK_REQUEST_H

#include "msgpack.h"

#define PROTOCOL_VERSION 1
#define FRAME_BYTES_MAX (1u << 20)

struct request {
    uint64_t id;
    uint64_t deadline_ms;  /* of an exec, from its receipt; 0 is refused */
    uint64_t bytes_max;    /* of each output stream, or of a read */
    uint64_t offset;       /* of a read */
    uint64_t target;       /* of a cancel: the exec's id; of a send, took: the stream; of a listen: the port */
    uint64_t epoch;        /* of the machine that the host means; a thaw sets it */
    uint64_t clock_ns;     /* of a thaw: time since 1970; 0 leaves the clock */
    struct view op;
    struct view op_key;    /* empty: not de-duplicated */
    struct view path;      /* of read and list; the working directory of exec */
    struct view argv;      /* encoded array of strings */
    struct view env;       /* encoded array of "NAME=value" strings */
    struct view files;     /* encoded array of [path, mode, append, data] */
    struct view peer;      /* of verify: arguments of the code under test, another user's process */
    struct view covers;    /* of verify: encoded array of strings: file, pattern, file, pattern ... */
    struct view data;      /* of a send */
    struct view entropy;   /* of a thaw, like the next two; empty leaves things as they are */
    struct view hostname;
    struct view machine_id;
};

/* Decodes a frame's body. Returns false for anything that is not a well-formed request. */
bool request_decode(struct view frame, struct request *out);

/* Copies an encoded array of strings into a NULL-ended vector in one allocation (free() it).
 * Returns NULL when an item holds a NUL or there are more than items_max. */
char **request_strings(struct view encoded, uint32_t items_max);

#endif
