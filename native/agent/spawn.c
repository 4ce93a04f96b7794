/* Starting one command. The child does everything that needs its own identity and reports the failing step. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <grp.h>
#include <termios.h>
#include <unistd.h>

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4u
#endif

int null_fd = -1, oom_fd = -1;

#define ASK_MAX 131072u /* bytes of a request to a zygote: folder and environment */

enum step { STEP_CGROUP = 1, STEP_SESSION, STEP_TERMINAL, STEP_STDIO, STEP_IDENTITY, STEP_CWD, STEP_PROGRAM };
static const char *const steps[] = {"start", "cgroup", "session", "terminal", "stdio", "identity", "cwd", "program"};

const char *spawn_step(unsigned number)
{
    return number < sizeof steps / sizeof steps[0] ? steps[number] : steps[0];
}

static bool set_capabilities(uint64_t keep)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct now[2], next[2];
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (syscall(SYS_capget, &header, now) < 0)
        return false;
    for (int i = 0; i < 2; i++) {
        uint32_t mask = now[i].permitted & (uint32_t)(keep >> (32 * i));
        next[i] = (struct __user_cap_data_struct){mask, mask, mask};
    }
    if (memcmp(now, next, sizeof now) == 0)
        return true;
    return syscall(SYS_capset, &header, next) == 0;
}

/* Where no cgroup counts: the kernel's count by user. The agent is in it if it has the workload's user. */
static bool limit_processes(void)
{
    struct rlimit limit;
    if (config.processes == 0)
        return true;
    if (getrlimit(RLIMIT_NPROC, &limit) < 0)
        return false;
    rlim_t most = config.processes + (config.uid == getuid());
    if (limit.rlim_max > most) /* never more than whoever built the wall gave */
        limit.rlim_max = most;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NPROC, &limit) == 0;
}

/* Becomes the workload's user for good. `as_root`: root of the sandbox's own user namespace. */
bool become_workload(bool as_root)
{
    uid_t uid = as_root ? 0 : config.uid;
    gid_t gid = as_root ? 0 : config.gid;
    if (geteuid() != uid || getuid() != uid || getegid() != gid || getgid() != gid) {
        if (setgroups(0, NULL) < 0 || setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0)
            return false;
    }
    return set_capabilities(uid == 0 && config.root ? config.caps : 0);
}

static int exec_in_path(char *const *argv, char *const *envp)
{
    if (strchr(argv[0], '/') != NULL) {
        execve(argv[0], argv, envp);
        return errno;
    }
    const char *path = "/usr/local/bin:/usr/bin:/bin";
    for (char *const *entry = envp; *entry != NULL; entry++)
        if (strncmp(*entry, "PATH=", 5) == 0) {
            path = *entry + 5;
            break;
        }
    size_t name = strlen(argv[0]);
    int error = ENOENT;
    char full[4096];
    while (name != 0) {
        size_t size = strcspn(path, ":");
        if (size + 1 + name < sizeof full) {
            memcpy(full, path, size);
            size_t at = size;
            if (size != 0)
                full[at++] = '/';
            memcpy(full + at, argv[0], name + 1);
            execve(full, argv, envp);
            if (errno == EACCES)
                error = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR)
                return errno;
        }
        if (path[size] == 0)
            break;
        path += size + 1;
    }
    return error;
}

struct stdio {
    int in, out, err;
};

static int join_stdio(const struct stdio *stdio)
{
    int in = stdio->in;
    if (in < 0) {
        int ends[2]; /* no /dev/null here: an empty pipe reads as its end too */
        if (pipe2(ends, 0) < 0)
            return -1;
        close(ends[1]);
        in = ends[0];
    }
    return dup2(in, 0) < 0 || dup2(stdio->out, 1) < 0 || dup2(stdio->err, 2) < 0 ? -1 : 0;
}

