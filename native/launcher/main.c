/* ringfence-launcher: started once by a node process with one end of a SOCK_SEQPACKET socketpair as
 * descriptor 3. It executes plans (plan.h) and decides nothing. */
#include "server.h"
#include "sys.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

enum { SOCKET = 3, EX_USAGE = 64, EX_OSERR = 71 };

/* Whatever the node ignores or blocks. By the kernel's own call: a libc keeps some numbers for itself. */
static void reset_signals(void)
{
    struct {
        void (*handler)(int);
        unsigned long flags;
        void (*restorer)(void);
        unsigned long mask;
    } standard = {SIG_DFL, 0, NULL, 0};
    sigset_t none;
    for (int number = 1; number <= 64; number++)
        syscall(SYS_rt_sigaction, number, &standard, NULL, 8);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

int main(int argc, char **argv)
{
    struct rlimit limit;
    int type = 0;
    socklen_t size = sizeof type;
    if (argc > 1 || getsockopt(SOCKET, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_SEQPACKET) {
        fprintf(stderr, "%s: started by Ringfence with a socket as descriptor 3; not for use by hand\n",
                argc ? argv[0] : "ringfence-launcher");
        return EX_USAGE;
    }
    fcntl(SOCKET, F_SETFD, FD_CLOEXEC);
    rf_close_range(SOCKET + 1, ~0u, 0);
    /* A kept child must not hold the terminal or the pipes of whoever started the node. */
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0)
        return EX_OSERR;
    for (int fd = 0; fd < 3; fd++)
        dup2(null, fd);
    if (null > 2)
        close(null);
    reset_signals();
    setsid();
    umask(0);
    if (chdir("/"))
        return EX_OSERR;
    if (!getrlimit(RLIMIT_NOFILE, &limit)) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    return serve(SOCKET) ? EX_OSERR : 0;
}
