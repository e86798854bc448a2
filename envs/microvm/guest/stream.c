#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"

#define PIECE_BYTES_MAX (1u << 14)

struct stream {
    uint64_t id; /* 0: free */
    int fd;
    bool ended;       /* the program has finished sending */
    bool is_held;     /* the host has not acknowledged the last piece yet */
    uint64_t send_id; /* request whose piece the program is reading; 0: none */
    struct buffer rest;
    size_t rest_at;
};

static struct stream streams[STREAMS_MAX];
static int listener = -1;
static uint64_t last_id;

static struct stream *find(uint64_t id) {
    for (unsigned i = 0; i < STREAMS_MAX; i++)
        if (streams[i].id == id) return &streams[i];
    return NULL;
}

static void drop(struct stream *s) {
    close(s->fd);
    free(s->rest.data);
    *s = (struct stream){0};
}

void stream_end_all(void) {
    if (listener >= 0) close(listener);
    listener = -1;
    for (unsigned i = 0; i < STREAMS_MAX; i++)
        if (streams[i].id != 0) drop(&streams[i]);
}

static void answer(uint64_t request_id) {
    reply_begin(0);
    reply_send(request_id, (struct view){0});
}

void stream_listen(const struct request *rq) {
    struct sockaddr_in here = {.sin_family = AF_INET,
                               .sin_port = htons((uint16_t)rq->target),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool ok = rq->target > 0 && rq->target < 65536 && listener < 0 && fd >= 0 &&
              setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
              bind(fd, (struct sockaddr *)&here, sizeof here) == 0 && listen(fd, STREAMS_MAX) == 0;
    if (ok) {
        listener = fd;
        return answer(rq->id);
    }
    if (fd >= 0) close(fd);
    reply_error(rq->id, (struct view){0}, "listen_failed", "a free port, and the first, is needed");
}

/* Writes as much as the program reads now; replies to the host when it has read all or hung up. */
static void flush(struct stream *s) {
    while (s->rest_at < s->rest.len) {
        ssize_t n = send(s->fd, s->rest.data + s->rest_at, s->rest.len - s->rest_at, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n < 0) {
            reply_error(s->send_id, (struct view){0}, "stream_gone", "the program hung up");
            return drop(s);
        }
        s->rest_at += (size_t)n;
    }
    uint64_t id = s->send_id;
    s->send_id = s->rest.len = s->rest_at = 0;
    answer(id);
}

void stream_send(const struct request *rq) {
    struct stream *s = rq->target > 0 ? find(rq->target) : NULL;
    if (s == NULL)
        return reply_error(rq->id, (struct view){0}, "stream_gone", "no such stream");
    if (s->send_id != 0 || rq->data.len > PIECE_BYTES_MAX)
        return reply_error(rq->id, (struct view){0}, "bad_request", "one piece of 16 KiB at a time");
    if (rq->data.len == 0) {
        drop(s);
        return answer(rq->id);
    }
    buffer_put(&s->rest, rq->data.data, rq->data.len);
    s->send_id = rq->id;
    flush(s);
}

void stream_took(const struct request *rq) {
    struct stream *s = rq->target > 0 ? find(rq->target) : NULL;
    if (s != NULL) s->is_held = false;
    answer(rq->id);
}

static void accept_one(void) {
    struct stream *s = find(0);
    int fd = s == NULL ? -1 : accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) *s = (struct stream){.id = ++last_id, .fd = fd};
}

/* Sends the host what the program sent; an empty piece is the end of the stream. */
static void take_in(struct stream *s) {
    static uint8_t piece[PIECE_BYTES_MAX];
    ssize_t n = recv(s->fd, piece, sizeof piece, 0);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    s->ended = n <= 0;
    s->is_held = true;
    struct buffer *b = reply_begin(2);
    mp_write_str(b, "stream");
    mp_write_uint(b, s->id);
    mp_write_str(b, "data");
    mp_write_bin(b, piece, n > 0 ? (uint32_t)n : 0);
    reply_send(0, (struct view){0});
}

unsigned stream_poll_fds(struct pollfd *fds) {
    fds[0] = (struct pollfd){.fd = find(0) != NULL ? listener : -1, .events = POLLIN};
    for (unsigned i = 0; i < STREAMS_MAX; i++) {
        const struct stream *s = &streams[i];
        short wanted = s->ended || s->is_held ? 0 : POLLIN;
        if (s->send_id != 0) wanted |= POLLOUT;
        /* Left out if no event is wanted: poll would report a hang-up again and again. */
        fds[1 + i] = (struct pollfd){.fd = s->id != 0 && wanted ? s->fd : -1, .events = wanted};
    }
    return 1 + STREAMS_MAX;
}

void stream_serve_ready(const struct pollfd *fds) {
    for (unsigned i = 0; i < STREAMS_MAX; i++) {
        struct stream *s = &streams[i];
        short seen = fds[1 + i].revents;
        if (seen == 0 || s->id == 0) continue;
        if (!s->ended && !s->is_held && seen & (POLLIN | POLLHUP | POLLERR)) take_in(s);
        if (s->send_id != 0) flush(s);
    }
    if (fds[0].revents != 0) accept_one();
}