static enum step child_prepare(const struct spawn *spawn, const struct stdio *stdio)
{
    for (int i = 0; i < config.cgroup_count; i++)
        if (write(config.cgroups[i], "0", 1) != 1)
            return STEP_CGROUP;
    if (setsid() < 0)
        return STEP_SESSION;
    if (spawn->pty && ioctl(stdio->in, TIOCSCTTY, 0) < 0)
        return STEP_TERMINAL;
    if (join_stdio(stdio) < 0)
        return STEP_STDIO;
    if (!limit_processes() || !become_workload(spawn->as_root))
        return STEP_IDENTITY;
    if (chdir(spawn->cwd) < 0)
        return STEP_CWD;
    umask(022);
    syscall(SYS_close_range, 3u, 0x7fffffffu, CLOSE_RANGE_CLOEXEC); /* all are so already; against a slip */
    reset_signals();
    return 0;
}

static _Noreturn void child_run(const struct spawn *spawn, const struct stdio *stdio, int status)
{
    enum step step = child_prepare(spawn, stdio);
    int error = errno;
    if (step == 0) {
        step = STEP_PROGRAM;
        error = exec_in_path(spawn->argv, spawn->envp);
    }
    uint32_t report[2] = {(uint32_t)error, (uint32_t)step};
    if (write(status, report, sizeof report) < 0) {
    }
    _exit(127);
}

/* gVisor's kernel can't hand over the other end of a terminal, and tells nobody of a new size: it is opened by its
 * name (nobody but the wall's maker mounts here), and the agent tells. */
bool terminals_silent;

static int open_peer(int master)
{
    unsigned number;
    char path[32];
    terminals_silent = true;
    if (ioctl(master, TIOCGPTN, &number) < 0)
        return -1;
    snprintf(path, sizeof path, "/dev/pts/%u", number);
    return open(path, O_RDWR | O_NOCTTY | O_CLOEXEC | O_NOFOLLOW);
}

static int open_terminal(const struct spawn *spawn, struct spawned *result, struct stdio *stdio)
{
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), unlocked = 0;
    if (master < 0)
        return -1;
    result->out = master;
    if (ioctl(master, TIOCSPTLCK, &unlocked) < 0)
        return -1;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0 && (errno == ENOTTY || errno == EINVAL))
        slave = open_peer(master);
    if (slave < 0)
        return -1;
    stdio->in = stdio->out = stdio->err = slave;
    struct winsize size = {.ws_row = spawn->rows, .ws_col = spawn->columns};
    ioctl(master, TIOCSWINSZ, &size);
    if (fchown(slave, config.uid, config.gid) < 0 || fchmod(slave, 0600) < 0) {
        /* without the right to give it away the workload still has it open */
    }
    result->in = fcntl(master, F_DUPFD_CLOEXEC, 3);
    return result->in < 0 ? -1 : 0;
}

static int make_pipe(int *ours, int *theirs, bool we_read)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    *ours = ends[we_read ? 0 : 1];
    *theirs = ends[we_read ? 1 : 0];
    return fcntl(*ours, F_SETFL, O_NONBLOCK) < 0 ? -1 : 0;
}

static int make_socket(int *ours, int *theirs)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        return -1;
    *ours = ends[0];
    *theirs = ends[1];
    return fcntl(*ours, F_SETFL, O_NONBLOCK) < 0 ? -1 : 0;
}

static int open_pipes(const struct spawn *spawn, struct spawned *result, struct stdio *stdio)
{
    if (make_pipe(&result->out, &stdio->out, true) < 0)
        return -1;
    if (spawn->merge)
        stdio->err = stdio->out;
    else if (make_pipe(&result->err, &stdio->err, true) < 0)
        return -1;
    if (spawn->zygote)
        return make_socket(&result->in, &stdio->in);
    if (spawn->stdin_open)
        return make_pipe(&result->in, &stdio->in, false);
    stdio->in = null_fd;
    return 0;
}

static void close_theirs(const struct stdio *stdio)
{
    if (stdio->in >= 0 && stdio->in != null_fd)
        close(stdio->in);
    if (stdio->out >= 0 && stdio->out != stdio->in)
        close(stdio->out);
    if (stdio->err >= 0 && stdio->err != stdio->out)
        close(stdio->err);
}

