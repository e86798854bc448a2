#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"

#define ARGS_MAX 4096
#define PATH_MAX_BYTES 4096
#define PROCESSES_MAX 256
#define FILES_MAX 1024
#define PEER_FD 3

/* User and environment of a program. A vforked child only reads it. */
struct role {
    uid_t uid;
    gid_t gid;
    int line;      /* becomes PEER_FD; -1: none */
    char **covers; /* file, covered file, file, covered file ..., NULL */
};

/* Strings of a request, in separate allocations. */
struct words {
    char **argv, **env, **peer;
    char **patterns;
    char *covers[2 * COVERS_MAX + 1];
    unsigned num_covers;
};

static bool drop_root, in_image;
static uid_t user_uid = AGENT_UID;
static gid_t user_gid = AGENT_UID;

/* Those that Docker leaves to root, but for devices and raw sockets. */
static const int kept_capabilities[] = {CAP_CHOWN,  CAP_DAC_OVERRIDE, CAP_FSETID,  CAP_FOWNER,
                                        CAP_SETGID, CAP_SETUID,       CAP_SETFCAP, CAP_SETPCAP,
                                        CAP_KILL,   CAP_SYS_CHROOT,   CAP_NET_BIND_SERVICE};

void exec_drop_root(uid_t uid, gid_t gid, bool is_image) {
    drop_root = true;
    in_image = is_image;
    user_uid = uid;
    user_gid = gid;
    agent_as_user();
}

bool exec_has_users(void) { return drop_root; }

uid_t exec_user(void) { return user_uid; }

gid_t exec_group(void) { return user_gid; }

/* Files are accessed as the user: otherwise a program could plant a link and have root write through it. */
void agent_as_user(void) {
    setfsgid(user_gid);
    setfsuid(user_uid);
}

void agent_as_verifier(void) {
    setfsgid(VERIFIER_UID);
    setfsuid(VERIFIER_UID);
}

void agent_as_root(void) {
    setfsuid(0);
    setfsgid(0);
}

static void die(const char *what, const char *name, int exit_code) {
    dprintf(2, "%s: %s: %s\n", what, name, strerror(errno));
    _exit(exit_code);
}

/* Mounts files over others, visible only to this process and its children. Without root nobody can unmount
 * them, and they are locked in any namespace created inside this one. */
static void cover(char **pairs) {
    if (pairs[0] == NULL) return;
    if (unshare(CLONE_NEWNS) < 0) die("exec", "unshare", 126);
    for (; pairs[0] != NULL; pairs += 2)
        if (mount(pairs[0], pairs[1], NULL, MS_BIND, NULL) < 0) die("exec: cover", pairs[1], 126);
}

static void drop_capabilities(void) {
    for (int one = 0; one <= CAP_LAST_CAP; one++) {
        bool keep = false;
        for (size_t i = 0; i < sizeof kept_capabilities / sizeof *kept_capabilities; i++)
            keep = keep || kept_capabilities[i] == one;
        if (!keep && prctl(PR_CAPBSET_DROP, one, 0, 0, 0) < 0 && errno != EINVAL)
            die("exec", "capabilities", 126);
    }
}

/* Runs in the vforked child: only system calls, and no change to the parent's memory. */
static void become(char **argv, char **env, const char *cwd, const int *ends,
                   const struct role *role) {
    sigset_t none;
    struct rlimit processes = {PROCESSES_MAX, PROCESSES_MAX}, files = {FILES_MAX, FILES_MAX};
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    dup2(ends[0], 0);
    dup2(ends[1], 1);
    dup2(ends[2], 2);
    if (role->line >= 0) {
        dup2(role->line, PEER_FD);
        fcntl(PEER_FD, F_SETFD, 0);
    }
    cover(role->covers);
    setrlimit(RLIMIT_NPROC, &processes);
    setrlimit(RLIMIT_NOFILE, &files);
    if (drop_root) setpriority(PRIO_PROCESS, 0, 0);
    if (in_image) drop_capabilities();
    if (drop_root &&
        (setgroups(0, NULL) < 0 || setgid(role->gid) < 0 || setuid(role->uid) < 0))
        die("exec", "setuid", 126);
    if (chdir(cwd) < 0) die("exec: working directory", cwd, 126);
    execvpe(argv[0], argv, env);
    die("exec", argv[0], errno == ENOENT ? 127 : 126);
}

/* Starts a program. Its output goes to the pipes `read_ends`, or is discarded if that is NULL. */
static pid_t spawn(char **argv, char **env, const char *cwd, const struct role *role,
                   int *read_ends) {
    int out[2] = {-1, -1}, err[2] = {-1, -1}, null = open("/dev/null", O_RDWR | O_CLOEXEC);
    bool is_read = read_ends != NULL;
    pid_t pid = -1;
    if (null >= 0 &&
        (!is_read || (pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0))) {
        int ends[3] = {null, is_read ? out[1] : null, is_read ? err[1] : null};
        pid = vfork();
        if (pid == 0) become(argv, env, cwd, ends, role);
    }
    int saved = errno;
    close(null);
    close(out[1]);
    close(err[1]);
    if (pid < 0) {
        close(out[0]);
        close(err[0]);
    }
    if (is_read) {
        read_ends[0] = out[0];
        read_ends[1] = err[0];
    }
    errno = saved;
    return pid;
}

