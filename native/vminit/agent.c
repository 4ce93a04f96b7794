/* The agent's control group, and how it becomes who it is. */
#include "vminit.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef AT_EMPTY_PATH
#define AT_EMPTY_PATH 0x1000
#endif

static int work_fd = -1, program_fd = -1, filter_fd = -1;

/* Out of the way of the numbers that the agent is told. */
static int open_high(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC), high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 64);
    int error = errno;
    if (fd >= 0)
        close(fd);
    errno = error;
    return high;
}

/* Before any namespace is left: what the agent is given. */
void cgroup_make(void)
{
    char number[32];
    if (mount("cgroup", "/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
        die("cgroup", "mount");
    write_file("/cgroup/cgroup.subtree_control", "+memory");
    write_file("/cgroup/cgroup.subtree_control", "+pids");
    if (mkdir("/cgroup/ringfence", 0755) < 0 && errno != EEXIST)
        die("cgroup", "ringfence");
    if (settings.memory != 0) {
        snprintf(number, sizeof number, "%llu", (unsigned long long)settings.memory);
        write_file("/cgroup/ringfence/memory.max", number);
        write_file("/cgroup/ringfence/memory.swap.max", "0");
    }
    if (settings.processes != 0) {
        snprintf(number, sizeof number, "%llu", (unsigned long long)settings.processes);
        write_file("/cgroup/ringfence/pids.max", number);
    }
    char found[32];
    if (!read_file("/cgroup/ringfence/pids.max", found, sizeof found) ||
        !read_file("/cgroup/ringfence/memory.max", found, sizeof found))
        die("cgroup", "limits");
    work_fd = open_high("/cgroup/ringfence/cgroup.procs", O_WRONLY);
    program_fd = open_high("/agent", O_RDONLY);
    if (work_fd < 0 || program_fd < 0)
        die("agent", work_fd < 0 ? "cgroup" : "program");
    filter_fd = open_high("/filter", O_RDONLY);
    if (filter_fd < 0 && errno != ENOENT)
        die("agent", "filter");
}

/* Processes of the workload that the kernel killed for memory. */
long cgroup_kills(void)
{
    char text[512];
    const char *at;
    if (!read_file("/cgroup/ringfence/memory.events", text, sizeof text) || (at = strstr(text, "oom_kill ")) == NULL)
        return -1;
    return strtol(at + 9, NULL, 10);
}

static void set_capabilities(uint64_t permitted, uint64_t inheritable)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    for (int i = 0; i < 2; i++) {
        data[i].permitted = data[i].effective = (uint32_t)(permitted >> 32 * i);
        data[i].inheritable = (uint32_t)(inheritable >> 32 * i);
    }
    if (syscall(SYS_capset, &header, data) < 0)
        die("agent", "capset");
}

static uint64_t permitted_now(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data) < 0)
        die("agent", "capget");
    return data[0].permitted | (uint64_t)data[1].permitted << 32;
}

static void place(int fd, int number)
{
    if (fd >= 0 && dup2(fd, number) < 0)
        die("agent", "descriptors");
}

static void set_limits(void)
{
    for (unsigned i = 0; i < settings.limit_count; i++) {
        char *end;
        int number = (int)strtol(settings.limits[i], &end, 10);
        struct rlimit limit = {strtoull(end + 1, NULL, 10), 0};
        limit.rlim_max = limit.rlim_cur;
        if (*end != ':' || setrlimit(number, &limit) < 0)
            die("limit", settings.limits[i]);
    }
}

_Noreturn void agent_become(void)
{
    uint64_t all = permitted_now(), keep = settings.capabilities;
    place(filter_fd, FILTER_FD);
    place(work_fd, CGROUP_FD);
    write_file("/proc/self/oom_score_adj", "-900"); /* the workload's processes are taken before it */
    for (int number = 0; number < 3; number++) {
        int null = open("/dev/null", O_RDWR);
        if (null >= 0 && null != number) {
            dup2(null, number);
            close(null);
        }
    }
    set_limits();
    setsid();
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    umask(022);
    set_capabilities(all, keep);
    if (setgroups(0, NULL) < 0 || prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 ||
        setresgid(settings.agent_gid, settings.agent_gid, settings.agent_gid) < 0 ||
        setresuid(settings.agent_uid, settings.agent_uid, settings.agent_uid) < 0)
        die("agent", "user");
    set_capabilities(all, keep);
    for (int capability = 0; capability < 64; capability++)
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0)
            break; /* past the last one */
    set_capabilities(keep, keep);
    for (int capability = 0; capability < 64; capability++)
        if (keep >> capability & 1 && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0) < 0)
            die("agent", "ambient");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        die("agent", "no_new_privs");
    syscall(SYS_execveat, program_fd, "", settings.arguments, settings.environment, AT_EMPTY_PATH);
    die("agent", "exec");
}
