/* Commands that begin as copies of a zygote: a process of the workload that forks itself when it is asked on its stdin,
 * and lets the copy be ours. It is the workload's: it may lie, be silent, or be somebody else. */
#include "process.h"

#include <errno.h>
#include <limits.h>
#include <sys/wait.h>

#define ASK_NS 5000000000u /* for a zygote to answer */

/* The descriptor on which a zygote is asked, or -1: there is none that could answer. */
int copy_from(const struct process *process)
{
    bool there = process != NULL && process->zygote && process->state == PROCESS_RUNNING && process->queue.head == NULL;
    return there ? process->in.fd : -1;
}

/* A copy says its number, or an errno and that it is none. The workload may say anything: all that is believed is
 * a child of ours (its parent ended, so it is) that is no other command's, worker's or zygote's. */
int copy_take(struct process *process, const uint32_t words[2])
{
    siginfo_t info = {0};
    if (words[1] != 0)
        return words[0] > 0 && words[0] < 4096 ? (int)words[0] : EPROTO;
    if (words[0] < 2 || words[0] > INT_MAX || child_known((pid_t)words[0]) ||
        waitid(P_PID, words[0], &info, WEXITED | WNOHANG | WNOWAIT) < 0)
        return ECHILD;
    child_watch(&process->child, (pid_t)words[0]);
    children_look(); /* it may have ended since */
    process->copied = true;
    return 0;
}

/* Zygotes that did not answer in time. */
static void ask_over(struct timer *timer)
{
    uint64_t now = now_ns(), first = 0;
    for (struct process *process = processes, *next; process != NULL; process = next) {
        next = process->next;
        if (process->state != PROCESS_STARTING || process->asked_ns == 0)
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
