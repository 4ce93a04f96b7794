"""The default system call table: what a workload may ask of the kernel, group by group, with the reason.

An allow list. A call that is in no group, because it is newer than this table, answers ENOSYS: then
libraries fall back to the older call that the table knows. A call that is known and has no business in
a sandbox answers EPERM, or ENOSYS where callers are known to fall back on that only. Nothing is killed
but a call through another architecture's entry. ``docs/seccomp.md`` is written from this table.
"""

from __future__ import annotations

from ringfence.runtimes.seccomp.decisions import ALLOW, ENOSYS, EPERM, Decision
from ringfence.runtimes.seccomp.guards import GUARDS

DEFAULT = ENOSYS


class Group:
    """Calls that get the same plain answer for the same ``reason``. Names are separated by spaces.

    Names that an architecture lacks are skipped there.
    """

    __slots__ = ("action", "calls", "name", "reason")

    def __init__(self, name: str, action: int, reason: str, calls: str) -> None:
        self.name = name
        self.action = action
        self.reason = reason
        self.calls = calls


ALLOWED = [
    Group(
        "files and folders",
        ALLOW,
        "Reading and writing files is what programs do. What may be reached is decided by the mount "
        "namespace, file permissions and Landlock, not by the kind of call.",
        "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 "
        "creat close close_range lseek stat fstat lstat newfstatat statx statfs fstatfs access faccessat "
        "faccessat2 dup dup2 dup3 fcntl flock truncate ftruncate fallocate fadvise64 readahead cachestat "
        "getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir rename renameat renameat2 link linkat "
        "unlink unlinkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2 chown "
        "fchown lchown fchownat umask utime utimes utimensat futimesat sync syncfs fsync fdatasync "
        "sync_file_range sendfile copy_file_range splice tee vmsplice setxattr lsetxattr fsetxattr "
        "setxattrat getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat "
        "removexattr lremovexattr fremovexattr removexattrat",
    ),
    Group(
        "memory",
        ALLOW,
        "A process arranges its own address space. The amount is limited by the memory cgroup. NUMA hints "
        "are for its own memory only (BLAS libraries give them).",
        "brk mmap munmap mremap mprotect msync mincore madvise mlock mlock2 mlockall munlock munlockall "
        "pkey_mprotect pkey_alloc pkey_free memfd_create mseal map_shadow_stack get_mempolicy "
        "set_mempolicy mbind",
    ),
    Group(
        "processes and threads",
        ALLOW,
        "Starting programs and waiting for them. The number is limited by the pids cgroup; new namespaces "
        "are refused by the rule for clone.",
        "fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid set_tid_address "
        "getpgid getpgrp setpgid getsid setsid pidfd_open futex futex_waitv futex_wake futex_wait "
        "futex_requeue set_robust_list get_robust_list rseq membarrier getcpu arch_prctl uretprobe uprobe "
        "restart_syscall",
    ),
    Group(
        "signals",
        ALLOW,
        "Signals reach only processes of the sandbox: its PID namespace hides all others.",
        "kill tkill tgkill pidfd_send_signal rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait "
        "rt_sigqueueinfo rt_tgsigqueueinfo rt_sigsuspend rt_sigreturn sigaltstack signalfd signalfd4 pause",
    ),
    Group(
        "waiting for events",
        ALLOW,
        "Event loops of every kind of server and of asyncio and Node.",
        "select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait "
        "epoll_pwait2 eventfd eventfd2 inotify_init inotify_init1 inotify_add_watch inotify_rm_watch pipe "
        "pipe2",
    ),
    Group(
        "time",
        ALLOW,
        "Reading clocks and arming timers. Setting clocks is denied below.",
        "time times gettimeofday clock_gettime clock_getres nanosleep clock_nanosleep alarm getitimer "
        "setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create "
        "timerfd_settime timerfd_gettime",
    ),
    Group(
        "connected sockets",
        ALLOW,
        "What a socket may be is decided once, by the rule for socket. Where it may go is decided by the "
        "network namespace, which has no card.",
        "bind listen accept accept4 connect shutdown getsockname getpeername setsockopt getsockopt sendto "
        "recvfrom sendmsg recvmsg sendmmsg recvmmsg",
    ),
    Group(
        "System V and POSIX message passing",
        ALLOW,
        "PostgreSQL and multiprocessing use it. The IPC namespace is the sandbox's own.",
        "shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open "
        "mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr",
    ),
    Group(
        "old asynchronous input and output",
        ALLOW,
        "libaio of databases. Unlike io_uring it starts no kernel threads and can carry no other call.",
        "io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents",
    ),
    Group(
        "identity",
        ALLOW,
        "Asking who one is, and changing it where the kernel's own rules let it: a workload has no "
        "capability and no_new_privs, so there is nothing to change to.",
        "getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid "
        "setresuid setresgid setfsuid setfsgid setgroups capget capset",
    ),
    Group(
        "limits and scheduling",
        ALLOW,
        "Lowering one's own limits and priority. Raising them needs capabilities that nobody inside has.",
        "getrlimit setrlimit prlimit64 getrusage getpriority setpriority ioprio_get ioprio_set sched_yield "
        "sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler "
        "sched_setscheduler sched_getattr sched_setattr sched_get_priority_max sched_get_priority_min "
        "sched_rr_get_interval",
    ),
    Group(
        "facts about the system",
        ALLOW,
        "Name, load and randomness. The name is of the sandbox's own UTS namespace.",
        "uname sysinfo getrandom",
    ),
    Group(
        "sandboxes inside the sandbox",
        ALLOW,
        "Browsers and careful programs confine their own parts. Filters and Landlock rules only ever take "
        "away, so more of them are harmless.",
        "seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self",
    ),
]

