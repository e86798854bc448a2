/* A decoded request. All views point into the frame that it was decoded from. */
#ifndef PENSTOCK_REQUEST_H
#define PENSTOCK_REQUEST_H

#include "msgpack.h"

#define PROTOCOL_VERSION 1
#define FRAME_BYTES_MAX (1u << 20)

struct request {
    uint64_t id;
    uint64_t deadline_ms;  /* exec, verify: ms from receipt; 0 is refused */
    uint64_t bytes_max;    /* exec, verify: per output stream; read: in total; list: items */
    uint64_t offset;       /* read: first byte */
    uint64_t target;       /* cancel: id of the exec; send, took: stream; listen: port */
    uint64_t epoch;        /* number of the copy that the host means; thaw sets it */
    uint64_t clock_ns;     /* thaw: time since 1970; 0 leaves the clock alone */
    struct view op;
    struct view op_key;    /* empty: not de-duplicated */
    struct view path;      /* read, list: the path; exec, verify: the working directory */
    struct view argv;      /* encoded array of strings */
    struct view env;       /* encoded array of "NAME=value" strings */
    struct view files;     /* encoded array of [path, mode, append, data] */
    struct view peer;      /* verify: encoded argv of the code under test, run by the agent's user */
    struct view covers;    /* verify: encoded array of strings: file, pattern, file, pattern ... */
    struct view data;      /* send: the piece */
    struct view entropy;   /* thaw, like the next two; empty changes nothing */
    struct view hostname;
    struct view machine_id;
};

/* Decodes the body of a frame. Returns false if it is not a well-formed request. */
bool request_decode(struct view frame, struct request *out);

/* Copies an encoded array of strings into a NULL-ended vector in one allocation (free() it).
 * Returns NULL if an item contains a NUL or there are more than items_max. */
char **request_strings(struct view encoded, uint32_t items_max);

#endif
