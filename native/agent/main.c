/* Ringfence's guest agent: process 1 inside the wall. See docs/PROTOCOL.md for what it speaks. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Noreturn void refuse(const char *why)
{
    const char *parts[] = {"ringfence-agent: ", why, "\n"};
    for (int i = 0; i < 3; i++)
        if (write(2, parts[i], strlen(parts[i])) < 0) {
        }
    _exit(125);
}

/* Descriptors 0 to 2 must be taken, so that no pipe of a command ever gets such a number. */
static void occupy_stdio(void)
{
    for (;;) {
        int fd = open("/dev/null", O_RDWR);
        if (fd < 0) {
            int ends[2];
            if (pipe(ends) < 0)
                return;
            fd = ends[0] > ends[1] ? ends[0] : ends[1];
        }
        if (fd > 2) {
            close(fd);
            return;
        }
    }
}

static bool wanted(int fd)
{
    if (fd == config.listen_fd || fd == config.stream_in || fd == config.stream_out || fd == config.wake_fd ||
        fd == config.mux_in || fd == config.mux_out)
        return true;
    for (int i = 0; i < config.cgroup_count; i++)
        if (fd == config.cgroups[i])
            return true;
    return false;
}

static void keep_only_wanted(void)
{
    int from = 3;
    for (int fd = 3; fd < 1024; fd++) {
        if (!wanted(fd))
            continue;
        if (fd > from)
            syscall(SYS_close_range, (unsigned)from, (unsigned)fd - 1, 0u);
        from = fd + 1;
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    syscall(SYS_close_range, (unsigned)from, 0x7fffffffu, 0u);
}

/* Where the runtime can't empty the bounding set itself (an OCI runtime may make inheritable only what is in it), it
 * lends SETPCAP for this alone. Nothing can be put back into the set afterwards. */
static bool empty_bounding_set(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[2];
    if (syscall(SYS_capget, &header, sets) < 0)
        return false;
    if ((sets[0].effective >> CAP_SETPCAP & 1) == 0)
        return true;
    for (int i = 0; i < 2; i++) /* what root of the sandbox keeps can become inheritable only while it is in the set */
        sets[i].inheritable |= (uint32_t)(config.caps >> 32 * i) & sets[i].permitted;
    if (syscall(SYS_capset, &header, sets) < 0)
        return false;
    for (int capability = 0; prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0; capability++)
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0)
            return false;
    uint32_t others = ~(1u << CAP_SETPCAP);
    sets[0].effective &= others;
    sets[0].permitted &= others;
    sets[0].inheritable &= others; /* and with it the ambient one */
    return syscall(SYS_capset, &header, sets) == 0;
}

/* Where the runtime is slow at making a filter from a description, it leaves the finished one to the agent. */
static bool install_filter(int fd)
{
    static struct sock_filter filter[BPF_MAXINSNS];
    if (fd < 0)
        return true;
    ssize_t size = pread(fd, filter, sizeof filter, 0);
    if (size <= 0 || (size_t)size % sizeof *filter != 0)
        return false;
    struct sock_fprog program = {(unsigned short)((size_t)size / sizeof *filter), filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0;
}

/* Before another user is become, who could not. */
static bool open_cgroups(void)
{
    char path[256];
    while (config.cgroup_folder != NULL && config.cgroup_count < CGROUPS_MAX) {
        int size = snprintf(path, sizeof path, "%s/%d", config.cgroup_folder, config.cgroup_count);
        if (size < 0 || (size_t)size >= sizeof path)
            return false;
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0)
            return errno == ENOENT;
        config.cgroups[config.cgroup_count++] = fd;
    }
    return true;
}

/* What the wall is made of is in place: whoever waits for that may go on, while the agent makes itself ready to listen.
 * It may be gone; process 1 does not die of that. */
static void tell_ready(int fd)
{
    while (fd >= 0 && write(fd, "", 1) < 0 && errno == EINTR)
        ;
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv)
{
    if (!config_parse(argc, argv))
        refuse("bad arguments");
    if (getpid() != 1)
        refuse("must be process 1 of its namespace");
    if (!open_cgroups())
        refuse("can't open the cgroups");
    if (!identity_take())
        refuse(strerror(errno));
    if (!empty_bounding_set())
        refuse("can't give capabilities up");
    if (!install_filter(config.filter_fd))
        refuse("can't install the system call filter");
    if (!single_claim())
        refuse("can't open the stream");
    tell_ready(config.ready_fd);
    occupy_stdio();
    keep_only_wanted();
    if (config.oom > 0)
        oom_fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    umask(022);
    if (chdir(config.workdir) < 0 && chdir("/") < 0)
        refuse("no root folder");
    if (config.home != NULL)
        setenv("HOME", config.home, 0);
    make_non_blocking(config.listen_fd);
    make_non_blocking(config.stream_in);
    make_non_blocking(config.stream_out);
    if (!loop_start() || !signals_start())
        refuse(strerror(errno));
    control_start();
    if (!link_listen())
        refuse("can't listen");
    stream_start();
    if (!single_start())
        refuse(strerror(errno));
    for (;;)
        loop_turn();
}
