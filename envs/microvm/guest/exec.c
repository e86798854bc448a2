#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

#define ARGS_MAX 4096
#define PROCESSES_MAX 256
#define FILES_MAX 1024

struct stream {
    int fd;
    bool truncated;
    struct buffer kept; /* the first bytes_max bytes; the rest is read and dropped */
};

struct exec {
    pid_t leader; /* 0: free */
    uint64_t id;
    uint64_t started_ms, deadline_ms;
    uint64_t bytes_max;
    bool timed_out;
    struct view op_key; /* own copy */
    struct stream out[2];
};

static struct exec execs[EXECS_MAX];
static bool drop_root;

void exec_drop_root(void) {
    drop_root = true;
    agent_as_user();
}

/* Files are touched as the user: else a link that a program leaves would have root write for it. */
void agent_as_user(void) {
    setfsgid(AGENT_UID);
    setfsuid(AGENT_UID);
}

void agent_as_root(void) {
    setfsuid(0);
    setfsgid(0);
}

static struct exec *free_slot(void) {
    for (unsigned i = 0; i < EXECS_MAX; i++)
        if (execs[i].leader == 0) return &execs[i];
    return NULL;
}

static void die(const char *what, const char *name, int exit_code) {
    dprintf(2, "%s: %s: %s\n", what, name, strerror(errno));
    _exit(exit_code);
}

/* Runs in the vforked child: only system calls, and no change to the parent's memory. */
static void become(char **argv, char **env, const char *cwd, const int *ends) {
    sigset_t none;
    struct rlimit processes = {PROCESSES_MAX, PROCESSES_MAX}, files = {FILES_MAX, FILES_MAX};
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    dup2(ends[0], 0);
    dup2(ends[1], 1);
    dup2(ends[2], 2);
    setrlimit(RLIMIT_NPROC, &processes);
    setrlimit(RLIMIT_NOFILE, &files);
    if (drop_root &&
        (setgroups(0, NULL) < 0 || setgid(AGENT_UID) < 0 || setuid(AGENT_UID) < 0))
        die("exec", "setuid", 126);
    if (chdir(cwd) < 0) die("exec: working directory", cwd, 126);
    execvpe(argv[0], argv, env);
    die("exec", argv[0], errno == ENOENT ? 127 : 126);
}

static pid_t spawn(char **argv, char **env, const char *cwd, int *read_ends) {
    int out[2] = {-1, -1}, err[2] = {-1, -1}, null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pid_t pid = -1;
    if (null >= 0 && pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0) {
        int ends[3] = {null, out[1], err[1]};
        pid = vfork();
        if (pid == 0) become(argv, env, cwd, ends);
    }
    int saved = errno;
    close(null);
    close(out[1]);
    close(err[1]);
    if (pid < 0) {
        close(out[0]);
        close(err[0]);
    }
    read_ends[0] = out[0];
    read_ends[1] = err[0];
    errno = saved;
    return pid;
}

static void stream_open(struct stream *s, int fd) {
    *s = (struct stream){.fd = fd};
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

static bool launch(struct exec *e, const struct request *rq, char **argv, char **env) {
    char cwd[4096] = "/work";
    int ends[2];
    if (rq->path.len >= sizeof cwd) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (rq->path.len > 0) {
        memcpy(cwd, rq->path.data, rq->path.len);
        cwd[rq->path.len] = 0;
    }
    extern char **environ;
    char **own = environ;
    environ = env; /* execvpe searches the PATH that the program will see */
    e->leader = spawn(argv, env, cwd, ends);
    environ = own; /* before the caller frees the other */
    if (e->leader < 0) {
        e->leader = 0;
        return false;
    }
    stream_open(&e->out[0], ends[0]);
    stream_open(&e->out[1], ends[1]);
    return true;
}

void exec_start(const struct request *rq) {
    struct exec *e = free_slot();
    char **argv = request_strings(rq->argv, ARGS_MAX);
    char **env = request_strings(rq->env, ARGS_MAX);
    if (argv == NULL || env == NULL || argv[0] == NULL || rq->deadline_ms == 0) {
        reply_error(rq->id, rq->op_key, "bad_request", "exec needs argv, env and deadline_ms");
    } else if (e == NULL) {
        reply_error(rq->id, rq->op_key, "busy", "64 commands are running");
    } else if (!launch(e, rq, argv, env)) {
        reply_error(rq->id, rq->op_key, "spawn_failed", strerror(errno));
    } else {
        e->id = rq->id;
        e->started_ms = now_ms();
        e->deadline_ms = e->started_ms + rq->deadline_ms;
        e->bytes_max = rq->bytes_max < OUTPUT_BYTES_MAX ? rq->bytes_max : OUTPUT_BYTES_MAX;
        e->timed_out = false;
        struct buffer key = {0};
        buffer_put(&key, rq->op_key.data, rq->op_key.len);
        e->op_key = (struct view){key.data, (uint32_t)key.len};
    }
    free(argv);
    free(env);
}

/* Reads what is there now. A pipe that a background child still holds never blocks. */
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

static void finish(struct exec *e, int status) {
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
}

static void kill_group(struct exec *e) {
    kill(-e->leader, SIGKILL);
    kill(e->leader, SIGKILL); /* in case it has not reached setsid yet */
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
