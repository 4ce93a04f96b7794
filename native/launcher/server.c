#include "embryo.h"
#include "files.h"
#include "janitor.h"
#include "killing.h"
#include "server.h"
#include "steps.h"
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum state { FREE, STARTING, RUNNING, FAILED, HELPER, EMBRYO };

struct child {
    enum state state;
    int pid, pidfd, pipe;
    int socket;             /* EMBRYO: where its plan is sent to */
    uint32_t id;
    int keep;
    int alone;              /* the first process of a pid namespace: what it started dies with it */
    uint64_t birth;
    unsigned helpers;       /* newuidmap and newgidmap under way for it */
    unsigned helps;         /* HELPER: index of the child whose maps it writes */
    uint32_t helps_id;
    char *exit_file;
};

enum { TAG_SOCKET = 1 << 30, TAG_SIGNALS, READY_MAX = 64, QUIET_MS = 20 };

static struct child children[CHILDREN_MAX];
static unsigned highest; /* one past the highest slot in use */
static struct slot *slots;
static int node = -1, events = -1;

/* The prelude, and how many children that have done it are to be kept. */
static struct plan prelude;
static uint8_t prelude_data[PLAN_MAX];
static uint64_t prelude_flags;
static unsigned wanted, waiting;

static void answer(const struct reply *reply, int descriptor)
{
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec part = {(void *)(uintptr_t)reply, sizeof *reply};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (node < 0)
        return;
    if (descriptor >= 0) {
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    /* Fails only if the node is gone, and that is noticed by the loop. */
    while (sendmsg(node, &message, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
}

static void answer_failure(uint32_t id, uint32_t index, unsigned op, int error)
{
    struct reply reply = {.kind = REPLY_FAILED, .id = id, .index = index, .error = error};
    snprintf(reply.step, sizeof reply.step, "%s", op ? plan_name(op) : "PLAN");
    answer(&reply, -1);
}

static int watch(int fd, uint32_t tag)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = tag};
    return epoll_ctl(events, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

/* Out of epoll by name: another child that has not yet become its program holds a copy of this descriptor, and as
   long as it does, closing ours alone would leave events with a tag that by then means somebody else. */
static void close_pipe(struct child *child)
{
    if (child->pipe < 0)
        return;
    epoll_ctl(events, EPOLL_CTL_DEL, child->pipe, NULL);
    close(child->pipe);
    child->pipe = -1;
}

static struct child *reserve(void)
{
    for (unsigned i = 0; i < CHILDREN_MAX; i++)
        if (children[i].state == FREE) {
            memset(&children[i], 0, sizeof children[i]);
            memset(&slots[i], 0, sizeof slots[i]);
            children[i].pidfd = children[i].pipe = children[i].socket = -1;
            if (i >= highest)
                highest = i + 1;
            return &children[i];
        }
    return NULL;
}

static void release(struct child *child)
{
    if (child->pidfd >= 0)
        close(child->pidfd);
    if (child->socket >= 0) /* of an embryo that nobody took */
        close(child->socket);
    close_pipe(child);
    free(child->exit_file);
    memset(child, 0, sizeof *child);
    while (highest && children[highest - 1].state == FREE)
        highest--;
}

static void let_go(unsigned index)
{
    slots[index].go = 1;
    syscall(SYS_futex, &slots[index].go, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Starts newuidmap or newgidmap for the child; its end is seen by reap(). */
static int start_helper(unsigned index, const struct step *maps, uint32_t kind)
{
    enum { WORDS = 2 + MAPS_MAX * 3 + 1 };
    char text[WORDS][12];
    char *words[WORDS];
    unsigned count = 0;
    words[count++] = (char *)(uintptr_t)(kind ? "newgidmap" : "newuidmap");
    snprintf(text[count], sizeof text[0], "%d", children[index].pid);
    words[count] = text[count];
    count++;
    for (unsigned i = 0; i < maps->length / sizeof(struct id_map); i++) {
        struct id_map map = plan_map(maps, i);
        uint32_t numbers[3] = {map.inside, map.outside, map.count};
        for (int n = 0; map.kind == kind && n < 3; n++) {
            snprintf(text[count], sizeof text[0], "%u", numbers[n]);
            words[count] = text[count];
            count++;
        }
    }
    words[count] = NULL;
    struct child *helper = reserve();
    if (!helper)
        return EAGAIN;
    helper->state = HELPER;
    helper->helps = index;
    helper->helps_id = children[index].id;
    helper->pid = fork();
    if (helper->pid < 0) {
        int error = errno;
        release(helper);
        return error;
    }
    if (!helper->pid) {
        char *environment[] = {(char *)(uintptr_t)"PATH=/usr/bin:/bin:/usr/local/bin", NULL};
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        execvpe(words[0], words, environment);
        _exit(127);
    }
    children[index].helpers++;
    return 0;
}

static int write_maps(unsigned index, const struct step *maps)
{
    int error;
    if (maps->number[0] & 1) {
        error = start_helper(index, maps, 0);
        return error ? error : start_helper(index, maps, 1);
    }
    error = userns_write_maps(children[index].pid, maps, (maps->number[0] & 2) != 0);
    if (!error)
        let_go(index);
    return error;
}

static _Noreturn void child_main(const struct plan *plan, const int *descriptors, struct slot *slot, int alive, int userns)
{
    static struct run run;
    run_begin(&run, plan, descriptors, slot, alive, userns);
    run.prelude = prelude.count ? &prelude : NULL;
    slot->error = run_steps(&run, 0);
    if (!slot->error)
        slot->error = ENOEXEC; /* a plan without an exec */
    _exit(127);
}

/* What the launcher itself has to know of a plan. */
struct order {
    const struct step *maps;
    uint64_t flags, cgroup;
    int userns, prelude, keep;
    const char *exit_file;
};

static int read_order(const struct plan *plan, const int *descriptors, struct order *order, unsigned *failing)
{
    *order = (struct order){.userns = -1};
    for (unsigned i = 0; i < plan->count; i++) {
        const struct step *step = &plan->steps[i];
        *failing = i;
        switch (step->op) {
        case OP_CLONE: order->flags |= step->number[0]; break;
        case OP_PRELUDE: order->prelude = 1; break;
        case OP_KEEP: order->keep = 1; break;
        case OP_EXIT_FILE: order->exit_file = step->text[0]; break;
        case OP_MAPS: order->maps = step; break;
        case OP_USERNS:
            order->userns = userns_cached(step);
            if (order->userns < 0)
                return -order->userns;
            break;
        case OP_INTO_CGROUP:
            order->flags |= 0x200000000ULL; /* CLONE_INTO_CGROUP */
            order->cgroup = (uint64_t)descriptors[step->number[0]];
            break;
        default: break;
        }
    }
    if (order->prelude)
        order->flags |= prelude_flags;
    return 0;
}

/* Clones a child and its pipe; in the child returns 0 with `*alive` open, in the launcher the pid or -errno. */
static int make_child(struct child *child, uint64_t flags, uint64_t cgroup, int *alive)
{
    struct rf_clone_args args = {.flags = flags | CLONE_PIDFD, .exit_signal = SIGCHLD, .cgroup = cgroup,
                                 .pidfd = (uint64_t)(uintptr_t)&child->pidfd};
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        return -errno;
    int pid = (int)syscall(SYS_clone3, &args, sizeof args);
    if (!pid) {
        close(ends[0]);
        /* Out of the way of every number that a plan gives to a descriptor: its end must tell of the exec. */
        *alive = fcntl(ends[1], F_DUPFD_CLOEXEC, PLACES);
        if (*alive >= 0)
            close(ends[1]);
        else
            *alive = ends[1];
        return 0;
    }
    int error = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        child->pidfd = -1;
        return -error;
    }
    child->pid = pid;
    child->pipe = ends[0];
    return pid;
}

/* One more child made ahead. Without one a start takes longer, and nothing else: errors only end the making. */
static void make_embryo(void)
{
    struct child *child = reserve();
    int ends[2], alive = -1;
    if (!child || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) {
        wanted = 0;
        return;
    }
    int pid = make_child(child, prelude_flags, 0, &alive);
    if (!pid)
        embryo_main(&prelude, ends[1], &slots[child - children], alive);
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        release(child);
        wanted = 0;
        return;
    }
    child->socket = ends[0];
    child->state = EMBRYO;
    child->birth = birth_of(pid);
    waiting++;
}

static struct child *take_embryo(const struct order *order, const int *descriptors, unsigned count, const uint8_t *data, size_t size)
{
    if (!order->prelude || order->flags != prelude_flags || order->maps || !waiting)
        return NULL;
    for (unsigned i = 0; i < highest; i++) {
        struct child *child = &children[i];
        if (child->state != EMBRYO || slots[i].error)
            continue;
        if (embryo_send(child->socket, data, size, descriptors, count, order->userns))
            continue;
        waiting--;
        close(child->socket);
        child->socket = -1;
        return child;
    }
    return NULL;
}

static void spawn(uint32_t id, const struct plan *plan, const int *descriptors, unsigned count, const uint8_t *data, size_t size)
{
    struct order order;
    unsigned failing = 0;
    int alive = -1, error = read_order(plan, descriptors, &order, &failing);
    if (error) {
        answer_failure(id, failing, plan->steps[failing].op, error);
        return;
    }
    struct child *child = take_embryo(&order, descriptors, count, data, size);
    if (!child) {
        int pid = (child = reserve()) ? make_child(child, order.flags, order.cgroup, &alive) : -EAGAIN;
        if (pid < 0) {
            answer_failure(id, 0, OP_CLONE, -pid);
            if (child)
                release(child);
            return;
        }
        if (!pid)
            child_main(plan, descriptors, &slots[child - children], alive, order.userns);
        child->birth = birth_of(pid);
    }
    unsigned index = (unsigned)(child - children);
    child->id = id;
    child->keep = order.keep;
    child->alone = (order.flags & CLONE_NEWPID) != 0;
    child->state = STARTING;
    /* Without memory for the path there is no record, which the node takes for "unknown". */
    child->exit_file = order.exit_file ? strdup(order.exit_file) : NULL;
    error = order.maps ? write_maps(index, order.maps) : 0;
    if (!error)
        error = watch(child->pipe, index);
    if (error) {
        answer_failure(id, 0, order.maps ? OP_MAPS : OP_CLONE, error);
        child->state = FAILED;
        kill(child->pid, SIGKILL);
    }
}

/* The pipe closed: the child has become its program, or it has failed. */
static void settle(unsigned index)
{
    struct child *child = &children[index];
    struct slot *slot = &slots[index];
    close_pipe(child);
    if (slot->ready && !slot->error) {
        struct reply reply = {.kind = REPLY_STARTED, .id = child->id, .pid = child->pid, .landlock = slot->landlock,
                              .birth = child->birth};
        child->state = RUNNING;
        answer(&reply, child->pidfd);
    } else {
        /* Its op is not kept: the node has the plan and finds it by its index. Killed half-way: ECHILD. */
        int error = slot->error ? slot->error : ECHILD;
        unsigned step = slot->step & ~(unsigned)STEP_OF_PRELUDE;
        child->state = FAILED;
        if (slot->step & STEP_OF_PRELUDE && step < prelude.count) {
            answer_failure(child->id, 0, prelude.steps[step].op, error);
        } else {
            struct reply reply = {.kind = REPLY_FAILED, .id = child->id, .index = step, .error = error};
            answer(&reply, -1);
        }
    }
    if (child->pidfd >= 0)
        close(child->pidfd);
    child->pidfd = -1;
}

static void helper_ended(const struct child *helper, int status)
{
    struct child *child = &children[helper->helps];
    if (child->state != STARTING || child->id != helper->helps_id)
        return;
    if (status) {
        answer_failure(child->id, 0, OP_MAPS, WIFEXITED(status) && WEXITSTATUS(status) == 127 ? ENOENT : EPERM);
        child->state = FAILED;
        close_pipe(child);
        kill(child->pid, SIGKILL);
    } else if (--child->helpers == 0) {
        let_go(helper->helps);
    }
}

static void reap(void)
{
    for (;;) {
        siginfo_t info = {0};
        int status = 0;
        if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) || !info.si_pid)
            return;
        unsigned index = 0;
        while (index < highest && (children[index].state == FREE || children[index].pid != info.si_pid))
            index++;
        if (index == highest) {
            waitpid(info.si_pid, NULL, 0);
            continue;
        }
        struct child *child = &children[index];
        if (child->state == STARTING)
            settle(index);
        /* The record is written before the process is reaped: who sees it gone, finds the record. */
        if (child->state == RUNNING && child->exit_file) {
            int code = info.si_code == CLD_EXITED ? info.si_status << 8 : info.si_status;
            record_exit(child->exit_file, code);
        }
        waitpid(info.si_pid, &status, 0);
        if (child->state == EMBRYO) {
            waiting--;
            if (slots[index].error)
                wanted = 0; /* the prelude can't be done here: whoever asks for it hears why */
        }
        if (child->state == HELPER)
            helper_ended(child, status);
        if (child->state == RUNNING) {
            struct reply reply = {.kind = REPLY_EXITED, .id = child->id, .pid = child->pid, .status = status};
            answer(&reply, -1);
        }
        release(child);
    }
}

static void initialise(uint32_t id, const struct plan *plan, const int *descriptors)
{
    static struct run run;
    struct slot slot = {0};
    run_begin(&run, plan, descriptors, &slot, -1, -1);
    int error = run_steps(&run, 0);
    if (run.host_root >= 0)
        close(run.host_root);
    if (error) {
        answer_failure(id, slot.step, plan->count ? plan->steps[slot.step].op : 0, error);
        return;
    }
    struct reply reply = {.kind = REPLY_STARTED, .id = id, .pid = getpid()};
    answer(&reply, -1);
}

/* Keeps a copy of the plan: children run it ahead, or as their PRELUDE. */
static void keep_prelude(uint32_t id, const uint8_t *data, size_t size)
{
    struct reply reply = {.kind = REPLY_STARTED, .id = id, .pid = getpid()};
    if (prelude.count) { /* children made after another one may be waiting */
        answer_failure(id, 0, 0, EBUSY);
        return;
    }
    memcpy(prelude_data, data, size);
    int error = plan_parse(prelude_data, size, 0, &prelude);
    if (error) {
        prelude.count = 0;
        answer_failure(id, 0, 0, error);
        return;
    }
    janitor_start();
    for (unsigned i = 0; i < prelude.count; i++) {
        const struct step *step = &prelude.steps[i];
        if (step->op == OP_CLONE)
            prelude_flags |= step->number[0];
        if (step->op == OP_READY)
            wanted = step->number[0] < READY_MAX ? (unsigned)step->number[0] : READY_MAX;
    }
    answer(&reply, -1);
}

static void node_gone(void)
{
    close(node);
    node = -1;
    wanted = 0;
    for (unsigned i = 0; i < highest; i++) {
        const struct child *child = &children[i];
        if ((child->state == RUNNING && child->alone && !child->keep) || child->state == EMBRYO)
            kill(child->pid, SIGKILL);
        /* A foreign program may have forked already, and what it forked may wait for it for ever, or not know yet
           that it is to die with it. */
        else if (child->state == STARTING || (child->state == RUNNING && !child->keep))
            kill_tree(child->pid);
    }
}

static void receive(void)
{
    static uint8_t data[PLAN_MAX + sizeof(struct request)];
    static union {
        char space[CMSG_SPACE(sizeof(int) * FDS_MAX)];
        struct cmsghdr align;
    } control;
    static struct plan plan;
    int descriptors[FDS_MAX];
    unsigned count = 0;
    struct request request;
    struct iovec part = {data, sizeof data};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(node, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0) {
        node_gone();
        return;
    }
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        unsigned more = (unsigned)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (unsigned i = 0; i < more && count < FDS_MAX; i++)
            memcpy(&descriptors[count++], CMSG_DATA(header) + i * sizeof(int), sizeof(int));
    }
    memset(&request, 0, sizeof request);
    memcpy(&request, data, (size_t)size < sizeof request ? (size_t)size : sizeof request);
    if ((size_t)size < sizeof request || request.magic != MESSAGE_MAGIC || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        answer_failure(request.id, 0, 0, EPROTO);
    } else {
        int error = plan_parse(data + sizeof request, (size_t)size - sizeof request, count, &plan);
        if (error)
            answer_failure(request.id, plan.count, 0, error);
        else if (request.kind == REQUEST_INIT)
            initialise(request.id, &plan, descriptors);
        else if (request.kind == REQUEST_SPAWN)
            spawn(request.id, &plan, descriptors, count, data + sizeof request, (size_t)size - sizeof request);
        else if (request.kind == REQUEST_PRELUDE)
            keep_prelude(request.id, data + sizeof request, (size_t)size - sizeof request);
        else
            answer_failure(request.id, 0, 0, ENOSYS);
    }
    for (unsigned i = 0; i < count; i++)
        close(descriptors[i]);
}