/* The score is inherited: raised around the fork, since a child that is not dumpable can't write its own. */
static void set_score(int score)
{
    static int current;
    if (oom_fd < 0 || current == score)
        return;
    char text[8];
    int size = 0, rest = score;
    char digits[8];
    do
        digits[size++] = (char)('0' + rest % 10);
    while ((rest /= 10) != 0);
    for (int i = 0; i < size; i++)
        text[i] = digits[size - 1 - i];
    if (pwrite(oom_fd, text, (size_t)size, 0) == size)
        current = score;
    else { /* it can't be lowered again here: leave it */
        close(oom_fd);
        oom_fd = -1;
    }
}

/* A child of ours reports in a pipe. What is asked of others comes with the kernel's word for who says it. */
static int open_report(int report[2], bool asked)
{
    const int on = 1;
    if (!asked)
        return pipe2(report, O_CLOEXEC | O_NONBLOCK);
    return make_socket(&report[0], &report[1]) < 0
               ? -1
               : setsockopt(report[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
}

static int open_all(const struct spawn *spawn, struct spawned *result, struct stdio *stdio, int report[2], bool asked)
{
    *stdio = (struct stdio){-1, -1, -1};
    *result = (struct spawned){-1, -1, -1, -1, -1};
    report[0] = report[1] = -1;
    if (open_report(report, asked) < 0)
        return -1;
    return spawn->pty ? open_terminal(spawn, result, stdio) : open_pipes(spawn, result, stdio);
}

/* Keeps what is ours; or, after an error, nothing. */
static int opened(struct spawned *result, const struct stdio *stdio, const int report[2], int error)
{
    if (report[1] >= 0)
        close(report[1]);
    close_theirs(stdio);
    if (error == 0) {
        result->status = report[0];
        return 0;
    }
    const int ours[] = {report[0], result->in, result->out, result->err};
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        if (ours[i] >= 0)
            close(ours[i]);
    return error;
}

int spawn_start(const struct spawn *spawn, struct spawned *result, const char **step)
{
    struct stdio stdio;
    int report[2], error;
    *step = spawn->pty ? "terminal" : "pipes";
    if (open_all(spawn, result, &stdio, report, false) < 0)
        return opened(result, &stdio, report, errno);
    *step = "fork";
    set_score(config.oom);
    pid_t pid = fork();
    if (pid == 0)
        child_run(spawn, &stdio, report[1]);
    error = pid < 0 ? errno : 0;
    set_score(0);
    result->pid = pid;
    return opened(result, &stdio, report, error);
}

/* Folder and environment, a NUL after each. Returns its size, 0 if it is too long. */
static size_t write_request(const struct spawn *spawn, char *text)
{
    size_t size = 0;
    const char *next = spawn->cwd;
    for (char *const *entry = spawn->envp; next != NULL; next = *entry++) {
        size_t length = strlen(next) + 1;
        if (length > ASK_MAX - size)
            return 0;
        memcpy(text + size, next, length);
        size += length;
    }
    return size;
}

static int send_request(int zygote, const char *text, size_t size, const int descriptors[4])
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(4 * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec piece = {.iov_base = (char *)(uintptr_t)text, .iov_len = size};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(4 * sizeof(int));
    memcpy(CMSG_DATA(rights), descriptors, 4 * sizeof(int));
    return sendmsg(zygote, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)size ? 0 : errno ? errno : EMSGSIZE;
}

/* A copy of a process that is there: it gets the pipes, and says in `status` which process it is. */
int spawn_ask(const struct spawn *spawn, int zygote, struct spawned *result, const char **step)
{
    struct stdio stdio;
    int report[2], error = E2BIG;
    *step = "pipes";
    if (open_all(spawn, result, &stdio, report, true) < 0)
        return opened(result, &stdio, report, errno);
    *step = "zygote";
    char *text = malloc(ASK_MAX);
    size_t size = text != NULL ? write_request(spawn, text) : 0;
    errno = 0;
    if (text == NULL)
        error = ENOMEM;
    else if (size != 0)
        error = send_request(zygote, text, size, (const int[4]){stdio.in, stdio.out, stdio.err, report[1]});
    free(text);
    result->pid = 0;
    return opened(result, &stdio, report, error);
}
