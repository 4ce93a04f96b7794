#include "netns.h"
#include "steps.h"
#include "sys.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

static int maker = -1; /* our end of the socket to the process that makes them */
static int ready[NETNS_MAX];
static unsigned ready_count, missing;

static int send_descriptor(int socket, int descriptor)
{
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    char byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    return sendmsg(socket, &message, MSG_NOSIGNAL) == 1 ? 0 : -1;
}

/* One namespace for every byte asked for, until the launcher is gone. It goes back to the host's own in
 * between, so that it is never inside one that a sandbox has. */
static _Noreturn void make(int socket)
{
    char byte;
    int host = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    setpriority(PRIO_PROCESS, 0, 5); /* whoever waits for a start comes first */
    while (host >= 0 && recv(socket, &byte, 1, 0) == 1) {
        if (unshare(CLONE_NEWNET) || netns_loopback())
            break;
        int made = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        if (made < 0 || send_descriptor(socket, made) || setns(host, CLONE_NEWNET))
            break;
        close(made);
    }
    _exit(0);
}

static void ask(void)
{
    char byte = 0;
    if (maker >= 0)
        send(maker, &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

int netns_start(unsigned count)
{
    int ends[2];
    if (maker >= 0 || !count || count > NETNS_MAX || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
        return -1;
    int pid = fork();
    if (!pid) {
        /* Above all not the node's socket: its end must be seen when the launcher dies. */
        dup2(ends[1], 3);
        rf_close_range(4, ~0u, 0);
        fcntl(3, F_SETFD, FD_CLOEXEC);
        make(3);
    }
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return -1;
    }
    maker = ends[0];
    while (count--)
        ask();
    return maker;
}

void netns_receive(void)
{
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    char byte;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(maker, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0) {
        /* It is gone: from here on every sandbox makes its own. */
        close(maker);
        maker = -1;
        return;
    }
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
        return;
    int made;
    memcpy(&made, CMSG_DATA(header), sizeof made);
    if (ready_count < NETNS_MAX)
        ready[ready_count++] = made;
    else
        close(made);
}

int netns_take(void)
{
    if (!ready_count)
        return -1;
    missing++;
    return ready[--ready_count];
}

void netns_refill(void)
{
    for (; missing; missing--)
        ask();
}