static int busy(void)
{
    return node >= 0 || highest > 0;
}

int serve(int socket)
{
    sigset_t signals;
    struct signalfd_siginfo info[8];
    node = socket;
    slots = mmap(NULL, CHILDREN_MAX * sizeof *slots, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    events = epoll_create1(EPOLL_CLOEXEC);
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    if (slots == MAP_FAILED || events < 0 || sigprocmask(SIG_BLOCK, &signals, NULL))
        return errno;
    int ends = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (ends < 0)
        return errno;
    int error = watch(ends, TAG_SIGNALS);
    if (!error)
        error = watch(node, TAG_SOCKET);
    if (error)
        return error;
    while (busy()) {
        struct epoll_event ready[32];
        /* Children are made ahead while nothing else happens: a start's last millisecond needs the processors,
         * too. When none is left the next start would take longer, so then at once. */
        int pause = waiting >= wanted ? -1 : waiting ? QUIET_MS : 0;
        int count = epoll_wait(events, ready, 32, pause), ended = 0;
        if (count < 0 && errno != EINTR)
            return errno;
        if (!count)
            make_embryo();
        for (int i = 0; i < count; i++) {
            uint32_t tag = ready[i].data.u32;
            if (tag == TAG_SOCKET && node >= 0)
                receive();
            else if (tag == TAG_SIGNALS)
                ended = 1;
            else if (tag < CHILDREN_MAX && children[tag].state == STARTING && children[tag].pipe >= 0)
                settle(tag);
        }
        /* Last: it frees slots that events of this round may still name. */
        if (ended) {
            while (read(ends, info, sizeof info) > 0)
                ;
            reap();
        }
    }
    return 0;
}
