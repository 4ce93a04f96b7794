/* What this program can do when it reads the first byte: read, write, accept, and tell the time. */
#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

bool rights_drop(const struct options *options)
{
    int from = 3;
    for (int fd = 3; fd < 1024; fd++) {
        if (fd != options->listen_fd && fd != options->in && fd != options->out && fd != options->ready_fd &&
            fd != options->owner_fd)
            continue;
        if (fd > from)
            syscall(SYS_close_range, (unsigned)from, (unsigned)fd - 1, 0u);
        from = fd + 1;
    }
    syscall(SYS_close_range, (unsigned)from, 0x7fffffffu, 0u);
    setsid(); /* fails for a leader, which is as good */
    umask(077);
    if (chdir("/") < 0)
        return false;
    if (geteuid() == 0 && (setgroups(0, NULL) < 0 || setresgid(options->gid, options->gid, options->gid) < 0 ||
                           setresuid(options->uid, options->uid, options->uid) < 0))
        return false;
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return false;
    struct rlimit none = {0, 0};
    return setrlimit(RLIMIT_CORE, &none) == 0 && setrlimit(RLIMIT_FSIZE, &none) == 0;
}

#if defined __x86_64__
#define ARCH AUDIT_ARCH_X86_64
#elif defined __aarch64__
#define ARCH AUDIT_ARCH_AARCH64
#endif

#if defined __SANITIZE_ADDRESS__ || !defined ARCH
bool rights_filter(void) { return true; } /* the sanitizers call what they like */
#else
#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

bool rights_filter(void)
{
    static struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(read), ALLOW(write), ALLOW(ppoll),
#ifdef __NR_poll
        ALLOW(poll),
#endif
        ALLOW(accept4), ALLOW(close), ALLOW(getrandom), ALLOW(clock_gettime), ALLOW(restart_syscall), ALLOW(rt_sigreturn),
        ALLOW(brk), ALLOW(mmap), ALLOW(munmap), ALLOW(madvise), ALLOW(exit), ALLOW(exit_group),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0;
}
#endif
