/* One per sandbox whose wall has a single byte stream: owns that stream, and offers the usual listening socket. It has no
 * rights, outlives the process that started it, and ends when the stream does. docs/PROTOCOL.md has the format. */
#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static _Noreturn void refuse(const char *why)
{
    const char *parts[] = {"ringfence-link: ", why, "\n"};
    for (int i = 0; i < 3; i++)
        if (write(2, parts[i], strlen(parts[i])) < 0) {
        }
    _exit(125);
}

static int dial(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        return -1;
    return fd;
}

static bool non_blocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) >= 0;
}

int main(int argc, char **argv)
{
    struct options options;
    if (!options_parse(&options, argc, argv))
        refuse("bad arguments");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    if (options.connect_path != NULL)
        options.in = options.out = dial(options.connect_path);
    if (options.in < 0)
        refuse(strerror(errno));
    if (!non_blocking(options.in) || !non_blocking(options.out) || !non_blocking(options.listen_fd))
        refuse(strerror(errno));
    struct rlimit limit;
    options.most_open = getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
    if (!rights_drop(&options) || !rights_filter())
        refuse(strerror(errno));
    _exit(serve(&options));
}
