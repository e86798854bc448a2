#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

#define PATH_BYTES_MAX 4096
#define LIST_DEPTH_MAX 64
#define LIST_BYTES_MAX (1u << 20)
#define KEEP_MODE 0100000 /* in a mode: of a file that is there already, its own mode stays */

static bool copy_path(struct view v, char *path) {
    if (v.len == 0 || v.len >= PATH_BYTES_MAX || v.data[0] != '/' ||
        memchr(v.data, 0, v.len) != NULL) {
        errno = EINVAL;
        return false;
    }
    memcpy(path, v.data, v.len);
    path[v.len] = 0;
    return true;
}

static void reply_errno(const struct request *rq, const char *path) {
    char text[PATH_BYTES_MAX + 64];
    const char *code = errno == ENOENT ? "not_found" : errno == ENOSPC ? "disk_full" : "file_error";
    snprintf(text, sizeof text, "%s: %s", path, strerror(errno));
    reply_error(rq->id, rq->op_key, code, text);
}

/* Opens only regular files: a FIFO or a device could block the agent forever. */
static int open_regular(const char *path, struct stat *info) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return -1;
    if (fstat(fd, info) == 0 && S_ISREG(info->st_mode)) return fd;
    close(fd);
    errno = S_ISDIR(info->st_mode) ? EISDIR : EINVAL;
    return -1;
}

void file_read(const struct request *rq) {
    char path[PATH_BYTES_MAX] = "";
    struct stat info;
    int fd = copy_path(rq->path, path) ? open_regular(path, &info) : -1;
    if (fd < 0) return reply_errno(rq, path);
    size_t n = rq->bytes_max < READ_BYTES_MAX ? rq->bytes_max : READ_BYTES_MAX;
    uint8_t *data = malloc(n + 1);
    ssize_t got = data == NULL ? -1 : pread(fd, data, n, (off_t)rq->offset);
    if (got < 0) {
        reply_errno(rq, path);
    } else {
        struct buffer *b = reply_begin(2);
        mp_write_str(b, "size");
        mp_write_uint(b, (uint64_t)info.st_size);
        mp_write_str(b, "data");
        mp_write_bin(b, data, (uint32_t)got);
        reply_send(rq->id, rq->op_key);
    }
    free(data);
    close(fd);
}

/* Owner and permissions of written files: everybody may read the user's, only the verifier its own. */
struct owner {
    uid_t uid;
    gid_t gid;
    mode_t dirs, files;
};

static const struct owner verifier = {VERIFIER_UID, VERIFIER_UID, 0700, 0700};

static bool make_parents(char *path, const struct owner *who) {
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        bool made = mkdir(path, who->dirs) == 0;
        bool ok = made ? chown(path, who->uid, who->gid) == 0 : errno == EEXIST;
        *slash = '/';
        if (!ok) return false;
    }
    return true;
}

static bool write_piece(char *path, uint64_t asked, bool append, struct view data,
                        const struct owner *who) {
    int flags = O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | (append ? O_APPEND : O_TRUNC);
    struct stat info;
    bool keeps = (asked & KEEP_MODE) != 0 && stat(path, &info) == 0 && S_ISREG(info.st_mode);
    mode_t mode = (keeps ? info.st_mode : (mode_t)asked) & who->files;
    int fd = open(path, flags, mode);
    if (fd < 0 && errno == ENOENT && make_parents(path, who)) fd = open(path, flags, mode);
    if (fd < 0 && errno == EACCES && keeps && chmod(path, mode | S_IWUSR) == 0) {
        fd = open(path, flags, mode); /* root, whom other harnesses run as, could write it */
        if (fd < 0) chmod(path, mode);
    }
    if (fd < 0) return false;
    bool ok = true;
    for (uint32_t at = 0; ok && at < data.len;) {
        ssize_t n = write(fd, data.data + at, data.len - at);
        ok = n > 0;
        if (ok) at += (uint32_t)n;
    }
    ok = ok && (append || fchown(fd, who->uid, who->gid) == 0);
    ok = ok && ((append && !keeps) || fchmod(fd, mode) == 0);
    int saved = errno;
    close(fd);
    errno = saved;
    return ok;
}

