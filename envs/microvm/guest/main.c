#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <net/if.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define SERIAL_LINE "/dev/ttyS0"
#define VSOCK "vsock:"
#define LAYER_VARIABLE "penstock_layer"
#define DISK_VARIABLE "penstock_disk_mib"
#define ROOT_VARIABLE "penstock_root"
#define USER_VARIABLE "penstock_user"
#define BUILDER_VARIABLE "penstock_builder"
#define ROOT_DISKS_MAX 12
#define THREADS_MAX 512
#define FILES_PERCENT_MAX 70
#define SHARED_PERCENT 10
#define SEGMENTS_PERCENT 2
#define QUEUE_BYTES 2048
#define MESSAGE_BYTES 64
#define SEMAPHORES "250 2048 32 128"
#define BYTES_PER_INODE (16u << 10)
#define PROCESSOR_BYTES_MAX 16384
#define PROCESSOR_COPY "/mnt/cpuinfo"

uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "penstock-agent: %s: %s\n", what, strerror(errno));
    abort(); /* PID 1 dies, the kernel panics, the machine ends: the host sees a death */
}

/* Whether the root is a container image of its own instead of the base image. */
static bool has_own_root(void) { return getenv(ROOT_VARIABLE) != NULL; }

/* Mounts the layers, whose disks the kernel command line names, uppermost first, and returns the overlay
 * options. A task's layer lies on the base image; those of a container image are all of the root. */
static const char *lower_folders(void) {
    static char options[1024] = "lowerdir=";
    const char *disk = getenv(LAYER_VARIABLE), *own = getenv(ROOT_VARIABLE);
    char disks[256] = "", *rest = disks, *one;
    if (own != NULL || disk != NULL) {
        must(strlen(own != NULL ? own : disk) < sizeof disks, "name the disks");
        strcpy(disks, own != NULL ? own : disk);
        must(mount("devtmpfs", "/dev", "devtmpfs", 0, "mode=755") == 0, "mount /dev");
    }
    for (int i = 0; (one = strsep(&rest, ",")) != NULL && one[0] != 0; i++) {
        char folder[32];
        must(i < ROOT_DISKS_MAX, "mount that many layers");
        snprintf(folder, sizeof folder, "/mnt/layer%d", i);
        must(mkdir(folder, 0755) == 0, folder);
        must(mount(one, folder, "erofs", MS_RDONLY, NULL) == 0, "mount a layer");
        if (i > 0) strcat(options, ":");
        strcat(options, folder);
    }
    if (disks[0] != 0) must(umount("/dev") == 0, "umount /dev");
    if (own == NULL) strcat(options, disk == NULL ? "/" : ":/");
    strcat(options, ",upperdir=/mnt/up,workdir=/mnt/wk");
    return options;
}

/* Everything that outlives processes is limited to 90% of the memory in total: files and their inodes
 * (70 + 6), /dev/shm (10 + 1), System V segments (2), queues and semaphores (1). Otherwise a program could
 * fill the memory with it, and the kernel would find no process to kill that frees any. */
static uint64_t memory_bytes(void) {
    struct sysinfo info;
    must(sysinfo(&info) == 0, "sysinfo");
    return (uint64_t)info.totalram * info.mem_unit;
}

static void mount_bounded(const char *target, uint64_t bytes, const char *mode) {
    char options[128];
    snprintf(options, sizeof options, "size=%llu,nr_inodes=%llu,mode=%s", (unsigned long long)bytes,
             (unsigned long long)(bytes / BYTES_PER_INODE * 4 / 3 + 64), mode);
    must(mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, options) == 0, target);
}

static void mount_files(void) {
    const char *wanted = getenv(DISK_VARIABLE);
    uint64_t most = memory_bytes() / 100 * FILES_PERCENT_MAX;
    uint64_t bytes = wanted == NULL ? most : strtoull(wanted, NULL, 10) << 20;
    mount_bounded("/mnt", bytes < most ? bytes : most, "755");
}

