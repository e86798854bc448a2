#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define ENTROPY_BYTES_MAX 256
#define NAME_BYTES_MAX 64

static uint64_t epoch;
static bool frozen;

bool thaw_frozen(void) { return frozen; }

bool thaw_is_stale(const struct request *rq) { return rq->epoch < epoch; }

void thaw_freeze(void) { frozen = true; }

static bool set_clock(uint64_t ns) {
    struct timespec now = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return ns == 0 || clock_settime(CLOCK_REALTIME, &now) == 0;
}

/* The files that a thaw writes stay open and mapped: after a copy an emulated processor translates all code
 * again, and opening and writing files would take the largest part of that. */

/* Otherwise two copies of one memory would draw the same random numbers. */
static bool add_entropy(struct view bytes) {
    static int fd = -1;
    struct {
        int bits, size;
        uint8_t data[ENTROPY_BYTES_MAX];
    } pool;
    if (bytes.len == 0) return true;
    if (fd < 0) fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    pool.size = (int)(bytes.len < ENTROPY_BYTES_MAX ? bytes.len : ENTROPY_BYTES_MAX);
    pool.bits = 8 * pool.size;
    memcpy(pool.data, bytes.data, (size_t)pool.size);
    return fd >= 0 && ioctl(fd, RNDADDENTROPY, &pool) == 0 && ioctl(fd, RNDRESEEDCRNG) == 0;
}

static bool write_line(const char *path, struct view text) {
    char line[NAME_BYTES_MAX + 1];
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    memcpy(line, text.data, text.len);
    line[text.len] = '\n';
    bool ok = fd >= 0 && write(fd, line, text.len + 1) == (ssize_t)text.len + 1;
    int saved = errno;
    if (fd >= 0) close(fd);
    errno = saved;
    return ok;
}

static bool set_hostname(struct view name) {
    if (name.len == 0) return true;
    agent_as_root();
    bool ok = sethostname((const char *)name.data, name.len) == 0 && write_line("/etc/hostname", name);
    int saved = errno;
    agent_as_user();
    errno = saved;
    return ok;
}

/* Returns the mapped content of a file, NULL if it cannot be written. Keeps its descriptor open. */
static char *map_line(const char *path, struct view text, int *fd) {
    agent_as_root();
    *fd = write_line(path, text) ? open(path, O_RDWR | O_CLOEXEC) : -1;
    char *bytes = *fd < 0 ? MAP_FAILED
                          : mmap(NULL, text.len, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    int saved = errno;
    agent_as_user();
    errno = saved;
    return bytes == MAP_FAILED ? NULL : bytes;
}

static bool is_shorter(int fd, uint32_t len) {
    struct stat file;
    return fstat(fd, &file) != 0 || file.st_size < (off_t)len;
}

static bool set_machine_id(struct view id) {
    static char *bytes;
    static uint32_t len;
    static int fd = -1;
    if (id.len == 0) return true;
    if (id.len != len || is_shorter(fd, len)) { /* writing beyond the end of the file raises SIGBUS */
        if (bytes != NULL) munmap(bytes, len);
        if (fd >= 0) close(fd);
        bytes = map_line("/etc/machine-id", id, &fd);
        len = bytes == NULL ? 0 : id.len;
    }
    if (bytes != NULL) memcpy(bytes, id.data, len);
    return bytes != NULL;
}

static bool set_names(struct view hostname, struct view machine_id) {
    if (hostname.len > NAME_BYTES_MAX || machine_id.len > NAME_BYTES_MAX) {
        errno = ENAMETOOLONG;
        return false;
    }
    return set_hostname(hostname) && set_machine_id(machine_id);
}

void thaw(const struct request *rq) {
    const char *failed = !set_clock(rq->clock_ns)                        ? "clock"
                         : !add_entropy(rq->entropy)                     ? "entropy"
                         : !set_names(rq->hostname, rq->machine_id)      ? "names"
                                                                         : NULL;
    if (failed != NULL) {
        char text[128];
        snprintf(text, sizeof text, "%s: %s", failed, strerror(errno));
        return reply_error(rq->id, (struct view){0}, "thaw_failed", text);
    }
    if (rq->epoch != epoch) stream_end_all(); /* a copy talks to another proxy, which listens again */
    epoch = rq->epoch; /* never lower than before: such a request would be stale */
    frozen = false;
    struct buffer *b = reply_begin(1);
    mp_write_str(b, "epoch");
    mp_write_uint(b, epoch);
    reply_send(rq->id, (struct view){0});
}
