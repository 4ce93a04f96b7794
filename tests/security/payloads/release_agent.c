/* release_agent.c VARIANT FOLDER. CVE-2022-0492 and before: a cgroup v1 hierarchy whose release_agent the kernel runs as root on the host.
   With and without a user namespace first. The file is opened for writing, never written. */
#include "verdict.h"
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

int main(int argc, char **argv) {
    if (argc < 3) usage();
    const char *place = argv[2];
    const char *options[] = {"none,name=systemd", "rdma", "pids", "memory", "cpu", "devices", "freezer", "misc"};
    int last = EPERM;
    if (IS("userns") && unshare(CLONE_NEWUSER | 0x02000000 /* CLONE_NEWCGROUP */ | CLONE_NEWNS) != 0) denied(errno);
    mkdir(place, 0777);
    for (unsigned i = 0; i < sizeof options / sizeof *options; i++) {
        char path[128];
        if (mount("cgroup", place, "cgroup", 0, options[i]) != 0) {
            last = errno;
            continue;
        }
        snprintf(path, sizeof path, "%s/release_agent", place);
        int fd = open(path, O_WRONLY);
        last = errno;
        umount2(place, MNT_DETACH);
        if (fd >= 0) succeeded();
    }
    /* And what is mounted already. */
    const char *ready[] = {"/sys/fs/cgroup/memory/release_agent", "/sys/fs/cgroup/pids/release_agent",
                           "/sys/fs/cgroup/systemd/release_agent", "/sys/fs/cgroup/cpu/release_agent",
                           "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs"};
    for (unsigned i = 0; i < sizeof ready / sizeof *ready; i++) {
        if (open(ready[i], O_WRONLY) >= 0) succeeded();
        if (errno != ENOENT) last = errno;
    }
    denied(last);
}
