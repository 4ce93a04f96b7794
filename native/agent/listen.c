/* The listening socket that hosts dial. */
#include "agent.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static struct source listener = {.fd = -1};

static void accept_again(struct timer *timer)
{
    (void)timer;
    loop_arm(&listener, EPOLLIN);
}

static struct timer retry = {.expired = accept_again};

static void accept_links(struct source *source, uint32_t events)
{
    (void)events;
    for (int i = 0; i < 8; i++) {
        int fd = -1;
        errno = ENOMEM;
        if (link_prepare())
            fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) { /* out of descriptors or memory */
                loop_arm(source, 0);
                timer_set(&retry, 50000000u);
            }
            return;
        }
        if (link_count >= config.max_links)
            close(fd);
        else
            link_adopt(fd, fd, false);
    }
}

static int bind_path(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    unlink(path);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 128) < 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

bool link_listen(void)
{
    listener.ready = accept_links;
    if (config.listen_fd >= 0)
        listener.fd = config.listen_fd;
    else if (config.listen_path != NULL)
        listener.fd = bind_path(config.listen_path);
    else
        return config.stream_in >= 0 || config.mux_in >= 0;
    return listener.fd >= 0 && loop_arm(&listener, EPOLLIN) == 0;
}

/* For quiesce: no new link, and no host-facing socket of our own making stays open. */
void link_unlisten(void)
{
    timer_clear(&retry);
    loop_arm(&listener, 0);
    if (config.listen_fd >= 0)
        return;
    loop_close(&listener);
    if (config.listen_path != NULL)
        unlink(config.listen_path);
}
