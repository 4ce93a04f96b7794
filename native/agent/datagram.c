/* UDP on loopback, for names: datagrams go to the host as records on a channel, and answers come back the same way. */
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define PEERS 256u /* askers that may wait for an answer; the oldest is forgotten first */
#define TURN 32    /* datagrams taken before others have their turn */

struct socket {
    struct source source;
    struct channel *channel;
    struct timer retry;
    uint64_t sent;
    uint32_t next; /* number of the next datagram */
    struct {
        uint32_t number;
        struct sockaddr_in address;
    } peers[PEERS];
    struct records records;
};

void records_feed(struct records *records, const uint8_t *data, size_t size)
{
    records->left = data;
    records->size = size;
}

/* 1: a record; 0: more bytes are needed; -1: no record is that long. */
int records_next(struct records *records, uint32_t *number, const uint8_t **body, size_t *size)
{
    for (;;) {
        size_t want = RECORD_HEADER;
        if (records->have >= RECORD_HEADER) {
            *size = get_u32(records->buffer);
            if (*size > DATAGRAM_MAX)
                return -1;
            want += *size;
            if (records->have == want) {
                *number = get_u32(records->buffer + 4);
                *body = records->buffer + RECORD_HEADER;
                records->have = 0;
                return 1;
            }
        }
        if (records->size == 0)
            return 0;
        size_t part = want - records->have < records->size ? want - records->have : records->size;
        memcpy(records->buffer + records->have, records->left, part);
        records->have += part;
        records->left += part;
        records->size -= part;
    }
}

static void on_data(struct channel *channel, const uint8_t *data, size_t size)
{
    struct socket *socket = channel->owner;
    const uint8_t *body;
    uint32_t number;
    size_t length;
    int found;
    records_feed(&socket->records, data, size);
    while ((found = records_next(&socket->records, &number, &body, &length)) > 0) {
        struct sockaddr_in *to = &socket->peers[number % PEERS].address;
        if (socket->peers[number % PEERS].number == number && to->sin_port != 0)
            sendto(socket->source.fd, body, length, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)to, sizeof *to);
    }
    if (found < 0)
        link_violation(channel->link);
    else
        channel_consumed(channel, size);
}

static void forward(struct socket *socket, const struct sockaddr_in *from, size_t size)
{
    uint32_t number = socket->next++;
    put_u32(scratch, (uint32_t)size);
    put_u32(scratch + 4, number);
    socket->peers[number % PEERS].number = number;
    socket->peers[number % PEERS].address = *from;
    channel_data(socket->channel, 0, socket->sent, scratch, RECORD_HEADER + size);
    socket->sent += RECORD_HEADER + size;
}

/* Called by the loop only: `scratch` is free then. */
static void on_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct socket *socket = (struct socket *)((char *)source - offsetof(struct socket, source));
    for (int i = 0; i < TURN; i++) {
        struct sockaddr_in from;
        socklen_t length = sizeof from;
        if (channel_room(socket->channel, 0) < RECORD_HEADER + DATAGRAM_MAX) { /* the kernel keeps some, drops more */
            loop_arm(source, 0);
            return;
        }
        ssize_t got = recvfrom(source->fd, scratch + RECORD_HEADER, DATAGRAM_MAX, MSG_DONTWAIT | MSG_TRUNC,
                               (struct sockaddr *)&from, &length);
        if (got < 0 && errno != EINTR && errno != ECONNREFUSED)
            break;
        if (got >= 0 && (size_t)got <= DATAGRAM_MAX && length == sizeof from && from.sin_family == AF_INET)
            forward(socket, &from, (size_t)got);
    }
    if (loop_arm(source, EPOLLIN) < 0) {
        loop_arm(source, 0);
        timer_set(&socket->retry, 50000000u);
    }
}

static void again(struct timer *timer)
{
    struct socket *socket = (struct socket *)((char *)timer - offsetof(struct socket, retry));
    loop_arm(&socket->source, EPOLLIN);
}

static void on_pump(struct channel *channel)
{
    struct socket *socket = channel->owner;
    loop_arm(&socket->source, EPOLLIN);
}

static void on_ended(struct channel *channel)
{
    struct socket *socket = channel->owner;
    timer_clear(&socket->retry);
    loop_close(&socket->source);
    free(socket);
}

static const struct channel_ops socket_ops = {.data = on_data, .pump = on_pump, .ended = on_ended};

void net_datagrams(struct channel *channel, const uint8_t *fields, size_t size)
{
    struct fields list = fields_of(fields, size);
    struct field field;
    uint64_t port = 0;
    while (fields_next(&list, &field))
        if (field.tag == 1 && (!field_number(&field, &port) || port > 65535)) {
            channel_error(channel, EINVAL, "port");
            return;
        }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
    struct socket *made = fd < 0 ? NULL : calloc(1, sizeof *made);
    if (fd < 0 || made == NULL || bind(fd, (struct sockaddr *)&address, length) < 0 ||
        getsockname(fd, (struct sockaddr *)&address, &length) < 0) {
        error = errno;
        if (fd >= 0)
            close(fd);
        free(made);
        channel_error(channel, error, "datagrams");
        return;
    }
    made->source = (struct source){.fd = fd, .ready = on_ready};
    made->retry.expired = again;
    made->channel = channel;
    made->next = 1; /* an empty place has number 0 */
    channel->ops = &socket_ops;
    channel->owner = made;
    uint8_t bytes[16];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, ntohs(address.sin_port));
    channel_reply(channel, &out);
    loop_arm(&made->source, EPOLLIN);
}
