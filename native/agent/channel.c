/* Channels: ids, credit, and the table of operations. */
#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct operation {
    uint16_t number;
    void (*run)(struct channel *channel, const uint8_t *fields, size_t size);
};

static const struct operation operations[] = {
    {1, process_start}, {2, process_attach}, {3, process_signal}, {4, process_list},
    {5, process_resize}, {6, process_remove},
    {16, worker_operation}, {17, worker_operation}, {18, worker_operation}, {19, worker_operation},
    {20, worker_operation}, {21, worker_operation}, {22, worker_operation}, {23, worker_operation},
    {24, worker_operation}, {25, worker_operation},
    {32, net_dial}, {33, net_listen}, {35, net_datagrams},
    {48, control_bind}, {49, worker_operation}, {50, control_quiesce}, {51, control_shutdown},
};

static struct channel **bucket_of(struct link *link, uint32_t id)
{
    return &link->buckets[(id >> 1) % CHANNEL_BUCKETS];
}

static struct channel *find(struct link *link, uint32_t id)
{
    struct channel *channel = *bucket_of(link, id);
    while (channel != NULL && channel->id != id)
        channel = channel->next;
    return channel;
}

static void channel_free(struct channel *channel)
{
    struct link *link = channel->link;
    for (struct channel **at = bucket_of(link, channel->id); *at != NULL; at = &(*at)->next)
        if (*at == channel) {
            *at = channel->next;
            link->channels--;
            break;
        }
    free(channel);
}

static struct channel *channel_new(struct link *link, uint32_t id, uint16_t operation)
{
    struct channel *channel = calloc(1, sizeof *channel);
    if (channel == NULL)
        return NULL;
    channel->link = link;
    channel->id = id;
    channel->operation = operation;
    channel->host_credit = channel->host_window = HOST_WINDOW;
    channel_windows(channel, GUEST_WINDOW);
    channel->next = *bucket_of(link, id);
    *bucket_of(link, id) = channel;
    link->channels++;
    return channel;
}

void channel_windows(struct channel *channel, uint64_t window)
{
    for (unsigned i = 0; i < STREAM_COUNT; i++)
        channel->credit[i] = window;
}

static void send_error(struct link *link, uint32_t id, int error, const char *what)
{
    uint8_t number[4];
    char text[256];
    put_u32(number, (uint32_t)error);
    const char *reason = strerror(error);
    size_t size = 0;
    for (const char *part = what; part != NULL && *part != 0 && size < 180; part++)
        text[size++] = *part;
    if (size != 0)
        memcpy(text + size, ": ", 2), size += 2;
    for (; *reason != 0 && size < sizeof text; reason++)
        text[size++] = *reason;
    link_send(link, id, FRAME_ERROR, number, sizeof number, text, size);
}

void channel_reply(struct channel *channel, const struct writer *fields)
{
    link_send(channel->link, channel->id, FRAME_REPLY, fields ? fields->data : NULL,
              fields ? fields->size : 0, NULL, 0);
}

void channel_reply_end(struct channel *channel, const struct writer *fields)
{
    channel_reply(channel, fields);
    channel_free(channel);
}

void channel_error(struct channel *channel, int error, const char *what)
{
    send_error(channel->link, channel->id, error, what);
    channel_free(channel);
}

/* How many bytes of one DATA frame may be sent now; 0 also when the link is full (it pumps again later). */
size_t channel_room(const struct channel *channel, unsigned stream)
{
    size_t room = link_room(channel->link);
    if (room <= FRAME_HEADER + DATA_HEADER) {
        channel->link->hungry = true;
        return 0;
    }
    room -= FRAME_HEADER + DATA_HEADER;
    if (room > FRAME_PAYLOAD_MAX - DATA_HEADER)
        room = FRAME_PAYLOAD_MAX - DATA_HEADER;
    return channel->credit[stream] < room ? (size_t)channel->credit[stream] : room;
}

void channel_data(struct channel *channel, unsigned stream, uint64_t offset, const uint8_t *data, size_t size)
{
    uint8_t head[DATA_HEADER] = {(uint8_t)stream};
    put_u64(head + 1, offset);
    channel->credit[stream] -= size;
    link_send(channel->link, channel->id, FRAME_DATA, head, sizeof head, data, size);
}

void channel_eof(struct channel *channel, unsigned stream, uint64_t offset)
{
    uint8_t head[DATA_HEADER] = {(uint8_t)stream};
    put_u64(head + 1, offset);
    link_send(channel->link, channel->id, FRAME_EOF, head, sizeof head, NULL, 0);
}

void channel_event(struct channel *channel, uint16_t event, const struct writer *fields)
{
    uint8_t head[2];
    put_u16(head, event);
    link_send(channel->link, channel->id, FRAME_EVENT, head, sizeof head, fields->data, fields->size);
}

void channel_close(struct channel *channel)
{
    link_send(channel->link, channel->id, FRAME_CLOSE, NULL, 0, NULL, 0);
    channel->sent_close = true;
    channel->ops = NULL;
    channel->owner = NULL; /* stays until the host has answered */
}

static void give_credit(struct channel *channel, uint32_t bytes)
{
    uint8_t payload[5] = {0};
    put_u32(payload + 1, bytes);
    channel->host_credit += bytes;
    link_send(channel->link, channel->id, FRAME_CREDIT, payload, sizeof payload, NULL, 0);
}

