/* The guest agent: PID 1 of a microVM, one thread, one poll loop.
 *
 *   host --frames--> wire_receive -> serve -> exec | files -> reply_send --frames--> host
 *
 * A frame is u32 little-endian length + msgpack map. Replies carry the request's id and `credit`,
 * the bytes consumed so far; execs run side by side and answer when their leader exits.
 */
#ifndef PENSTOCK_AGENT_H
#define PENSTOCK_AGENT_H

#include <poll.h>
#include <sys/types.h>

#include "request.h"

#define EXECS_MAX 64
#define COVERS_MAX 64
#define OUTPUT_BYTES_MAX (1u << 20)
#define READ_BYTES_MAX (1u << 18)
#define STREAMS_MAX 16
#define AGENT_UID 1000
#define VERIFIER_UID 1001 /* tests and their results: the code under test cannot touch them */
#define AGENT_NICE (-10)

/* wire.c: the serial line holds 4 KiB, so the host never has more than that unconfirmed. */
void wire_open(const char *device);
void wire_listen(unsigned port); /* on a vsock; returns when the host has connected */
bool wire_reconnect(void);       /* waits for the next connection; false when none can come */
void wire_adopt(int fd);
int wire_fd(void);
bool wire_read(void);                     /* takes in what has come; false when the host is gone */
bool wire_next(struct view *frame);       /* one complete frame, valid until the next call */
void wire_credit(void);                   /* confirms consumed bytes that no reply confirmed yet */
struct buffer *reply_begin(uint32_t pairs);
void reply_send(uint64_t id, struct view op_key);
void reply_error(uint64_t id, struct view op_key, const char *code, const char *text);
void wire_send(uint64_t id, uint32_t pairs, const struct buffer *body);

/* store.c: results by op_key, so that a request sent twice runs once. */
bool store_claim(const struct request *rq); /* false: answered from the store, or will be */
void store_finish(struct view op_key, uint64_t id, uint32_t pairs, const struct buffer *body);

/* launch.c: who runs a program. The tests' user and the agent's are apart: with a peer the request's
 * own program is the tests', the peer is the code under test, and one socket joins them. */
struct launched {
    pid_t leader, peer; /* peer 0: none */
    int read_ends[2];
};
bool launch(const struct request *rq, struct launched *out); /* false: an error was the reply */
void exec_drop_root(void); /* commands run, and files are touched, as AGENT_UID from now on */
bool exec_has_users(void);
void agent_as_root(void);  /* in a machine of its own alone, for the machine's own files */
void agent_as_user(void);
void agent_as_verifier(void);

/* exec.c */
void exec_start(const struct request *rq);
void exec_cancel(uint64_t id);
unsigned exec_poll_fds(struct pollfd *fds); /* appends at most 2 * EXECS_MAX, returns how many */
void exec_drain_ready(const struct pollfd *fds, unsigned n);
void exec_reap(void);
int exec_enforce_deadlines(void); /* kills the late; returns ms until the next deadline, or -1 */

/* files.c */
void file_read(const struct request *rq);
void file_write(const struct request *rq);
void file_list(const struct request *rq);

/* stream.c: one local port whose connections the host answers.
 *
 *   program --TCP 127.0.0.1--> {stream, data} --> host --> send --> program
 *
 * One piece is under way in each direction: the agent reads no more from a program before the host
 * "took" its last piece, and answers a "send" when the program has it. So nothing piles up, and a
 * slow side holds up no stream but its own. A piece without bytes is an end. */
void stream_listen(const struct request *rq);
void stream_send(const struct request *rq);
void stream_took(const struct request *rq);
void stream_end_all(void);
unsigned stream_poll_fds(struct pollfd *fds); /* writes 1 + STREAMS_MAX */
void stream_serve_ready(const struct pollfd *fds);

/* thaw.c: a machine that is copied while it runs. Frozen, the agent says nothing and ends nothing,
 * so that no frame is cut in two; a thaw gives a copy a clock, names and randomness of its own, and
 * the epoch that tells it from the machine it was copied from. */
bool thaw_frozen(void);
bool thaw_is_stale(const struct request *rq); /* meant for the machine before the copy */
void thaw_freeze(void);
void thaw(const struct request *rq);

uint64_t now_ms(void);

#endif