static void bound(const char *name, const char *value) {
    char path[64];
    snprintf(path, sizeof path, "/proc/sys/kernel/%s", name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    must(fd >= 0 && write(fd, value, strlen(value)) == (ssize_t)strlen(value), path);
    close(fd);
}

static void bound_number(const char *name, uint64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    bound(name, text);
}

/* A queue holds at most as many messages as bytes, and an empty message takes MESSAGE_BYTES. The numbers of
 * SEMAPHORES are: per set, in total, operations per call, sets; 0.2 MiB at most. */
static void bound_system_v(void) {
    uint64_t memory = memory_bytes();
    bound_number("shmall", memory / 100 * SEGMENTS_PERCENT / 4096);
    bound_number("msgmax", QUEUE_BYTES);
    bound_number("msgmnb", QUEUE_BYTES);
    bound_number("msgmni", memory / 128 / (QUEUE_BYTES * MESSAGE_BYTES));
    bound("sem", SEMAPHORES);
}

/* The image is read-only and shared; writes go to a tmpfs above it, limited by its size. A kernel without
 * overlays has a private copy-on-write disk instead, which is already the root. */
static const char *mount_overlay(void) {
    mount_files();
    must(mkdir("/mnt/up", 0755) == 0 && mkdir("/mnt/wk", 0755) == 0 && mkdir("/mnt/root", 0755) == 0,
         "mkdir in /mnt");
    if (mount("overlay", "/mnt/root", "overlay", 0, lower_folders()) == 0)
        return "/mnt/root";
    must(errno == ENODEV && umount("/mnt") == 0, "mount the overlay");
    return "/";
}

/* User-mode Linux describes the host's kernel in /proc/cpuinfo: mounts a copy without that line over it. The
 * copy itself is outside of the new root. */
static void hide_host_kernel(void) {
    static char text[PROCESSOR_BYTES_MAX];
    int fd = open("proc/cpuinfo", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    must(n > 0, "read /proc/cpuinfo");
    close(fd);
    char *line = strstr(text, "\nhost"), *end = line == NULL ? NULL : strchr(line + 1, '\n');
    if (end == NULL) return;
    memmove(line, end, strlen(end) + 1);
    size_t left = strlen(text);
    fd = open(PROCESSOR_COPY, O_WRONLY | O_CREAT | O_CLOEXEC, 0444);
    must(fd >= 0 && write(fd, text, left) == (ssize_t)left, "write " PROCESSOR_COPY);
    close(fd);
    must(mount(PROCESSOR_COPY, "proc/cpuinfo", NULL, MS_BIND, NULL) == 0, "mount /proc/cpuinfo");
}

static void mount_root(void) {
    const char *root = mount_overlay();
    must(chdir(root) == 0, "enter the new root");
    must(mount("devtmpfs", "dev", "devtmpfs", 0, "mode=755") == 0 || errno == EBUSY, "mount /dev");
    must(mount("proc", "proc", "proc", 0, NULL) == 0, "mount /proc");
    hide_host_kernel();
    must(chroot(".") == 0, "make it the root");
    if (!has_own_root()) {
        must(chown("/work", AGENT_UID, AGENT_UID) == 0, "own /work");
        must(chown("/home/agent", AGENT_UID, AGENT_UID) == 0, "own /home/agent");
    }
    mkdir("/dev/pts", 0755);
    mkdir("/dev/shm", 0755);
    mount_bounded("/dev/shm", memory_bytes() / 100 * SHARED_PERCENT, "1777");
    bound_system_v();
    mount("devpts", "/dev/pts", "devpts", 0, "ptmxmode=666,mode=620");
}

/* Without a console the kernel starts init with descriptors 0 to 2 closed, and pipes would take them. */
static void open_standard_fds(void) {
    int fd = open("/dev/null", O_RDWR);
    must(fd >= 0 && dup2(fd, 0) == 0 && dup2(fd, 1) == 1 && dup2(fd, 2) == 2, "open /dev/null");
    if (fd > 2) close(fd);
}

/* In a container image programs may be root, without most capabilities (launch.c). What root may open and
 * would be more than its own machine's files goes: the host's line, the disks, settings of the kernel. */
static void close_to_root(void) {
    static const char *kept[] = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm"};
    static const char *sealed[] = {"/proc/sys", "/proc/sysrq-trigger", "/proc/irq"};
    const int how = MS_BIND | MS_REMOUNT | MS_RDONLY;
    DIR *dev = opendir("/dev");
    must(dev != NULL, "list /dev");
    for (struct dirent *entry; (entry = readdir(dev)) != NULL;) {
        bool keep = entry->d_name[0] == '.';
        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
            keep = keep || strcmp(entry->d_name, kept[i]) == 0;
        if (!keep) unlinkat(dirfd(dev), entry->d_name, 0);
    }
    closedir(dev);
    must(symlink("/proc/self/fd", "/dev/fd") == 0 && symlink("/proc/self/fd/0", "/dev/stdin") == 0 &&
             symlink("/proc/self/fd/1", "/dev/stdout") == 0 &&
             symlink("/proc/self/fd/2", "/dev/stderr") == 0,
         "link in /dev");
    bound_number("threads-max", THREADS_MAX); /* the limit on a user's processes does not hold for root */
    for (size_t i = 0; i < sizeof sealed / sizeof *sealed; i++) {
        if (access(sealed[i], F_OK) < 0) continue;
        must(mount(sealed[i], sealed[i], NULL, MS_BIND, NULL) == 0 &&
                 mount(NULL, sealed[i], NULL, how, NULL) == 0,
             sealed[i]);
    }
}

/* A container's working directory is often root's while its programs are another user's: other harnesses lay a
 * task's files there as root. Here files are the user's, so the folder is, too, as is that of an episode's own
 * files; what the image has below keeps its owner. A file system of the kernel stays as it is. */
static void own_folders(uid_t uid, gid_t gid) {
    static const char *folders[] = {"/work", "/home/agent"};
    struct stat root, one;
    must(stat("/", &root) == 0, "look at /");
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        if (stat(folders[i], &one) < 0 || one.st_uid != 0) continue;
        if (one.st_dev != root.st_dev || one.st_ino == root.st_ino) continue;
        must(chown(folders[i], uid, gid) == 0, folders[i]);
    }
}

static void raise_loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
}

