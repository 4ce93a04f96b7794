#include "embryo.h"
#include "janitor.h"
#include "sys.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

union control {
    char space[CMSG_SPACE(sizeof(int) * (FDS_MAX + 1))];
    struct cmsghdr align;
};

/* First byte of a message: whether the last descriptor is the user namespace. */
enum { WITHOUT_USERNS, WITH_USERNS };

enum { USUAL_BYTES = 4096, USUAL_STEPS = 80 };

int embryo_send(int socket, const uint8_t *plan, size_t size, const int *descriptors, unsigned count, int userns)
{
    union control control = {0};
    uint8_t first = userns >= 0 ? WITH_USERNS : WITHOUT_USERNS;
    struct iovec parts[2] = {{&first, 1}, {(void *)(uintptr_t)plan, size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    unsigned total = count + (userns >= 0);
    if (total) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * total);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * total);
        memcpy(CMSG_DATA(header), descriptors, sizeof(int) * count);
        if (userns >= 0)
            memcpy(CMSG_DATA(header) + sizeof(int) * count, &userns, sizeof userns);
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? errno : 0;
}

/* Descriptors of the launcher that a child has no business with; -1 stands for none. */
static void close_all_but(const int *kept, unsigned count)
{
    int from = 3;
    for (;;) {
        int next = INT_MAX;
        for (unsigned i = 0; i < count; i++)
            if (kept[i] >= from && kept[i] < next)
                next = kept[i];
        if (next > from)
            rf_close_range((unsigned)from, (unsigned)next - 1, 0);
        if (next == INT_MAX)
            return;
        from = next + 1;
    }
}

static _Noreturn void fail(struct slot *slot, int error)
{
    slot->error = error;
    _exit(127);
}

_Noreturn void embryo_main(const struct plan *prelude, int socket, struct slot *slot, int alive)
{
    static uint8_t data[PLAN_MAX + 1];
    static union control control;
    static struct plan plan;
    static struct run run;
    int descriptors[FDS_MAX + 1], userns = -1;
    unsigned count = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    /* Above all not the node's socket: its end must be seen when the launcher dies. */
    int kept[] = {socket, alive, janitor_socket()};
    close_all_but(kept, 3);
    run_begin(&run, prelude, NULL, slot, alive, -1);
    int error = run_steps(&run, STEP_OF_PRELUDE);
    if (error)
        fail(slot, error);
    /* Touched now, so that the start need not wait for the pages: as much as a usual plan takes. */
    memset(data, 1, USUAL_BYTES);
    memset(plan.steps, 1, USUAL_STEPS * sizeof *plan.steps);
    memset(descriptors, 1, sizeof descriptors);
    struct iovec part = {data, sizeof data};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t size;
    while ((size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ;
    if (size < 1)
        _exit(0); /* nobody wanted it */
    slot->step = 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
        count = (unsigned)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(descriptors, CMSG_DATA(header), sizeof(int) * count);
    }
    if (data[0] == WITH_USERNS && count)
        userns = descriptors[--count];
    close(socket);
    error = plan_parse(data + 1, (size_t)size - 1, count, &plan);
    if (error)
        fail(slot, error);
    for (unsigned i = 0; i < plan.count; i++)
        if (plan.steps[i].op == OP_KEEP)
            prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
    int host = run.host_root;
    run_begin(&run, &plan, descriptors, slot, alive, userns);
    run.host_root = host;
    run.prelude_done = 1;
    error = run_steps(&run, 0);
    fail(slot, error ? error : ENOEXEC);
}
