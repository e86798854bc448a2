/* Starts the host process of a machine: joins control groups, sets limits, changes the user id.
 *
 *   penstock-launcher [-g TASKS_FILE]... [-f FILE_BYTES] [-p PROCESSES] [-u UID] [-a]
 *                     PROGRAM [ARGUMENT]...
 *
 * -a: disables address randomization.
 *
 * PROGRAM inherits all of this. Any option that fails ends the start. In version 1 of control groups
 * a thread that moves itself through `tasks` avoids a lock that `cgroup.procs` takes for the whole host. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/resource.h>
#include <unistd.h>

#define DESCRIPTORS_MAX 4096

static void must(int result, const char *what) {
    if (result >= 0) return;
    fprintf(stderr, "penstock-launcher: %s: %s\n", what, strerror(errno));
    _exit(125);
}

static void join(const char *tasks) {
    int fd = open(tasks, O_WRONLY | O_CLOEXEC);
    must(fd, tasks);
    must((int)write(fd, "0", 1), tasks);
    close(fd);
}

static void limit(int resource, rlim_t most, const char *what) {
    struct rlimit now;
    must(getrlimit(resource, &now), what);
    if (now.rlim_max < most) most = now.rlim_max;
    now = (struct rlimit){most, most};
    must(setrlimit(resource, &now), what);
}

static unsigned long number(const char *text) {
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno == 0 && end != text && *end == 0) return value;
    fprintf(stderr, "penstock-launcher: expected a number, got %s\n", text);
    _exit(125);
}

static void become(uid_t id) {
    must(setgroups(0, NULL), "setgroups");
    must(setresgid(id, id, id), "setresgid");
    must(setresuid(id, id, id), "setresuid");
}

int main(int argc, char **argv) {
    uid_t id = 0;
    int option;
    while ((option = getopt(argc, argv, "+ag:f:p:u:")) != -1) {
        if (option == 'g') join(optarg);
        else if (option == 'f') limit(RLIMIT_FSIZE, number(optarg), "file size");
        else if (option == 'p') limit(RLIMIT_NPROC, number(optarg), "processes");
        else if (option == 'a') must(personality(PER_LINUX | ADDR_NO_RANDOMIZE), "personality");
        else if (option == 'u') id = (uid_t)number(optarg);
        else return 125;
    }
    if (optind >= argc) return 125;
    limit(RLIMIT_NOFILE, DESCRIPTORS_MAX, "descriptors");
    limit(RLIMIT_CORE, 0, "core");
    limit(RLIMIT_MSGQUEUE, 0, "message queues");
    limit(RLIMIT_MEMLOCK, 0, "locked memory");
    if (id != 0) become(id);
    execv(argv[optind], argv + optind);
    must(-1, argv[optind]);
}
