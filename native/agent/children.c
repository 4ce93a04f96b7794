/* The duties of process 1: reap everything, and take signals from outside. */
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BUCKETS 64
#define REAP_MAX 256 /* a turn: a fork storm must not keep links waiting */

bool children_none;

static struct child *buckets[BUCKETS];
static struct source signals = {.fd = -1};
static bool wanted;

void child_watch(struct child *child, pid_t pid)
{
    struct child **bucket = &buckets[(unsigned)pid % BUCKETS];
    child->pid = pid;
    child->next = *bucket;
    *bucket = child;
}

void child_forget(struct child *child)
{
    for (struct child **at = &buckets[(unsigned)child->pid % BUCKETS]; *at != NULL; at = &(*at)->next)
        if (*at == child) {
            *at = child->next;
            return;
        }
}

bool child_known(pid_t pid)
{
    for (const struct child *child = buckets[(unsigned)pid % BUCKETS]; child != NULL; child = child->next)
        if (child->pid == pid)
            return true;
    return false;
}

void children_look(void) { wanted = true; }

/* As wait4 for any child. A copy of a zygote writes its report before it ends: if the report was not read before it is
 * reaped, its end would be nobody's. */
static pid_t next_ended(int *status, struct rusage *usage)
{
    siginfo_t info = {0};
    if (!copies_waiting())
        return wait4(-1, status, WNOHANG, usage);
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0)
        return -1;
    if (info.si_pid == 0)
        return 0;
    if (!child_known(info.si_pid))
        copies_take();
    return wait4(info.si_pid, status, WNOHANG, usage);
}

void children_reap(void)
{
    if (!wanted)
        return;
    for (int i = 0; i < REAP_MAX; i++) {
        struct rusage usage;
        int status;
        pid_t pid = next_ended(&status, &usage);
        if (pid <= 0) {
            wanted = false;
            children_none = pid < 0 && errno == ECHILD;
            return;
        }
        for (struct child *child = buckets[(unsigned)pid % BUCKETS]; child != NULL; child = child->next)
            if (child->pid == pid) {
                child_forget(child);
                child->ended(child, status, &usage);
                break;
            }
    }
    loop_again();
}

static void signals_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct signalfd_siginfo info[8];
    ssize_t size = read(source->fd, info, sizeof info);
    for (ssize_t i = 0; (i + 1) * (ssize_t)sizeof info[0] <= size; i++) {
        bool outside = info[i].ssi_pid == 0; /* a sender in no namespace that we see */
        if (info[i].ssi_signo == SIGCHLD)
            wanted = true;
        else if (info[i].ssi_signo == SIGUSR1 && outside)
            control_wake();
        else if (info[i].ssi_signo == SIGTERM && outside)
            control_terminate();
    }
}

bool signals_start(void)
{
    sigset_t all;
    struct {
        void (*handler)(int);
        unsigned long flags;
        void (*restorer)(void);
        unsigned long mask;
    } standard = {SIG_DFL, 0, NULL, 0};
    /* What whoever started us ignores (make: 32 and 33) must not be ignored by the workload. By the kernel's own
     * call: a libc keeps some numbers for itself. */
    for (int number = 1; number < 65; number++)
        syscall(SYS_rt_sigaction, number, &standard, NULL, 8);
    sigfillset(&all);
    if (sigprocmask(SIG_SETMASK, &all, NULL) < 0)
        return false;
    sigset_t heard;
    sigemptyset(&heard);
    sigaddset(&heard, SIGCHLD);
    sigaddset(&heard, SIGUSR1);
    sigaddset(&heard, SIGTERM);
    signals.fd = signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK);
    signals.ready = signals_ready;
    return signals.fd >= 0 && loop_arm(&signals, EPOLLIN) == 0;
}

void reset_signals(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}