/* The agent must answer even when programs use all CPU time and memory, so it gets a higher priority
 * and its pages are locked. Only once touched: locking all of them up front takes a millisecond of each
 * boot. Programs start with the normal priority. */
static void stay_responsive(void) {
    setpriority(PRIO_PROCESS, 0, AGENT_NICE);
    mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT);
}

static int block_signals(void) {
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    return signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
}

static void end(void) {
    reboot(RB_POWER_OFF);
    _exit(0); /* a namespace cannot power off; it ends with its PID 1 */
}

static void answer_empty(const struct request *rq) {
    reply_begin(0);
    reply_send(rq->id, (struct view){0});
}

static void serve(struct view frame) {
    struct request rq;
    struct view no_key = {0};
    if (!request_decode(frame, &rq))
        return reply_error(rq.id, no_key, "bad_request", "not a well-formed request");
    if (thaw_is_stale(&rq))
        return reply_error(rq.id, no_key, "stale_epoch", "meant for the machine before its copy");
    if (view_is(rq.op, "thaw")) return thaw(&rq);
    if (thaw_frozen()) return reply_error(rq.id, no_key, "frozen", "only a thaw is served now");
    bool runs = view_is(rq.op, "exec") || view_is(rq.op, "verify");
    bool writes = view_is(rq.op, "write") || view_is(rq.op, "write_verifier");
    if (!runs && !writes) rq.op_key = no_key; /* other operations may safely run twice */
    if (!store_claim(&rq)) return;
    if (runs) return exec_start(&rq);
    if (writes) return file_write(&rq);
    if (view_is(rq.op, "read")) return file_read(&rq);
    if (view_is(rq.op, "list")) return file_list(&rq);
    if (view_is(rq.op, "listen")) return stream_listen(&rq);
    if (view_is(rq.op, "send")) return stream_send(&rq);
    if (view_is(rq.op, "took")) return stream_took(&rq);
    if (view_is(rq.op, "cancel")) exec_cancel(rq.target);
    if (view_is(rq.op, "ping") || view_is(rq.op, "cancel")) return answer_empty(&rq);
    if (view_is(rq.op, "shutdown")) end();
    if (view_is(rq.op, "freeze")) {
        thaw_freeze();
        return answer_empty(&rq);
    }
    reply_error(rq.id, no_key, "unknown_op",
                "ops: ping exec verify write write_verifier read list cancel listen send took freeze "
                "thaw shutdown");
}