void file_write(const struct request *rq) {
    char path[PATH_BYTES_MAX] = "";
    struct mp_reader r = mp_reader_over(rq->files);
    uint32_t n = rq->files.data == NULL ? 0 : mp_read_array(&r);
    const struct owner agent = {exec_user(), exec_group(), 0755, 07777};
    const struct owner *who = view_is(rq->op, "write_verifier") ? &verifier : &agent;
    if (who == &verifier && !exec_has_users())
        return reply_error(rq->id, rq->op_key, "bad_request", "there is one user");
    if (who == &verifier) agent_as_verifier();
    bool ok = true;
    for (uint32_t i = 0; ok && i < n; i++) {
        mp_read_array(&r);
        struct view name = mp_read_bytes(&r);
        uint64_t mode = mp_read_uint(&r);
        bool append = mp_read_uint(&r) != 0;
        struct view data = mp_read_bytes(&r);
        ok = copy_path(name, path) && write_piece(path, mode, append, data, who);
    }
    int saved = errno;
    if (who == &verifier) agent_as_user();
    errno = saved;
    if (!ok) return reply_errno(rq, path);
    struct buffer *b = reply_begin(1);
    mp_write_str(b, "written");
    mp_write_uint(b, n);
    reply_send(rq->id, rq->op_key);
}

struct listing {
    struct buffer items;
    uint32_t count;
    uint64_t count_max;
    bool truncated;
    char path[PATH_BYTES_MAX];
};

static void list_item(struct listing *l, const struct stat *info) {
    const char *kind = S_ISREG(info->st_mode)   ? "file"
                       : S_ISDIR(info->st_mode) ? "dir"
                       : S_ISLNK(info->st_mode) ? "link"
                                                : "other";
    mp_write_array(&l->items, 4);
    mp_write_bin(&l->items, l->path, (uint32_t)strlen(l->path));
    mp_write_str(&l->items, kind);
    mp_write_uint(&l->items, (uint64_t)info->st_size);
    mp_write_uint(&l->items, info->st_mode & 07777);
    l->count++;
}

static void list_dir(struct listing *l, int depth) {
    size_t base = strlen(l->path);
    DIR *dir = depth > 0 ? opendir(l->path) : NULL;
    struct dirent *entry;
    if (dir == NULL) l->truncated = true;
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (l->count >= l->count_max || l->items.len > LIST_BYTES_MAX ||
            base + strlen(entry->d_name) + 2 > sizeof l->path) {
            l->truncated = true;
            break;
        }
        sprintf(l->path + base, "%s%s", l->path[base - 1] == '/' ? "" : "/", entry->d_name);
        if (lstat(l->path, &info) == 0) {
            list_item(l, &info);
            if (S_ISDIR(info.st_mode)) list_dir(l, depth - 1);
        }
        l->path[base] = 0;
    }
    if (dir != NULL) closedir(dir);
}

void file_list(const struct request *rq) {
    struct listing *l = calloc(1, sizeof *l);
    struct stat info;
    if (l == NULL) abort();
    l->count_max = rq->bytes_max;
    if (!copy_path(rq->path, l->path) || stat(l->path, &info) < 0) {
        reply_errno(rq, l->path);
    } else if (!S_ISDIR(info.st_mode)) {
        errno = ENOTDIR;
        reply_errno(rq, l->path);
    } else {
        list_dir(l, LIST_DEPTH_MAX);
        struct buffer *b = reply_begin(2);
        mp_write_str(b, "truncated");
        mp_write_bool(b, l->truncated);
        mp_write_str(b, "files");
        mp_write_array(b, l->count);
        buffer_put(b, l->items.data, l->items.len);
        reply_send(rq->id, rq->op_key);
    }
    free(l->items.data);
    free(l);
}
