/* Reaching into another process: trace.c VARIANT PID [ADDRESS]. The victim is a child of the test. */
#include "verdict.h"
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/wait.h>

static int open_in(int pid, const char *name, int flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    return open(path, flags);
}

int main(int argc, char **argv) {
    if (argc < 3) usage();
    int pid = atoi(argv[2]);
    char byte = 0;
    struct iovec here = {&byte, 1};
    struct iovec there = {(void *)0x400000, 1};
    if (argc > 3) there.iov_base = (void *)strtoul(argv[3], NULL, 16);
    if (IS("attach")) {
        if (ptrace(PTRACE_ATTACH, pid, 0, 0) != 0) denied(errno);
        waitpid(pid, NULL, 0);
        ptrace(PTRACE_DETACH, pid, 0, 0);
        succeeded();
    }
    if (IS("seize")) call(ptrace(PTRACE_SEIZE, pid, 0, 0));
    if (IS("readv")) call(process_vm_readv(pid, &here, 1, &there, 1, 0));
    if (IS("writev")) {
        /* Writes back the byte that is there: harmless where it works. */
        if (process_vm_readv(pid, &here, 1, &there, 1, 0) < 0) denied(errno);
        call(process_vm_writev(pid, &here, 1, &there, 1, 0));
    }
    if (IS("mem")) call(open_in(pid, "mem", O_RDWR));
    if (IS("environ")) {
        int fd = open_in(pid, "environ", O_RDONLY);
        if (fd < 0) denied(errno);
        call(read(fd, &byte, 1) == 1 ? 0 : -1);
    }
    if (IS("exe")) call(open_in(pid, "exe", O_WRONLY));
    if (IS("root")) call(open_in(pid, "root", O_RDONLY | O_DIRECTORY));
    if (IS("cwd")) call(open_in(pid, "cwd", O_RDONLY | O_DIRECTORY));
    if (IS("fd")) call(open_in(pid, "fd", O_RDONLY | O_DIRECTORY));
    if (IS("maps")) {
        int fd = open_in(pid, "maps", O_RDONLY);
        if (fd < 0) denied(errno);
        call(read(fd, &byte, 1) == 1 ? 0 : -1);
    }
    if (IS("kill")) call(kill(pid, SIGKILL));
    if (IS("term")) call(kill(pid, SIGTERM));
    if (IS("null")) call(kill(pid, 0));
    if (IS("group")) call(kill(-pid, SIGKILL));
    if (IS("pidfd")) call(syscall(434, pid, 0));
    if (IS("pidfd_signal")) {
        long fd = syscall(434, pid, 0);
        if (fd < 0) denied(errno);
        call(syscall(424, fd, SIGKILL, NULL, 0));
    }
    if (IS("pidfd_getfd")) {
        long fd = syscall(434, pid, 0);
        if (fd < 0) denied(errno);
        int last = EBADF;
        for (int i = 0; i < 64; i++) {
            if (syscall(438, fd, i, 0) >= 0) succeeded();
            if (errno != EBADF) last = errno;
        }
        denied(last);
    }
    if (IS("prlimit")) {
        struct rlimit old;
        if (prlimit(pid, RLIMIT_CORE, NULL, &old) != 0) denied(errno);
        call(prlimit(pid, RLIMIT_CORE, &old, NULL));
    }
    if (IS("nice")) call(setpriority(PRIO_PROCESS, (id_t)pid, 19));
    if (IS("oom")) {
        int fd = open_in(pid, "oom_score_adj", O_WRONLY);
        if (fd < 0) denied(errno);
        call(write(fd, "1000", 4));
    }
    if (IS("kcmp")) call(syscall(SYS_kcmp, getpid(), pid, 0, 0, 0));
    if (IS("setns")) {
        int fd = open_in(pid, "ns/mnt", O_RDONLY);
        if (fd < 0) denied(errno);
        call(syscall(SYS_setns, fd, 0));
    }
    if (IS("move_pages")) call(syscall(SYS_move_pages, pid, 0, NULL, NULL, NULL, 0));
    usage();
}
