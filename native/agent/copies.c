/* Commands that begin as copies of a zygote: a process of the workload that forks itself when it is asked on its stdin,
 * and lets the copy be ours. It is the workload's: it may lie, be silent, or be somebody else. */
#include "process.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define ASK_NS 5000000000u /* for a zygote to answer */

/* The descriptor on which a zygote is asked, or -1: there is none that could answer. Until it has said a word its host may
 * still be sending it what it is to run, and a request in between would be read as that. */
int copy_from(const struct process *process)
{
    bool there = process != NULL && process->zygote && process->state == PROCESS_RUNNING && process->queue.head == NULL;
    return there && process->out[0].ring.end != 0 ? process->in.fd : -1;
}

/* What was reported, and by which process: the kernel says that, not the process. Returns bytes, as recv does. */
static ssize_t report_read(int fd, uint32_t words[2], pid_t *sender)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(struct ucred))]; /* and not a descriptor more */
    } control;
    struct iovec piece = {.iov_base = words, .iov_len = 2 * sizeof *words};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    *sender = 0;
    ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const struct cmsghdr *first = got < 0 ? NULL : CMSG_FIRSTHDR(&message);
    if (first != NULL && first->cmsg_level == SOL_SOCKET && first->cmsg_type == SCM_CREDENTIALS &&
        first->cmsg_len >= CMSG_LEN(sizeof(struct ucred))) {
        struct ucred credentials;
        memcpy(&credentials, CMSG_DATA(first), sizeof credentials);
        *sender = credentials.pid;
    }
    return got;
}

/* A copy says its number, or an errno and that it is none. The workload may say anything: all that is believed is
 * a process that names itself, is a child of ours (its parent ended, so it is) and no other command, worker or zygote,
 * and leads a group as every command does: signals go there. Returns 0, an errno, or -1: nothing was said yet. */
int copy_take(struct process *process)
{
    siginfo_t info = {0};
    uint32_t words[2];
    pid_t sender = 0;
    ssize_t got = report_read(process->status.fd, words, &sender);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return -1;
    if (got != (ssize_t)sizeof words)
        return ECHILD;
    if (words[1] != 0) /* ours have a meaning, which is not for it to give */
        return words[0] == 0 || words[0] > 4095 || words[0] == EEXIST || words[0] == ESRCH || words[0] == ETIMEDOUT
                   ? EPROTO
                   : (int)words[0];
    if (sender < 2 || words[0] != (uint32_t)sender || child_known(sender) ||
        waitid(P_PID, (id_t)sender, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || getpgid(sender) != sender)
        return ECHILD;
    child_watch(&process->child, sender);
    children_look(); /* it may have ended since */
    process->copied = true;
    return 0;
}

static bool waits(const struct process *process)
{
    return process->state == PROCESS_STARTING && process->asked_ns != 0;
}

bool copies_waiting(void)
{
    for (const struct process *process = processes; process != NULL; process = process->next)
        if (waits(process))
            return true;
    return false;
}

void copies_take(void)
{
    for (struct process *process = processes, *next; process != NULL; process = next) {
        next = process->next; /* it may be freed */
        if (waits(process))
            process_resolve(process);
    }
}

/* Zygotes that did not answer in time. */
static void ask_over(struct timer *timer)
{
    uint64_t now = now_ns(), first = 0;
    for (struct process *process = processes, *next; process != NULL; process = next) {
        next = process->next;
        if (!waits(process))
            continue;
        if (now - process->asked_ns >= ASK_NS)
            process_failed(process, ETIMEDOUT, "zygote");
        else if (first == 0 || process->asked_ns < first)
            first = process->asked_ns;
    }
    if (first != 0)
        timer_set(timer, first + ASK_NS - now);
}

static struct timer ask_timer = {.expired = ask_over};

/* From now on a report is waited for. */
void copy_wait(struct process *process)
{
    process->asked_ns = now_ns();
    if (ask_timer.due == 0)
        timer_set(&ask_timer, ASK_NS);
}