void channel_consumed(struct channel *channel, size_t size)
{
    channel->owed += size;
    if (channel->owed < channel->host_window / 2 || channel->sent_close || channel->host_eof)
        return;
    give_credit(channel, (uint32_t)channel->owed);
    channel->owed = 0;
}

void channel_widen(struct channel *channel, uint32_t window)
{
    if (channel->host_window >= window || channel->sent_close || channel->host_eof)
        return;
    give_credit(channel, window - channel->host_window);
    channel->host_window = window;
}

void channel_ended(struct channel *channel)
{
    const struct channel_ops *ops = channel->ops;
    channel->ops = NULL;
    channel->sent_close = true;
    if (ops != NULL && ops->ended != NULL)
        ops->ended(channel);
    channel_free(channel);
}

/* Only for operations that begin in the guest (net.accepted). */
struct channel *channel_open_host(struct link *link, uint16_t operation, const uint8_t *fields, size_t size)
{
    if (link->broken || link->channels >= CHANNELS_MAX || link->guest_next >= UINT32_MAX - 2)
        return NULL;
    struct channel *channel = channel_new(link, link->guest_next, operation);
    if (channel == NULL)
        return NULL;
    link->guest_next += 2;
    uint8_t head[2];
    put_u16(head, operation);
    link_send(link, channel->id, FRAME_OPEN, head, sizeof head, fields, size);
    return channel;
}

void channel_opened(struct link *link, const struct frame *frame)
{
    if (!(frame->channel & 1) || find(link, frame->channel) != NULL ||
        !fields_valid(frame->payload + 2, frame->size - 2)) {
        link_violation(link);
        return;
    }
    if (frame->channel > link->host_top)
        link->host_top = frame->channel;
    uint16_t number = get_u16(frame->payload);
    if (link->channels >= CHANNELS_MAX) {
        send_error(link, frame->channel, EMFILE, "channels");
        return;
    }
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++)
        if (operations[i].number == number) {
            struct channel *channel = channel_new(link, frame->channel, number);
            if (channel == NULL)
                send_error(link, frame->channel, ENOMEM, "channel");
            else
                operations[i].run(channel, frame->payload + 2, frame->size - 2);
            return;
        }
    send_error(link, frame->channel, ENOSYS, "operation");
}

static void take_data(struct channel *channel, const struct frame *frame)
{
    uint64_t offset = get_u64(frame->payload + 1);
    size_t size = frame->size - DATA_HEADER;
    if (frame->payload[0] != 0 || channel->host_eof || offset != channel->host_offset ||
        size > channel->host_credit) {
        link_violation(channel->link);
        return;
    }
    channel->host_credit -= size;
    channel->host_offset += size;
    if (channel->ops != NULL && channel->ops->data != NULL)
        channel->ops->data(channel, frame->payload + DATA_HEADER, size);
    else
        channel_consumed(channel, size);
}

static void take_eof(struct channel *channel, const struct frame *frame)
{
    if (frame->payload[0] != 0 || channel->host_eof || get_u64(frame->payload + 1) != channel->host_offset) {
        link_violation(channel->link);
        return;
    }
    channel->host_eof = true;
    if (channel->ops != NULL && channel->ops->eof != NULL)
        channel->ops->eof(channel);
}

static void take_credit(struct channel *channel, const struct frame *frame)
{
    unsigned stream = frame->payload[0];
    uint64_t bytes = get_u32(frame->payload + 1);
    if (stream >= STREAM_COUNT || channel->credit[stream] > UINT64_MAX - bytes ||
        channel->granted[stream] > UINT64_MAX - bytes) {
        link_violation(channel->link);
        return;
    }
    channel->credit[stream] += bytes;
    channel->granted[stream] += bytes;
    if (channel->ops != NULL && channel->ops->pump != NULL)
        channel->ops->pump(channel);
}

static void take_close(struct channel *channel)
{
    bool answer = !channel->sent_close;
    struct link *link = channel->link;
    uint32_t id = channel->id;
    channel_ended(channel);
    if (answer)
        link_send(link, id, FRAME_CLOSE, NULL, 0, NULL, 0);
}

void channel_frame(struct link *link, const struct frame *frame)
{
    if (frame->type == FRAME_OPEN) {
        channel_opened(link, frame);
        return;
    }
    struct channel *channel = find(link, frame->channel);
    if (channel == NULL) {
        bool known = frame->channel & 1 ? frame->channel <= link->host_top : frame->channel < link->guest_next;
        if (!known)
            link_violation(link);
        return; /* it was under way when the channel ended */
    }
    bool ours = !(frame->channel & 1);
    if (channel->sent_close && frame->type != FRAME_CLOSE && frame->type != FRAME_ERROR)
        return;
    switch (frame->type) {
    case FRAME_DATA: take_data(channel, frame); break;
    case FRAME_EOF: take_eof(channel, frame); break;
    case FRAME_CREDIT: take_credit(channel, frame); break;
    case FRAME_CLOSE: take_close(channel); break;
    case FRAME_ERROR: channel_ended(channel); break;
    case FRAME_REPLY:
        if (ours && channel->ops != NULL && channel->ops->reply != NULL)
            channel->ops->reply(channel);
        else
            link_violation(link);
        break;
    default: link_violation(link);
    }
}
