/* A user namespace of the agent's own, where whoever starts containers gives us none: the agent begins as the container's
 * root, and becomes a user of a namespace whose ids are the host's that the node chose. Mounts, processes and network stay
 * those of the namespace outside, so nothing in here has a right over them. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAP_TEXT 512

/* `inside:outside:count,…` as the kernel wants it. */
static bool map_text(const char *option, char text[MAP_TEXT])
{
    size_t used = 0;
    while (*option != 0) {
        char c = *option++;
        if ((c < '0' || c > '9') && c != ':' && c != ',')
            return false;
        if (used + 2 > MAP_TEXT)
            return false;
        text[used++] = c == ':' ? ' ' : c == ',' ? '\n' : c;
    }
    text[used] = 0;
    return used != 0;
}

static bool write_map(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool done = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return done;
}

/* In a child that stays outside: it has the rights that maps need there. */
static _Noreturn void map_parent(int told, const char *users, const char *groups)
{
    char one;
    if (read(told, &one, 1) != 1)
        _exit(1);
    if (!write_map("/proc/1/gid_map", groups) || !write_map("/proc/1/uid_map", users))
        _exit(errno != 0 ? errno : 1);
    _exit(0);
}

static bool new_namespace(void)
{
    char users[MAP_TEXT], groups[MAP_TEXT];
    int tell[2];
    if (!map_text(config.users, users) || !map_text(config.groups != NULL ? config.groups : config.users, groups)) {
        errno = EINVAL;
        return false;
    }
    if (pipe2(tell, O_CLOEXEC) < 0)
        return false;
    pid_t child = fork();
    if (child < 0)
        return false;
    if (child == 0) {
        close(tell[1]);
        map_parent(tell[0], users, groups);
    }
    close(tell[0]);
    bool apart = unshare(CLONE_NEWUSER) == 0;
    int error = errno, status = 0;
    if (apart && write(tell[1], "", 1) != 1)
        apart = false;
    close(tell[1]);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    errno = !apart ? error : WIFEXITED(status) ? WEXITSTATUS(status) : EPERM;
    return apart && status == 0;
}

/* Everything but what the agent needs there is given up; the bounding set is emptied later. */
static bool keep_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[2] = {0};
    uint64_t kept = config.held | 1u << CAP_SETPCAP;
    for (int i = 0; i < 2; i++)
        sets[i].effective = sets[i].permitted = (uint32_t)(kept >> 32 * i);
    return syscall(SYS_capset, &header, sets) == 0;
}

/* Where the engine can't mount a folder for somebody: ids are those outside, and no link is followed. */
static bool give_away(void)
{
    for (int i = 0; i < config.own_count; i++) {
        char *rest;
        unsigned long uid = strtoul(config.own[i], &rest, 10);
        unsigned long gid = *rest == ':' ? strtoul(rest + 1, &rest, 10) : 0;
        if (*rest != ':' || rest[1] != '/') {
            errno = EINVAL;
            return false;
        }
        if (lchown(rest + 1, (uid_t)uid, (gid_t)gid) < 0)
            return false;
    }
    return true;
}

bool identity_take(void)
{
    if (!give_away())
        return false;
    if (config.users != NULL && !new_namespace())
        return false;
    if (config.as_uid == (uid_t)-1)
        return true;
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 || setgroups(0, NULL) < 0 ||
        setresgid(config.as_gid, config.as_gid, config.as_gid) < 0 ||
        setresuid(config.as_uid, config.as_uid, config.as_uid) < 0 || prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0) < 0)
        return false;
    /* /proc/self is ours again; later, when all is open, it is nobody's. */
    return keep_capabilities() && prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0;
}
