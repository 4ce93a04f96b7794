/* The host's calls to the machine itself: one line each, answered by one line.
 *
 *   echo WORD | kills | hostname NAME | machine-id HEX | clock SECONDS NANOSECONDS | seed HEX | freeze | thaw | sync | wake
 *
 * `ok`, `ok TEXT` or `error CALL: TEXT`. Only the host can reach the port: no process of the workload may open it.
 */
#include "vminit.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/random.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LINE 1024

static int agent_pid;

static int disk_ioctl(unsigned long request)
{
    int fd = open("/disk", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int result = fd < 0 ? -1 : ioctl(fd, request, 0);
    int error = errno;
    if (fd >= 0)
        close(fd);
    errno = error;
    return result;
}

static int add_seed(const char *hex)
{
    struct { int entropy, size; unsigned char bytes[64]; } seed = {0};
    while (seed.size < 64 && isxdigit((unsigned char)hex[0]) && isxdigit((unsigned char)hex[1])) {
        char pair[3] = {hex[0], hex[1], 0};
        seed.bytes[seed.size++] = (unsigned char)strtoul(pair, NULL, 16);
        hex += 2;
    }
    seed.entropy = seed.size * 8;
    int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    int result = fd < 0 ? -1 : ioctl(fd, RNDADDENTROPY, &seed);
    if (result == 0)
        result = ioctl(fd, RNDRESEEDCRNG, 0); /* now, not when the generator would do it by itself */
    int error = errno;
    if (fd >= 0)
        close(fd);
    errno = error;
    return result;
}

static int set_clock(const char *text)
{
    char *end;
    struct timespec now = {.tv_sec = (time_t)strtoll(text, &end, 10)};
    now.tv_nsec = (long)strtol(end, NULL, 10);
    return clock_settime(CLOCK_REALTIME, &now);
}

static int set_machine_id(const char *text)
{
    int fd = open("/machine-id", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
    int result = fd < 0 ? -1 : dprintf(fd, "%s\n", text) < 0 ? -1 : 0;
    if (fd >= 0)
        close(fd);
    return result;
}

/* Writes the answer to a call into `answer`. */
static void call(char *line, char *answer, size_t size)
{
    char *rest = strchr(line, ' ');
    int result = -1;
    if (rest != NULL)
        *rest++ = 0;
    else
        rest = line + strlen(line);
    errno = ENOSYS;
    if (!strcmp(line, "echo")) {
        snprintf(answer, size, "ok %.64s\n", rest);
        return;
    } else if (!strcmp(line, "kills")) {
        snprintf(answer, size, "ok %ld\n", cgroup_kills());
        return;
    } else if (!strcmp(line, "hostname"))
        result = sethostname(rest, strlen(rest));
    else if (!strcmp(line, "machine-id"))
        result = set_machine_id(rest);
    else if (!strcmp(line, "clock"))
        result = set_clock(rest);
    else if (!strcmp(line, "seed"))
        result = add_seed(rest);
    else if (!strcmp(line, "freeze"))
        result = disk_ioctl(FIFREEZE);
    else if (!strcmp(line, "thaw"))
        result = disk_ioctl(FITHAW);
    else if (!strcmp(line, "sync")) {
        sync();
        result = 0;
    }
    else if (!strcmp(line, "wake"))
        result = kill(agent_pid, SIGUSR1);
    if (result < 0)
        snprintf(answer, size, "error %.32s: %s\n", line, strerror(errno));
    else
        snprintf(answer, size, "ok\n");
}

static void reply(int fd, const char *text)
{
    size_t size = strlen(text);
    while (size != 0) {
        ssize_t wrote = write(fd, text, size);
        if (wrote > 0) {
            text += wrote;
            size -= (size_t)wrote;
            continue;
        }
        struct pollfd ready = {fd, POLLOUT, 0};
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN || poll(&ready, 1, 1000) <= 0)
            return; /* the host went away: it will ask again */
    }
}

struct caller {
    int fd;
    char line[LINE];
    size_t size;
};

/* Reads and answers what has come. False: the other side is not there (any more). */
static bool listen_to(struct caller *caller)
{
    char answer[LINE], *end;
    for (;;) {
        ssize_t got = read(caller->fd, caller->line + caller->size, LINE - 1 - caller->size);
        if (got < 0)
            return errno == EAGAIN || errno == EINTR;
        if (got == 0)
            return false;
        caller->size += (size_t)got;
        caller->line[caller->size] = 0;
        while ((end = strchr(caller->line, '\n')) != NULL) {
            *end++ = 0;
            call(caller->line, answer, sizeof answer);
            reply(caller->fd, answer);
            caller->size -= (size_t)(end - caller->line);
            memmove(caller->line, end, caller->size + 1);
        }
        if (caller->size == LINE - 1)
            caller->size = 0; /* no call is so long */
    }
}

#define DOWN_TRIES 600 /* of 100 ms: how long the system's own init may take to end what it has started */

/* What was written is safe first: the host waits only so long. */
static void end_machine(void)
{
    const struct timespec pause = {0, 100000000};
    sync();
    /* As if somebody had pressed ctrl-alt-del: every init knows that, ends its services and starts the machine anew. */
    if (settings.init != NULL && kill(1, SIGINT) == 0)
        for (int i = 0; i < DOWN_TRIES; i++)
            nanosleep(&pause, NULL);
    sync();
    reboot(RB_AUTOBOOT);
}

static void reap(int agent)
{
    for (int pid, status; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        if (pid == agent)
            end_machine();
}

/* Until the agent ends, and the machine with it. */
_Noreturn void serve(int agent, int port)
{
    static struct caller caller = {.fd = -1};
    int listener = -1, kind;
    socklen_t length = sizeof kind;
    sigset_t signals;
    agent_pid = agent;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGIO);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    int events = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
    if (events < 0)
        die("control", "signalfd");
    if (getsockopt(port, SOL_SOCKET, SO_TYPE, &kind, &length) == 0)
        listener = port;
    else {
        caller.fd = port;
        /* The port tells by a signal when somebody opens it on the host's side; until then it can't be polled. */
        fcntl(port, F_SETOWN, getpid());
        fcntl(port, F_SETFL, O_NONBLOCK | O_ASYNC);
    }
    reap(agent); /* an end before its signal was blocked is told to nobody */
    bool there = true;
    for (;;) {
        struct signalfd_siginfo heard;
        struct pollfd ready[] = {{events, POLLIN, 0}, {there ? caller.fd : -1, POLLIN, 0}, {listener, POLLIN, 0}};
        poll(ready, 3, there ? -1 : 1000);
        while (read(events, &heard, sizeof heard) > 0)
            continue;
        reap(agent);
        if (listener >= 0 && ready[2].revents != 0) {
            int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
            if (fd >= 0) {
                if (caller.fd >= 0)
                    close(caller.fd);
                caller.fd = fd;
                caller.size = 0;
            }
        }
        if (caller.fd >= 0)
            there = listen_to(&caller);
        if (!there) {
            caller.size = 0;
            if (listener >= 0) {
                close(caller.fd);
                caller.fd = -1;
                there = true;
            }
        }
    }
}
