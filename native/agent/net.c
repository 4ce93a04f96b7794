/* Ports of the sandbox: dialling loopback, and listening on it with connections handed to the host. */
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct stream {
    struct source source;
    struct channel *channel;
    struct queue queue;
    uint64_t sent;
    bool connecting, unanswered, read_eof, host_eof, shut;
};

struct listener {
    struct source source;
    struct channel *channel;
    uint16_t port;
    struct timer retry; /* while there are no descriptors */
};

static void stream_free(struct stream *stream, bool reset)
{
    static const struct linger now = {.l_onoff = 1};
    if (reset)
        setsockopt(stream->source.fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    queue_forget(&stream->queue, stream->channel);
    queue_clear(&stream->queue);
    loop_close(&stream->source);
    free(stream);
}

static void stream_fail(struct stream *stream, int error, const char *what)
{
    struct channel *channel = stream->channel;
    channel->ops = NULL;
    stream_free(stream, true);
    channel_error(channel, error, what);
}

static void stream_arm(struct stream *stream)
{
    uint32_t events = 0;
    if (stream->connecting)
        events = EPOLLOUT;
    else if (!stream->unanswered) {
        if (!stream->read_eof && channel_room(stream->channel, 0) != 0)
            events |= EPOLLIN;
        if (stream->queue.head != NULL)
            events |= EPOLLOUT;
    }
    if (loop_arm(&stream->source, events) < 0)
        stream_fail(stream, errno, "poll");
}

/* Ends the channel when both directions have ended; else waits for more. */
static void stream_settle(struct stream *stream)
{
    if (stream->host_eof && stream->queue.head == NULL && !stream->shut && !stream->connecting) {
        shutdown(stream->source.fd, SHUT_WR);
        stream->shut = true;
    }
    if (stream->read_eof && stream->shut) {
        struct channel *channel = stream->channel;
        stream_free(stream, false);
        channel_close(channel);
        return;
    }
    stream_arm(stream);
}

static void stream_write(struct stream *stream)
{
    if (queue_write(&stream->queue, stream->source.fd, false) < 0)
        stream_fail(stream, errno, "write");
    else
        stream_settle(stream);
}

/* Called by the loop only: `scratch` is free then. */
static void stream_read(struct stream *stream)
{
    size_t room = channel_room(stream->channel, 0);
    if (room != 0) {
        ssize_t got = read(stream->source.fd, scratch, room);
        if (got < 0 && errno != EAGAIN && errno != EINTR) {
            stream_fail(stream, errno, "read");
            return;
        }
        if (got > 0) {
            channel_data(stream->channel, 0, stream->sent, scratch, (size_t)got);
            stream->sent += (size_t)got;
        } else if (got == 0) {
            stream->read_eof = true;
            channel_eof(stream->channel, 0, stream->sent);
        }
    }
    stream_settle(stream);
}

static void stream_connected(struct stream *stream)
{
    int error = 0, on = 1;
    socklen_t size = sizeof error;
    getsockopt(stream->source.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
        stream_fail(stream, error, "connect");
        return;
    }
    stream->connecting = false;
    setsockopt(stream->source.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    channel_reply(stream->channel, NULL);
    stream_write(stream);
}

static void stream_ready(struct source *source, uint32_t events)
{
    struct stream *stream = (struct stream *)((char *)source - offsetof(struct stream, source));
    if (stream->connecting)
        stream_connected(stream);
    else if (events & EPOLLOUT)
        stream_write(stream); /* reading has its turn when this one has nothing left */
    else
        stream_read(stream);
}

static void on_data(struct channel *channel, const uint8_t *data, size_t size)
{
    struct stream *stream = channel->owner;
    if (stream->queue.head == NULL && !stream->connecting && !stream->unanswered) {
        ssize_t wrote = write(stream->source.fd, data, size);
        if (wrote < 0 && errno != EAGAIN && errno != EINTR) {
            stream_fail(stream, errno, "write");
            return;
        }
        if (wrote > 0) {
            channel_consumed(channel, (size_t)wrote);
            data += wrote;
            size -= (size_t)wrote;
        }
    }
    if (size != 0 && !queue_add(&stream->queue, channel, data, size))
        stream_fail(stream, ENOMEM, "write");
    else if (size != 0)
        stream_arm(stream);
}

static void on_eof(struct channel *channel)
{
    struct stream *stream = channel->owner;
    stream->host_eof = true;
    stream_settle(stream);
}

static void on_pump(struct channel *channel) { stream_arm(channel->owner); }

/* Whose half has ended, and was written to the last byte, loses nothing; anything else must not look like an end. */
static void on_ended(struct channel *channel)
{
    struct stream *stream = channel->owner;
    stream_free(stream, !stream->host_eof || stream->queue.head != NULL || stream->connecting);
}

static void on_reply(struct channel *channel)
{
    struct stream *stream = channel->owner;
    if (!stream->unanswered) {
        link_violation(channel->link);
        return;
    }
    stream->unanswered = false;
    stream_write(stream);
}

static const struct channel_ops stream_ops = {
    .data = on_data, .eof = on_eof, .pump = on_pump, .ended = on_ended, .reply = on_reply,
};

static struct stream *stream_new(int fd)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream != NULL)
        stream->source = (struct source){.fd = fd, .ready = stream_ready};
    return stream;
}

