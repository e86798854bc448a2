/* First program of machines that boot one of Debian's kernels: loads drivers that are modules, mounts the
 * image, and executes the guest agent in it. The initramfs holds only this program and /modules. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WAIT_MS 5000
#define AGENT "/sbin/penstock-agent"

static void must(int result, const char *what) {
    if (result >= 0) return;
    fprintf(stderr, "init: %s: %s\n", what, strerror(errno));
    abort(); /* PID 1 dies, the kernel panics, the machine ends */
}

/* Loads modules in the order of their names: the recipe numbers them by dependency. */
static void load_modules(void) {
    char path[32];
    for (int i = 0;; i++) {
        snprintf(path, sizeof path, "/modules/%02d.ko", i);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return;
        must((int)syscall(SYS_finit_module, fd, "", 0), path);
        close(fd);
        unlink(path);
    }
}

/* Waits until a path exists and returns it; a '#' in it stands for any digit. */
static char *await(char *path) {
    const struct timespec pause = {.tv_nsec = 1000000};
    char *digit = strchr(path, '#');
    for (int ms = 0; ms < WAIT_MS; ms++) {
        for (int i = 0; i < (digit == NULL ? 1 : 10); i++) {
            if (digit != NULL) *digit = (char)('0' + i);
            if (access(path, F_OK) == 0) return path;
        }
        nanosleep(&pause, NULL);
    }
    must(-1, path);
    return NULL;
}

int main(void) {
    static char port[] = "/dev/vport#p1";
    mkdir("/dev", 0755);
    must(mount("devtmpfs", "/dev", "devtmpfs", 0, "mode=755"), "mount /dev");
    load_modules();
    /* A port is named after the number of its virtio device, which QEMU chooses. */
    char *line = getenv("penstock_line"), *disk = getenv("penstock_image"); /* kernel command line */
    if (line == NULL) line = await(port);
    char *const argv[] = {AGENT, line, NULL};
    await(disk == NULL ? disk = "/dev/vda" : disk);
    must(mkdir("/image", 0755), "mkdir /image");
    must(mount(disk, "/image", "erofs", MS_RDONLY, NULL), "mount the image");
    must(umount("/dev"), "umount /dev");
    must(chdir("/image"), "enter the image");
    must(mount(".", "/", NULL, MS_MOVE, NULL), "move the image to /");
    must(chroot("."), "make it the root");
    execv(AGENT, argv); /* the environment holds variables of the kernel command line */
    must(-1, "exec " AGENT);
}
