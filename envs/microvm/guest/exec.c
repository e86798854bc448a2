#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

struct stream {
    int fd;
    bool truncated;
    struct buffer kept; /* the first bytes_max bytes; the rest is read and dropped */
};

struct exec {
    pid_t leader; /* 0: free */
    pid_t peer;   /* 0: none; killed when its leader exits */
    uint64_t id;
    uint64_t started_ms, deadline_ms;
    uint64_t bytes_max;
    bool timed_out;
    struct view op_key; /* a copy, freed with the slot */
    struct stream out[2];
};

static struct exec execs[EXECS_MAX];

static struct exec *free_slot(void) {
    for (unsigned i = 0; i < EXECS_MAX; i++)
        if (execs[i].leader == 0) return &execs[i];
    return NULL;
}

static void stream_open(struct stream *s, int fd) {
    *s = (struct stream){.fd = fd};
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

void exec_start(const struct request *rq) {
    struct exec *e = free_slot();
    struct launched started;
    if (e == NULL) return reply_error(rq->id, rq->op_key, "busy", "64 commands are running");
    if (!launch(rq, &started)) return;
    e->leader = started.leader;
    e->peer = started.peer;
    for (int i = 0; i < 2; i++) stream_open(&e->out[i], started.read_ends[i]);
    e->id = rq->id;
    e->started_ms = now_ms();
    e->deadline_ms = e->started_ms + rq->deadline_ms;
    e->bytes_max = rq->bytes_max < OUTPUT_BYTES_MAX ? rq->bytes_max : OUTPUT_BYTES_MAX;
    e->timed_out = false;
    struct buffer key = {0};
    buffer_put(&key, rq->op_key.data, rq->op_key.len);
    e->op_key = (struct view){key.data, (uint32_t)key.len};
}

/* Reads the available output. Never blocks, even if a background child keeps the pipe open. */
static void drain(struct exec *e, struct stream *s) {
    static uint8_t chunk[1 << 16];
    for (int rounds = 0; rounds < 16 && s->fd >= 0; rounds++) {
        ssize_t n = read(s->fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return;
        if (n == 0) {
            close(s->fd);
            s->fd = -1;
            return;
        }
        size_t room = e->bytes_max - s->kept.len;
        if ((size_t)n > room) s->truncated = true;
        buffer_put(&s->kept, chunk, (size_t)n < room ? (size_t)n : room);
    }
}

static void kill_peer(const struct exec *e) {
    if (e->peer <= 0) return;
    kill(-e->peer, SIGKILL);
    kill(e->peer, SIGKILL); /* in case it has not reached setsid yet */
}

static void finish(struct exec *e, int status) {
    kill_peer(e);
    for (int i = 0; i < 2; i++) drain(e, &e->out[i]);
    struct buffer *b = reply_begin(6);
    mp_write_str(b, "exit_code");
    mp_write_int(b, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    mp_write_str(b, "duration_ms");
    mp_write_uint(b, now_ms() - e->started_ms);
    mp_write_str(b, "timed_out");
    mp_write_bool(b, e->timed_out);
    mp_write_str(b, "truncated");
    mp_write_bool(b, e->out[0].truncated || e->out[1].truncated);
    mp_write_str(b, "stdout");
    mp_write_bin(b, e->out[0].kept.data, (uint32_t)e->out[0].kept.len);
    mp_write_str(b, "stderr");
    mp_write_bin(b, e->out[1].kept.data, (uint32_t)e->out[1].kept.len);
    reply_send(e->id, e->op_key);
    for (int i = 0; i < 2; i++) {
        if (e->out[i].fd >= 0) close(e->out[i].fd);
        free(e->out[i].kept.data);
    }
    free((void *)e->op_key.data);
    *e = (struct exec){0};
}

void exec_reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (unsigned i = 0; i < EXECS_MAX; i++)
            if (execs[i].leader == pid) finish(&execs[i], status);
            else if (execs[i].peer == pid) execs[i].peer = 0; /* the pid may be reused soon */
}

static void kill_group(struct exec *e) {
    kill(-e->leader, SIGKILL);
    kill(e->leader, SIGKILL);
    kill_peer(e);
}

void exec_cancel(uint64_t id) {
    for (unsigned i = 0; i < EXECS_MAX; i++)
        if (execs[i].leader != 0 && execs[i].id == id) kill_group(&execs[i]);
}

int exec_enforce_deadlines(void) {
    int64_t next = -1;
    uint64_t now = now_ms();
    for (unsigned i = 0; i < EXECS_MAX; i++) {
        struct exec *e = &execs[i];
        if (e->leader == 0 || e->timed_out) continue;
        int64_t left = (int64_t)(e->deadline_ms - now);
        if (left <= 0) {
            e->timed_out = true;
            kill_group(e);
        } else if (next < 0 || left < next) {
            next = left;
        }
    }
    return (int)(next > 60000 ? 60000 : next);
}

unsigned exec_poll_fds(struct pollfd *fds) {
    unsigned n = 0;
    for (unsigned i = 0; i < EXECS_MAX; i++)
        for (int k = 0; k < 2; k++)
            if (execs[i].leader != 0 && execs[i].out[k].fd >= 0)
                fds[n++] = (struct pollfd){.fd = execs[i].out[k].fd, .events = POLLIN};
    return n;
}

void exec_drain_ready(const struct pollfd *fds, unsigned n) {
    for (unsigned f = 0; f < n; f++) {
        if (fds[f].revents == 0) continue;
        for (unsigned i = 0; i < EXECS_MAX; i++)
            for (int k = 0; k < 2; k++)
                if (execs[i].leader != 0 && execs[i].out[k].fd == fds[f].fd)
                    drain(&execs[i], &execs[i].out[k]);
    }
}
