/* System calls and constants that a libc older than the kernel does not have. All return -1 and set errno. */
#ifndef RINGFENCE_SYS_H
#define RINGFENCE_SYS_H

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

enum {
    RF_OPEN_TREE_CLONE = 1, RF_OPEN_TREE_CLOEXEC = O_CLOEXEC, RF_AT_RECURSIVE = 0x8000,
    RF_MOVE_F_EMPTY = 4, RF_AT_EMPTY = 0x1000,
    RF_ATTR_RDONLY = 1, RF_ATTR_NOSUID = 2, RF_ATTR_NODEV = 4, RF_ATTR_NOEXEC = 8, RF_ATTR_IDMAP = 0x100000,
    RF_RESOLVE_NO_MAGICLINKS = 2, RF_RESOLVE_NO_SYMLINKS = 4, RF_RESOLVE_IN_ROOT = 16,
    RF_CLOSE_RANGE_CLOEXEC = 4,
};

struct rf_mount_attr {
    uint64_t set, clear, propagation, userns;
};

struct rf_open_how {
    uint64_t flags, mode, resolve;
};

struct rf_clone_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

static inline int rf_open_tree(int at, const char *path, unsigned flags)
{
    return (int)syscall(SYS_open_tree, at, path, flags);
}

static inline int rf_move_mount(int from, const char *to)
{
    return (int)syscall(SYS_move_mount, from, "", AT_FDCWD, to, RF_MOVE_F_EMPTY);
}

static inline int rf_mount_setattr(int at, const char *path, unsigned flags, struct rf_mount_attr *attr)
{
    return (int)syscall(SYS_mount_setattr, at, path, flags, attr, sizeof *attr);
}

static inline int rf_openat2(int at, const char *path, struct rf_open_how *how)
{
    return (int)syscall(SYS_openat2, at, path, how, sizeof *how);
}

static inline int rf_close_range(unsigned first, unsigned last, unsigned flags)
{
    return (int)syscall(SYS_close_range, first, last, flags);
}

#endif
