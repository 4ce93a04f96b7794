/* A user namespace of one's own is where most kernel exploits of the last ten years begin. */
#include "verdict.h"
#include <linux/types.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

struct clone3_args {
    __u64 flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

int main(int argc, char **argv) {
    if (IS("unshare")) call(unshare(CLONE_NEWUSER));
    if (IS("unshare-mnt")) call(unshare(CLONE_NEWNS));
    if (IS("unshare-net")) call(unshare(CLONE_NEWNET));
    if (IS("unshare-pid")) call(unshare(CLONE_NEWPID));
    if (IS("unshare-cgroup")) call(unshare(0x02000000));
    if (IS("unshare-time")) call(unshare(0x00000080));
    if (IS("clone")) {
        long pid = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
        if (pid < 0) denied(errno);
        if (pid == 0) _exit(0);
        succeeded();
    }
    if (IS("clone-high")) {
        /* The upper half of the flags register must not hide the lower one from a filter. */
        long pid = syscall(SYS_clone, (1ul << 40) | CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
        if (pid < 0) denied(errno);
        if (pid == 0) _exit(0);
        succeeded();
    }
    if (IS("clone3")) {
        struct clone3_args args = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
        long pid = syscall(435, &args, sizeof args);
        if (pid < 0) denied(errno);
        if (pid == 0) _exit(0);
        succeeded();
    }
    if (IS("setns")) {
        int fd = open("/proc/1/ns/user", O_RDONLY);
        if (fd < 0) denied(errno);
        call(setns(fd, 0));
    }
    if (IS("setns-pidfd")) {
        long fd = syscall(434, getpid(), 0);
        if (fd < 0) denied(errno);
        call(setns((int)fd, CLONE_NEWUTS));
    }
    if (IS("parent")) { /* NS_GET_USERNS, NS_GET_PARENT of our own: a descriptor of the host's user namespace */
        int fd = open("/proc/self/ns/user", O_RDONLY);
        if (fd < 0) denied(errno);
        long up = syscall(SYS_ioctl, fd, 0xb702);
        if (up < 0) denied(errno);
        call(setns((int)up, CLONE_NEWUSER));
    }
    usage();
}