static void stream_own(struct stream *stream, struct channel *channel)
{
    stream->channel = channel;
    channel->ops = &stream_ops;
    channel->owner = stream;
}

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* Loopback addresses only. */
static int parse_address(const struct field *text, uint16_t port, union address *address, socklen_t *size)
{
    char name[64] = "127.0.0.1";
    if (text->data != NULL) {
        if (text->size == 0 || text->size >= sizeof name)
            return EACCES;
        memcpy(name, text->data, text->size);
        name[text->size] = 0;
    }
    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, name, &address->v4.sin_addr) == 1) {
        address->v4.sin_family = AF_INET;
        address->v4.sin_port = htons(port);
        *size = sizeof address->v4;
        return ntohl(address->v4.sin_addr.s_addr) >> 24 == 127 ? 0 : EACCES;
    }
    if (inet_pton(AF_INET6, name, &address->v6.sin6_addr) != 1)
        return EACCES;
    address->v6.sin6_family = AF_INET6;
    address->v6.sin6_port = htons(port);
    *size = sizeof address->v6;
    return IN6_IS_ADDR_LOOPBACK(&address->v6.sin6_addr) ? 0 : EACCES;
}

static bool parse(const uint8_t *fields, size_t size, uint64_t *port, struct field *second)
{
    struct fields list = fields_of(fields, size);
    struct field field;
    bool found = false;
    while (fields_next(&list, &field)) {
        if (field.tag == 1) {
            if (!field_number(&field, port) || *port > 65535)
                return false;
            found = true;
        } else if (field.tag == 2)
            *second = field;
    }
    return found;
}

void net_dial(struct channel *channel, const uint8_t *fields, size_t size)
{
    uint64_t port = 0;
    struct field text = {0};
    union address address;
    socklen_t length = 0;
    if (!parse(fields, size, &port, &text) || port == 0) {
        channel_error(channel, EINVAL, "port");
        return;
    }
    int error = parse_address(&text, (uint16_t)port, &address, &length);
    if (error != 0) {
        channel_error(channel, error, "address");
        return;
    }
    int fd = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || (connect(fd, &address.any, length) < 0 && errno != EINPROGRESS)) {
        error = errno;
        if (fd >= 0)
            close(fd);
        channel_error(channel, error, "connect");
        return;
    }
    struct stream *stream = stream_new(fd);
    if (stream == NULL) {
        close(fd);
        channel_error(channel, ENOMEM, "stream");
        return;
    }
    stream_own(stream, channel);
    stream->connecting = true;
    stream_arm(stream);
}

/* Where the connection was for, before a rule of this namespace sent it here; nothing if it was for here. Returns the
 * port that whoever connected named. */