static void loop(int signals) {
    struct pollfd fds[2 + 2 * EXECS_MAX + 1 + STREAMS_MAX];
    struct signalfd_siginfo info;
    struct view frame;
    for (;;) {
        bool frozen = thaw_frozen();
        int wait_ms = frozen ? -1 : exec_enforce_deadlines();
        fds[0] = (struct pollfd){.fd = wire_fd(), .events = POLLIN};
        fds[1] = (struct pollfd){.fd = frozen ? -1 : signals, .events = POLLIN};
        unsigned n = frozen ? 0 : exec_poll_fds(fds + 2);
        unsigned m = frozen ? 0 : stream_poll_fds(fds + 2 + n);
        if (poll(fds, 2 + n + m, wait_ms) < 0 && errno != EINTR) must(false, "poll");
        exec_drain_ready(fds + 2, n);
        if (m > 0) stream_serve_ready(fds + 2 + n);
        if (fds[1].revents != 0) {
            while (read(signals, &info, sizeof info) > 0) {}
            exec_reap();
        }
        if (fds[0].revents == 0) continue;
        if (!wire_read() && !(frozen && wire_reconnect())) end();
        while (wire_next(&frame)) serve(frame);
        wire_credit();
    }
}

/* The argument is the line to the host. With a device or vsock:PORT (default: the serial line) the agent runs
 * in a machine and sets up its root. With the number of a descriptor it runs in a bare namespace, whose root
 * is ready and which has only one user. */
int main(int argc, char **argv) {
    if (getpid() != 1) {
        fputs("penstock-agent: runs only as PID 1 of a sandbox\n", stderr);
        return 2;
    }
    umask(022);
    const char *line = argc == 2 ? argv[1] : SERIAL_LINE;
    bool listens = strncmp(line, VSOCK, strlen(VSOCK)) == 0;
    if (line[0] != '/' && !listens) {
        wire_adopt(atoi(line));
    } else {
        mount_root();
        open_standard_fds();
        raise_loopback();
        stay_responsive();
        if (listens)
            wire_listen((unsigned)atoi(line + strlen(VSOCK)));
        else
            wire_open(line);
        const char *user = getenv(USER_VARIABLE);
        unsigned uid = AGENT_UID, gid = AGENT_UID;
        must(user == NULL || sscanf(user, "%u:%u", &uid, &gid) == 2, "read the user");
        if (has_own_root()) {
            close_to_root();
            own_folders(uid, gid);
        }
        if (getenv(BUILDER_VARIABLE) == NULL) exec_drop_root(uid, gid, has_own_root());
    }
    int signals = block_signals();
    must(signals >= 0, "signalfd");
    struct buffer *hello = reply_begin(1);
    mp_write_str(hello, "hello");
    mp_write_uint(hello, PROTOCOL_VERSION);
    reply_send(0, (struct view){0});
    loop(signals);
}
