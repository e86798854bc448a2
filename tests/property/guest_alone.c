/* Lets the guest agent run on a host under sanitizers: what would touch the machine leaves a record.
 *
 * Linked with the agent's own sources by `-Wl,--wrap` for every function below. Records are files in
 * the folder GUEST_RECORDS: `clock` holds the last time that was set, `entropy` all bytes that were
 * added, `hostname` and `machine-id` what the agent wrote in /etc, `name` what it gave the kernel.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <linux/random.h>

#define REFUSED_S 13 /* a time that the kernel refuses: before the machine's start, say */

int __real_open(const char *path, int flags, ...);
int __real_ioctl(int fd, unsigned long request, ...);

static int record(const char *name, int flags) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("GUEST_RECORDS"), name);
    int fd = __real_open(path, O_CREAT | O_CLOEXEC | flags, 0644);
    if (fd < 0) abort();
    return fd;
}

static void keep(const char *name, int flags, const void *data, size_t n) {
    int fd = record(name, O_WRONLY | flags);
    if (write(fd, data, n) != (ssize_t)n) abort();
    close(fd);
}

pid_t __wrap_getpid(void) { return 1; }

/* The records are the host's user's. */
int __wrap_setfsuid(uid_t user) { return (int)user; }

int __wrap_setfsgid(gid_t group) { return (int)group; }

int __wrap_reboot(int command) { _exit(command == 0x4321fedc ? 0 : 3); }

int __wrap_clock_settime(clockid_t clock, const struct timespec *now) {
    char text[64];
    if (clock != CLOCK_REALTIME || now->tv_nsec < 0 || now->tv_nsec > 999999999) abort();
    errno = EINVAL;
    if (now->tv_sec == REFUSED_S) return -1;
    snprintf(text, sizeof text, "%lld.%09ld", (long long)now->tv_sec, now->tv_nsec);
    keep("clock", O_TRUNC, text, strlen(text));
    return 0;
}

int __wrap_sethostname(const char *name, size_t n) {
    keep("name", O_TRUNC, name, n);
    return 0;
}

int __wrap_open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & O_CREAT ? va_arg(rest, int) : 0;
    va_end(rest);
    if (strncmp(path, "/etc/", 5) == 0) return record(path + 5, flags);
    return __real_open(path, flags, mode);
}

int __wrap_ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    const struct rand_pool_info *pool = va_arg(rest, const struct rand_pool_info *);
    va_end(rest);
    if (request == RNDRESEEDCRNG) return 0;
    if (request != RNDADDENTROPY) return __real_ioctl(fd, request, pool);
    if (pool->buf_size < 0 || pool->entropy_count != 8 * pool->buf_size) abort();
    keep("entropy", O_APPEND, pool->buf, (size_t)pool->buf_size);
    return 0;
}