static uint16_t write_original(struct writer *out, int fd, uint16_t port)
{
    enum { ORIGINAL_DESTINATION = 80 };
    struct sockaddr_in address = {0};
    socklen_t size = sizeof address;
    char text[INET_ADDRSTRLEN];
    if (getsockopt(fd, IPPROTO_IP, ORIGINAL_DESTINATION, &address, &size) < 0 || size != sizeof address ||
        address.sin_family != AF_INET || inet_ntop(AF_INET, &address.sin_addr, text, sizeof text) == NULL)
        return port;
    if (address.sin_addr.s_addr == htonl(INADDR_LOOPBACK) && ntohs(address.sin_port) == port)
        return port;
    write_bytes(out, 4, text, strlen(text));
    write_number(out, 5, ntohs(address.sin_port));
    return ntohs(address.sin_port);
}

static void hand_over(struct listener *listener, int fd, uint16_t peer)
{
    static const struct linger now = {.l_onoff = 1};
    uint8_t bytes[512];
    struct asker asker;
    int on = 1;
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, listener->channel->id);
    write_number(&out, 2, peer);
    uint16_t named = write_original(&out, fd, listener->port);
    if (asker_find(peer, named, &asker)) {
        write_number(&out, 3, asker.uid);
        if (asker.pid != 0) {
            write_number(&out, 6, asker.pid);
            write_bytes(&out, 7, asker.comm, asker.comm_size);
            write_bytes(&out, 8, asker.name, asker.name_size);
        }
    }
    struct stream *stream = stream_new(fd);
    struct channel *channel = stream == NULL ? NULL
                            : channel_open_host(listener->channel->link, 34, out.data, out.size);
    if (channel == NULL) {
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
        close(fd);
        free(stream);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    stream_own(stream, channel);
    stream->unanswered = true;
}

static void listener_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct listener *listener = (struct listener *)((char *)source - offsetof(struct listener, source));
    for (int i = 0; i < 16; i++) {
        struct sockaddr_in address;
        socklen_t size = sizeof address;
        if (link_room(listener->channel->link) == 0) { /* they wait in the backlog */
            listener->channel->link->hungry = true;
            loop_arm(source, 0);
            return;
        }
        int fd = accept4(source->fd, (struct sockaddr *)&address, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
                loop_arm(source, 0);
                timer_set(&listener->retry, 50000000u);
            }
            return;
        }
        hand_over(listener, fd, ntohs(address.sin_port));
    }
}

static void listener_again(struct timer *timer)
{
    struct listener *listener = (struct listener *)((char *)timer - offsetof(struct listener, retry));
    loop_arm(&listener->source, EPOLLIN);
}

static void listener_pump(struct channel *channel)
{
    struct listener *listener = channel->owner;
    loop_arm(&listener->source, EPOLLIN);
}

static void listener_ended(struct channel *channel)
{
    struct listener *listener = channel->owner;
    timer_clear(&listener->retry);
    loop_close(&listener->source);
    free(listener);
}

static const struct channel_ops listener_ops = {.pump = listener_pump, .ended = listener_ended};

static int open_listener(uint16_t port, int backlog, struct sockaddr_in *address)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    if (fd < 0)
        return -1;
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port),
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof *address;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)address, size) < 0 || listen(fd, backlog) < 0 ||
        getsockname(fd, (struct sockaddr *)address, &size) < 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

void net_listen(struct channel *channel, const uint8_t *fields, size_t size)
{
    uint64_t port = 0, backlog = 64;
    struct field second = {0};
    struct sockaddr_in address;
    if (!parse(fields, size, &port, &second) || (second.data != NULL && !field_number(&second, &backlog)) ||
        backlog == 0) {
        channel_error(channel, EINVAL, "port");
        return;
    }
    int fd = open_listener((uint16_t)port, backlog > 4096 ? 4096 : (int)backlog, &address);
    struct listener *listener = fd < 0 ? NULL : calloc(1, sizeof *listener);
    if (listener == NULL) {
        int error = fd < 0 ? errno : ENOMEM;
        if (fd >= 0)
            close(fd);
        channel_error(channel, error, "listen");
        return;
    }
    listener->source = (struct source){.fd = fd, .ready = listener_ready};
    listener->channel = channel;
    listener->port = ntohs(address.sin_port);
    listener->retry.expired = listener_again;
    channel->ops = &listener_ops;
    channel->owner = listener;
    uint8_t bytes[16];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, listener->port);
    channel_reply(channel, &out);
    loop_arm(&listener->source, EPOLLIN);
}
