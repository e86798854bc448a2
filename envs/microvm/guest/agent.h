/* The guest agent: PID 1 of a microVM, one thread, one poll loop.
 *
 *   host --frames--> wire_receive -> serve -> exec | files -> reply_send --frames--> host
 *
 * A frame is a u32 little-endian length and a msgpack map. Replies carry the id of the request and
 * `credit`, the bytes consumed so far. Commands run concurrently and reply when their leader exits.
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
#define VERIFIER_UID 1001 /* owns tests and results, which the code under test cannot touch */
#define AGENT_NICE (-10)

/* wire.c: the serial line buffers 4 KiB, so the host never has more than that unconfirmed. */
void wire_open(const char *device);
void wire_listen(unsigned port); /* on a vsock; returns when the host has connected */
bool wire_reconnect(void);       /* waits for the next connection; false when none can come */
void wire_adopt(int fd);
int wire_fd(void);
bool wire_read(void);                     /* reads available bytes; false when the host is gone */
bool wire_next(struct view *frame);       /* one complete frame, valid until the next call */
void wire_credit(void);                   /* confirms consumed bytes that no reply has confirmed */
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
/* From now on, runs commands and accesses files as this user: AGENT_UID, or the one of a container image,
 * which may be root without the capabilities that reach beyond its files and programs. */
void exec_drop_root(uid_t uid, gid_t gid, bool is_image);
bool exec_has_users(void);
uid_t exec_user(void);
gid_t exec_group(void);
void agent_as_root(void);  /* only in a machine with its own kernel, for the machine's own files */
void agent_as_user(void);
void agent_as_verifier(void);

/* exec.c */
void exec_start(const struct request *rq);
void exec_cancel(uint64_t id);
unsigned exec_poll_fds(struct pollfd *fds); /* appends at most 2 * EXECS_MAX, returns how many */
void exec_drain_ready(const struct pollfd *fds, unsigned n);
void exec_reap(void);
int exec_enforce_deadlines(void); /* kills late commands; returns ms until the next deadline, or -1 */

/* files.c */
void file_read(const struct request *rq);
void file_write(const struct request *rq);
void file_list(const struct request *rq);

/* stream.c: one local port whose connections the host serves.
 *
 *   program --TCP 127.0.0.1--> {stream, data} --> host --> send --> program
 *
 * At most one piece is in flight per stream and direction: the agent reads more from a program only after
 * the host acknowledged the last piece ("took"), and replies to a "send" once the program has read it. So
 * buffers stay small, and a slow program delays only its own stream. An empty piece ends a stream. */
void stream_listen(const struct request *rq);
void stream_send(const struct request *rq);
void stream_took(const struct request *rq);
void stream_end_all(void);
unsigned stream_poll_fds(struct pollfd *fds); /* writes 1 + STREAMS_MAX */
void stream_serve_ready(const struct pollfd *fds);

/* thaw.c: support for copying a running machine. A frozen agent sends nothing and kills nothing, so that
 * no frame is split between a machine and its copy. A thaw gives a copy its own clock, names and
 * randomness, and an epoch that distinguishes it from its original. */
bool thaw_frozen(void);
bool thaw_is_stale(const struct request *rq); /* meant for the original of this copy */
void thaw_freeze(void);
void thaw(const struct request *rq);

uint64_t now_ms(void);

#endif