DENIED = [
    Group(
        "mounts",
        EPERM,
        "Whoever can mount can cover /proc masks, reach other file systems, and try file system parsers "
        "with crafted images.",
        "mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig fsmount "
        "fspick mount_setattr",
    ),
    Group(
        "namespaces",
        EPERM,
        "A new user namespace gives full capabilities inside it, and with them most of the kernel code "
        "that exploits need (nftables, overlay, packet sockets). setns enters those of others.",
        "unshare setns",
    ),
    Group(
        "other processes' memory",
        EPERM,
        "A process of the sandbox has no need to read or drive another. Debuggers don't work inside; they "
        "would also undo filters that programs inside set for themselves.",
        "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp process_madvise process_mrelease",
    ),
    Group(
        "programs in the kernel",
        EPERM,
        "bpf and perf run or observe inside the host's kernel and have been the way out many times.",
        "bpf perf_event_open",
    ),
    Group(
        "userfaultfd",
        EPERM,
        "Lets a program stop the kernel in the middle of a copy, the usual tool to win a race against it.",
        "userfaultfd",
    ),
    Group(
        "io_uring",
        EPERM,
        "Its operations don't pass through seccomp at all, and its code is young: it would go round this "
        "table. EPERM is what libuv and liburing take for switched off.",
        "io_uring_setup io_uring_enter io_uring_register",
    ),
    Group(
        "keyrings",
        EPERM,
        "Kernel keyrings are not in any namespace but the user's: keys of the host's user could be found.",
        "add_key request_key keyctl",
    ),
    Group(
        "kernel images and modules",
        EPERM,
        "Loading code into the kernel, or another kernel.",
        "init_module finit_module delete_module kexec_load kexec_file_load",
    ),
    Group(
        "the machine",
        EPERM,
        "Power, swap, accounting, quotas, the kernel's log, terminals of others and input and output ports "
        "belong to the host.",
        "reboot swapon swapoff acct quotactl quotactl_fd syslog vhangup iopl ioperm sethostname "
        "setdomainname",
    ),
    Group(
        "setting clocks",
        EPERM,
        "Time belongs to the host.",
        "settimeofday clock_settime clock_adjtime adjtimex",
    ),
    Group(
        "file handles",
        EPERM,
        "A handle opens a file by number, past every folder permission and past the mount namespace.",
        "name_to_handle_at open_by_handle_at",
    ),
    Group(
        "watching whole mounts",
        EPERM,
        "fanotify can see and block accesses of others to a file system.",
        "fanotify_init fanotify_mark",
    ),
    Group(
        "memory of others, by node",
        EPERM,
        "Moving pages shows where memory lies, and acts on other processes.",
        "migrate_pages move_pages set_mempolicy_home_node",
    ),
    Group(
        "segment tables",
        EPERM,
        "modify_ldt serves 16-bit and 32-bit code only, which is denied as a whole.",
        "modify_ldt",
    ),
]

ABSENT = [
    Group(
        "clone3",
        ENOSYS,
        "Its flags lie in memory, where a filter can't look: it could ask for new namespaces. On ENOSYS "
        "the C libraries fall back to clone.",
        "clone3",
    ),
    Group(
        "mount tables by call",
        ENOSYS,
        "Shows the mount table; tools fall back to /proc/self/mountinfo, which the sandbox's own namespace "
        "fills.",
        "statmount listmount",
    ),
    Group(
        "secret memory",
        ENOSYS,
        "Memory that the host can't inspect or move. Programs that want it go on without.",
        "memfd_secret",
    ),
    Group(
        "labels of security modules",
        ENOSYS,
        "Says which modules guard the host; programs fall back to /proc/self/attr.",
        "lsm_get_self_attr lsm_set_self_attr lsm_list_modules",
    ),
    Group(
        "file attributes by call",
        ENOSYS,
        "Too new to be relied on; programs fall back to ioctl.",
        "file_getattr file_setattr",
    ),
    Group(
        "obsolete",
        ENOSYS,
        "Emulated, removed or never implemented. No current program uses them.",
        "uselib ustat sysfs _sysctl create_module get_kernel_syms query_module nfsservctl getpmsg putpmsg "
        "afs_syscall tuxcall security set_thread_area get_thread_area lookup_dcookie epoll_ctl_old "
        "epoll_wait_old remap_file_pages vserver",
    ),
]


def numbers(arch: str) -> dict[str, int]:
    """System call numbers by name.

    Raises:
        KeyError: there is no table for this architecture.
    """
    if arch == "x86_64":
        from ringfence.runtimes.seccomp.numbers_x86_64 import NUMBERS
    elif arch == "aarch64":
        from ringfence.runtimes.seccomp.numbers_aarch64 import NUMBERS
    else:
        raise KeyError(arch)
    return NUMBERS


def rules(arch: str) -> dict[int, Decision]:
    """Decision by system call number; numbers not in it get :data:`DEFAULT`."""
    known = numbers(arch)
    result: dict[int, Decision] = {}
    for group in [*ALLOWED, *DENIED, *ABSENT]:
        for name in group.calls.split():
            if name in known:
                result[known[name]] = group.action
    for guard in GUARDS:
        if guard.call in known:
            result[known[guard.call]] = guard.decision
    return result
