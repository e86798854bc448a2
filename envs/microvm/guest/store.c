#include <stdlib.h>
#include <string.h>

#include "agent.h"

#define SLOTS 1024
#define WAITERS_MAX 4
#define KEY_BYTES_MAX 64
#define RESULT_BYTES_MAX (4u << 20)

enum state { UNUSED, RUNNING, DONE, FORGOTTEN };

/* The ring keeps every key of the last SLOTS requests; results are dropped oldest first when they
 * exceed RESULT_BYTES_MAX, and a repeat of such a request gets an error instead of running again. */
struct slot {
    enum state state;
    uint8_t key[KEY_BYTES_MAX];
    uint32_t key_len;
    uint64_t waiters[WAITERS_MAX];
    unsigned num_waiters;
    uint32_t pairs;
    struct buffer result;
};

static struct slot slots[SLOTS];
static unsigned next_slot;
static size_t result_bytes;

static struct slot *find(struct view key) {
    for (unsigned i = 0; i < SLOTS; i++) {
        struct slot *s = &slots[(next_slot + SLOTS - 1 - i) % SLOTS];
        if (s->state == UNUSED) return NULL; /* newest first: the rest was never used */
        if (s->key_len == key.len && memcmp(s->key, key.data, key.len) == 0) return s;
    }
    return NULL;
}

static void forget(struct slot *s) {
    result_bytes -= s->result.len;
    free(s->result.data);
    s->result = (struct buffer){0};
    if (s->state == DONE) s->state = FORGOTTEN;
}

static void claim_slot(const struct request *rq) {
    struct slot *s = &slots[next_slot];
    while (s->state == RUNNING) { /* at most EXECS_MAX of SLOTS run */
        next_slot = (next_slot + 1) % SLOTS;
        s = &slots[next_slot];
    }
    next_slot = (next_slot + 1) % SLOTS;
    forget(s);
    memset(s, 0, sizeof *s);
    s->state = RUNNING;
    memcpy(s->key, rq->op_key.data, rq->op_key.len);
    s->key_len = rq->op_key.len;
    s->waiters[s->num_waiters++] = rq->id;
}

static void answer_repeat(struct slot *s, uint64_t id) {
    struct view no_key = {0};
    if (s->state == DONE)
        wire_send(id, s->pairs, &s->result);
    else if (s->state == FORGOTTEN)
        reply_error(id, no_key, "result_forgotten", "the operation ran; its result is gone");
    else if (s->num_waiters < WAITERS_MAX)
        s->waiters[s->num_waiters++] = id;
    else
        reply_error(id, no_key, "too_many_waiters", "the operation is awaited by others");
}

bool store_claim(const struct request *rq) {
    if (rq->op_key.len == 0) return true;
    if (rq->op_key.len > KEY_BYTES_MAX) {
        reply_error(rq->id, (struct view){0}, "bad_request", "op_key is longer than 64 bytes");
        return false;
    }
    struct slot *s = find(rq->op_key);
    if (s == NULL) {
        claim_slot(rq);
        return true;
    }
    answer_repeat(s, rq->id);
    return false;
}

static void trim_results(void) {
    for (unsigned i = 0; i < SLOTS && result_bytes > RESULT_BYTES_MAX; i++) {
        struct slot *s = &slots[(next_slot + i) % SLOTS];
        if (s->state == DONE) forget(s);
    }
}

void store_finish(struct view op_key, uint64_t id, uint32_t pairs, const struct buffer *body) {
    struct slot *s = find(op_key);
    if (s == NULL) return wire_send(id, pairs, body);
    for (unsigned i = 0; i < s->num_waiters; i++) wire_send(s->waiters[i], pairs, body);
    s->state = DONE;
    s->pairs = pairs;
    buffer_put(&s->result, body->data, body->len);
    result_bytes += body->len;
    trim_results();
}
