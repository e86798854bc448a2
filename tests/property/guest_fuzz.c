/* Feeds the guest agent's request parser: random bytes, and valid requests with bytes changed.
 *
 * Built with the address and undefined-behavior sanitizers; each input lies at the end of its own
 * allocation, so that one byte read too far is seen. Usage: guest_fuzz SEED CASES < VALID_REQUESTS
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "request.h"

#define SEED_BYTES_MAX 4096

static uint64_t state;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void check_inside(struct view frame, struct view part) {
    if (part.data == NULL) return;
    if (part.data < frame.data || part.data + part.len > frame.data + frame.len) abort();
}

static int try_one(const uint8_t *bytes, uint32_t n) {
    uint8_t *copy = malloc(n > 0 ? n : 1);
    struct request rq;
    memcpy(copy, bytes, n);
    struct view frame = {copy, n};
    int good = request_decode(frame, &rq);
    if (good) {
        struct view parts[] = {rq.op,   rq.op_key, rq.path,    rq.argv,     rq.env,
                               rq.files, rq.data,  rq.entropy, rq.hostname, rq.machine_id};
        for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) check_inside(frame, parts[i]);
        char **argv = request_strings(rq.argv, 64);
        for (int i = 0; argv != NULL && argv[i] != NULL; i++) (void)strlen(argv[i]);
        free(argv);
    }
    free(copy);
    return good;
}

int main(int argc, char **argv) {
    static uint8_t valid[SEED_BYTES_MAX], bytes[SEED_BYTES_MAX];
    if (argc != 3) return 2;
    state = strtoull(argv[1], NULL, 10) * 2 + 1;
    uint64_t cases = strtoull(argv[2], NULL, 10), accepted = 0;
    uint32_t n = (uint32_t)fread(valid, 1, sizeof valid, stdin);
    if (!try_one(valid, n)) return 3;
    for (uint64_t i = 0; i < cases; i++) {
        uint32_t length = n;
        if (next_random() % 4 == 0) {
            length = (uint32_t)(next_random() % 64);
            for (uint32_t k = 0; k < length; k++) bytes[k] = (uint8_t)next_random();
        } else {
            memcpy(bytes, valid, n);
            for (uint64_t k = next_random() % 4; k > 0; k--)
                bytes[next_random() % n] = (uint8_t)next_random();
            if (next_random() % 4 == 0) length = (uint32_t)(next_random() % n);
        }
        accepted += (uint64_t)try_one(bytes, length);
    }
    printf("%llu\n", (unsigned long long)accepted);
    return 0;
}