/* Adds the files that match a pattern, component by component; there may be none. */
static void expand(struct words *w, char *source, const char *at, const char *rest) {
    char path[PATH_MAX_BYTES];
    const char *slash = strchr(rest, '/');
    size_t n = slash == NULL ? strlen(rest) : (size_t)(slash - rest);
    char name[256];
    if (n >= sizeof name) return;
    memcpy(name, rest, n);
    name[n] = 0;
    bool is_plain = strpbrk(name, "*?[") == NULL;
    DIR *dir = is_plain ? NULL : opendir(at[0] == 0 ? "/" : at);
    struct dirent *entry = NULL;
    while (is_plain || (dir != NULL && (entry = readdir(dir)) != NULL)) {
        const char *found = is_plain ? name : entry->d_name;
        bool fits = is_plain || fnmatch(name, found, FNM_PERIOD) == 0;
        if (fits && (size_t)snprintf(path, sizeof path, "%s/%s", at, found) < sizeof path) {
            if (slash != NULL) {
                expand(w, source, path, slash + 1);
            } else if (w->num_covers < COVERS_MAX && access(path, F_OK) == 0) {
                w->covers[2 * w->num_covers] = source;
                w->covers[2 * w->num_covers++ + 1] = strdup(path);
            }
        }
        if (is_plain) break;
    }
    if (dir != NULL) closedir(dir);
}

static bool read_words(const struct request *rq, struct words *w) {
    w->argv = request_strings(rq->argv, ARGS_MAX);
    w->env = request_strings(rq->env, ARGS_MAX);
    w->peer = request_strings(rq->peer, ARGS_MAX);
    w->patterns = request_strings(rq->covers, 2 * COVERS_MAX);
    if (w->argv == NULL || w->argv[0] == NULL || w->env == NULL || w->peer == NULL ||
        w->patterns == NULL)
        return false;
    for (char **pair = w->patterns; pair[0] != NULL && pair[1] != NULL; pair += 2)
        if (pair[1][0] == '/') expand(w, pair[0], "", pair[1] + 1);
    return true;
}

static void free_words(struct words *w) {
    for (unsigned i = 0; i < w->num_covers; i++) free(w->covers[2 * i + 1]);
    free(w->argv);
    free(w->env);
    free(w->peer);
    free(w->patterns);
}

static bool copy_folder(struct view from, char *to, size_t room) {
    if (from.len >= room) {
        errno = ENAMETOOLONG;
        return false;
    }
    memcpy(to, from.data, from.len);
    to[from.len] = 0;
    return true;
}

/* Starts the code under test as the agent's user: alone, or as a peer of the tests, which the verifier's
 * user runs. */
static bool start(const struct request *rq, struct words *w, struct launched *out) {
    char cwd[PATH_MAX_BYTES] = "/work";
    int line[2] = {-1, -1};
    if (rq->path.len > 0 && !copy_folder(rq->path, cwd, sizeof cwd)) return false;
    if (w->peer[0] != NULL && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, line) < 0)
        return false;
    /* A peer is never root, who could read the tests. */
    bool is_peer = w->peer[0] != NULL;
    struct role code = {is_peer ? AGENT_UID : user_uid, is_peer ? AGENT_UID : user_gid, line[1],
                        w->covers};
    struct role tests = {VERIFIER_UID, VERIFIER_UID, line[0], w->covers + 2 * COVERS_MAX};
    extern char **environ;
    char **own = environ;
    environ = w->env; /* execvpe searches the PATH that the program will see */
    if (w->peer[0] != NULL) out->peer = spawn(w->peer, w->env, "/work", &code, NULL);
    if (out->peer >= 0)
        out->leader = spawn(w->argv, w->env, cwd, out->peer > 0 ? &tests : &code, out->read_ends);
    environ = own; /* before the caller frees w->env */
    int saved = errno;
    for (int i = 0; i < 2; i++)
        if (line[i] >= 0) close(line[i]);
    bool ok = out->peer >= 0 && out->leader > 0;
    if (!ok && out->peer > 0) kill(out->peer, SIGKILL);
    errno = saved;
    return ok;
}

bool launch(const struct request *rq, struct launched *out) {
    struct words w = {0};
    struct view key = rq->op_key;
    bool ok = false;
    *out = (struct launched){0};
    if (!read_words(rq, &w) || rq->deadline_ms == 0)
        reply_error(rq->id, key, "bad_request", "exec needs argv, env and deadline_ms");
    else if (view_is(rq->op, "verify") && !drop_root)
        reply_error(rq->id, key, "bad_request", "there is one user: nothing runs apart");
    else if (!(ok = start(rq, &w, out)))
        reply_error(rq->id, key, "spawn_failed", strerror(errno));
    free_words(&w);
    return ok;
}
