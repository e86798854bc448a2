#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include <linux/vm_sockets.h>

#include "agent.h"

#define CREDIT_STEP 1024 /* confirm consumed bytes at least this often */
#define KEEP_BYTES_MAX (1u << 16)
#define LINE_WAIT_MS 5000

static int line_fd = -1, listener_fd = -1;
static struct buffer inbox; /* bytes read; the first `inbox_at` of them were returned already */
static size_t inbox_at;
static uint64_t consumed, confirmed;
static struct buffer body, outbox;
static uint32_t body_pairs;

int wire_fd(void) { return line_fd; }

/* Waits: a virtio port appears and gets connected some time after its driver was loaded. */
static void await_host(const char *device) {
    const struct timespec pause = {.tv_nsec = 1000000};
    for (int ms = 0; ms < LINE_WAIT_MS; ms++) {
        if (line_fd < 0) line_fd = open(device, O_RDWR | O_NOCTTY | O_CLOEXEC);
        struct pollfd ready = {.fd = line_fd, .events = POLLOUT};
        if (line_fd >= 0 && poll(&ready, 1, 0) == 1 && !(ready.revents & POLLHUP)) return;
        nanosleep(&pause, NULL);
    }
    abort();
}

void wire_open(const char *device) {
    struct termios raw;
    await_host(device);
    if (!isatty(line_fd)) return;
    if (tcgetattr(line_fd, &raw) < 0) abort();
    cfmakeraw(&raw);
    if (tcsetattr(line_fd, TCSANOW, &raw) < 0) abort();
}

static void accept_host(void) {
    do line_fd = accept4(listener_fd, NULL, NULL, SOCK_CLOEXEC);
    while (line_fd < 0 && errno == EINTR);
    if (line_fd < 0) abort();
}

void wire_listen(unsigned port) {
    struct sockaddr_vm here = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = port};
    listener_fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener_fd < 0 || bind(listener_fd, (struct sockaddr *)&here, sizeof here) < 0 ||
        listen(listener_fd, 1) < 0)
        abort();
    accept_host();
}

bool wire_reconnect(void) {
    if (listener_fd < 0) return false;
    close(line_fd);
    accept_host();
    return true;
}

void wire_adopt(int fd) {
    line_fd = fd;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) abort();
}

/* Frees a buffer that a large frame has grown, so that idle machines stay small. */
static void buffer_clear(struct buffer *b) {
    if (b->cap > KEEP_BYTES_MAX) {
        free(b->data);
        *b = (struct buffer){0};
    }
    b->len = 0;
}

bool wire_read(void) {
    uint8_t chunk[4096];
    ssize_t n = read(line_fd, chunk, sizeof chunk);
    if (n < 0) return errno == EINTR || errno == EAGAIN;
    if (n == 0) return false;
    buffer_put(&inbox, chunk, (size_t)n);
    consumed += (uint64_t)n;
    return true;
}

bool wire_next(struct view *frame) {
    size_t left = inbox.len - inbox_at;
    uint32_t n = 0;
    if (left >= 4) memcpy(&n, inbox.data + inbox_at, 4);
    if (n > FRAME_BYTES_MAX) abort(); /* framing is lost and cannot be recovered */
    if (left >= 4 && left - 4 >= n) {
        *frame = (struct view){inbox.data + inbox_at + 4, n};
        inbox_at += 4 + (size_t)n;
        return true;
    }
    if (left == 0) {
        buffer_clear(&inbox);
    } else if (inbox_at > 0) {
        memmove(inbox.data, inbox.data + inbox_at, left);
        inbox.len = left;
    }
    inbox_at = 0;
    return false;
}

void wire_credit(void) {
    struct buffer none = {0};
    if (consumed - confirmed >= CREDIT_STEP) wire_send(0, 0, &none);
}

static void write_all(const uint8_t *data, size_t n) {
    while (n > 0) {
        ssize_t done = write(line_fd, data, n);
        if (done < 0 && errno != EINTR && errno != EAGAIN) abort();
        if (done < 0) continue;
        data += done;
        n -= (size_t)done;
    }
}

void wire_send(uint64_t id, uint32_t pairs, const struct buffer *content) {
    buffer_put(&outbox, "\0\0\0\0", 4);
    mp_write_map(&outbox, 3 + pairs);
    mp_write_str(&outbox, "v");
    mp_write_uint(&outbox, PROTOCOL_VERSION);
    mp_write_str(&outbox, "credit");
    mp_write_uint(&outbox, consumed);
    mp_write_str(&outbox, "id");
    mp_write_uint(&outbox, id);
    buffer_put(&outbox, content->data, content->len);
    uint32_t n = (uint32_t)(outbox.len - 4);
    memcpy(outbox.data, &n, 4);
    confirmed = consumed;
    write_all(outbox.data, outbox.len);
    buffer_clear(&outbox);
}

struct buffer *reply_begin(uint32_t pairs) {
    buffer_clear(&body);
    body_pairs = pairs;
    return &body;
}

void reply_send(uint64_t id, struct view op_key) {
    if (op_key.len > 0)
        store_finish(op_key, id, body_pairs, &body);
    else
        wire_send(id, body_pairs, &body);
}

void reply_error(uint64_t id, struct view op_key, const char *code, const char *text) {
    struct buffer *b = reply_begin(2);
    mp_write_str(b, "error");
    mp_write_str(b, code);
    mp_write_str(b, "text");
    mp_write_bin(b, text, (uint32_t)strlen(text));
    reply_send(id, op_key);
}
