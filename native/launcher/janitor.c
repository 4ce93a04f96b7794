#include "janitor.h"
#include "sys.h"

#include <errno.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum { PAUSE_NS = 20000, PATIENCE = 100 /* pauses: 2 ms and more, then the caller does it itself */ };

static int janitor = -1;

union pair {
    char space[CMSG_SPACE(sizeof(int) * 2)];
    struct cmsghdr align;
};

static _Noreturn void work(int socket)
{
    int home = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    for (;;) {
        union pair control;
        char byte;
        int given[2];
        struct iovec part = {&byte, 1};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
        if (size < 0 && errno == EINTR)
            continue;
        struct cmsghdr *header = size == 1 ? CMSG_FIRSTHDR(&message) : NULL;
        if (home < 0 || !header || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof given))
            _exit(0);
        memcpy(given, CMSG_DATA(header), sizeof given);
        if (!setns(given[0], CLONE_NEWNS) && !fchdir(given[1]))
            umount2(".", MNT_DETACH);
        close(given[0]);
        close(given[1]);
        /* Never anywhere but in the launcher's namespace while idle. */
        if (setns(home, CLONE_NEWNS))
            _exit(0);
    }
}

void janitor_start(void)
{
    int ends[2];
    if (janitor >= 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
        return;
    int pid = fork();
    if (!pid) {
        /* Above all not the node's socket: its end must be seen when the launcher dies. */
        dup2(ends[1], 3);
        rf_close_range(4, ~0u, 0);
        fcntl(3, F_SETFD, FD_CLOEXEC);
        work(3);
    }
    close(ends[1]);
    if (pid > 0)
        janitor = ends[0];
    else
        close(ends[0]);
}

int janitor_socket(void)
{
    return janitor;
}

int janitor_detach(int root)
{
    union pair control = {0};
    char byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (janitor < 0)
        return ENOTCONN;
    int given[2] = {open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC), root};
    if (given[0] < 0)
        return errno;
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof given);
    memcpy(CMSG_DATA(header), given, sizeof given);
    int error = sendmsg(janitor, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 ? 0 : errno;
    close(given[0]);
    return error;
}

int janitor_await(int root)
{
    struct timespec pause = {0, PAUSE_NS};
    for (int i = 0; i < PATIENCE; i++) {
        /* Only what is mounted in the caller's namespace can be changed; the change itself is of no matter. */
        struct rf_mount_attr attr = {.set = RF_ATTR_NOSUID};
        if (rf_mount_setattr(root, "", RF_AT_EMPTY, &attr))
            return errno == EINVAL ? 0 : errno;
        nanosleep(&pause, NULL);
    }
    return EBUSY;
}
