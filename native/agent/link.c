/* Links: accepting, reading frames, and one write a turn. A violation costs the link it came on. */
#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

struct link *links;
unsigned link_count;

static struct link *dirty_links;

static void mark_dirty(struct link *link)
{
    if (link->dirty)
        return;
    link->dirty = true;
    link->next_dirty = dirty_links;
    dirty_links = link;
}

static void end_channels(struct link *link)
{
    for (unsigned i = 0; i < CHANNEL_BUCKETS; i++)
        while (link->buckets[i] != NULL)
            channel_ended(link->buckets[i]);
}

/* One large buffer for each direction is kept for the next link that needs it, for as long as there is traffic. */
#define LARGE (LINK_DATA_HIGH + FRAME_MAX)
#define SPARE_NS 500000000u

static uint8_t *spare, *spare_input;

static void free_spare(struct timer *timer)
{
    (void)timer;
    free(spare);
    free(spare_input);
    spare = spare_input = NULL;
    madvise(scratch, sizeof scratch, MADV_DONTNEED); /* it was as large, then */
}

static struct timer spare_timer = {.expired = free_spare};

static void keep_spare(uint8_t **place, uint8_t *buffer)
{
    if (buffer == NULL || *place != NULL) {
        free(buffer);
        return;
    }
    *place = buffer;
    if (spare_timer.due == 0)
        timer_set(&spare_timer, SPARE_NS);
}

static uint8_t *take_spare(void)
{
    uint8_t *large = spare;
    spare = NULL;
    return large != NULL ? large : malloc(LARGE);
}

static void drop_output(struct link *link)
{
    if (link->output_capacity == LARGE)
        keep_spare(&spare, link->output);
    else
        free(link->output);
    link->output = NULL;
    link->output_start = link->output_size = link->output_capacity = 0;
}

/* A stream lives on: everything of the former host is dropped, and its bytes too until a HELLO. */
static void stream_reset(struct link *link)
{
    link->broken = true; /* nothing that ends now may be written */
    end_channels(link);
    link->broken = false;
    drop_output(link);
    link->greeted = false;
    link->host_top = 0;
    link->guest_next = 2;
}

/* May be called from anywhere, also by the owner of a channel: what it costs is paid later, in mend(). */
void link_violation(struct link *link)
{
    link->broken = true;
    mark_dirty(link);
}

static void mend(struct link *link)
{
    if (!link->broken || !link->stream)
        return;
    stream_reset(link);
    link->searching = true;
}

size_t link_room(const struct link *link)
{
    return link->broken || link->output_size >= LINK_DATA_HIGH ? 0 : LINK_DATA_HIGH - link->output_size;
}

static bool make_room(struct link *link, size_t need)
{
    if (link->output_capacity - link->output_start - link->output_size >= need)
        return true;
    if (link->output_start != 0) {
        memmove(link->output, link->output + link->output_start, link->output_size);
        link->output_start = 0;
        if (link->output_capacity - link->output_size >= need)
            return true;
    }
    size_t capacity = 1024, wanted = link->output_size + need;
    while (capacity < wanted)
        capacity *= 2;
    if (wanted > 8192 && wanted <= LARGE)
        capacity = LARGE;
    uint8_t *output = capacity == LARGE ? take_spare() : malloc(capacity);
    if (output == NULL)
        return false;
    if (link->output_size != 0)
        memcpy(output, link->output, link->output_size);
    free(link->output);
    link->output = output;
    link->output_capacity = capacity;
    return true;
}

void link_send(struct link *link, uint32_t channel, uint8_t type, const void *head, size_t head_size,
               const void *body, size_t body_size)
{
    if (link->broken)
        return;
    size_t size = head_size + body_size;
    if (size > FRAME_PAYLOAD_MAX || !make_room(link, FRAME_HEADER + size)) {
        link_violation(link); /* a link that misses a frame is of no use */
        return;
    }
    uint8_t *at = link->output + link->output_start + link->output_size;
    frame_put_header(at, (uint32_t)size, channel, type);
    if (head_size != 0)
        memcpy(at + FRAME_HEADER, head, head_size);
    if (body_size != 0)
        memcpy(at + FRAME_HEADER + head_size, body, body_size);
    link->output_size += FRAME_HEADER + size;
    mark_dirty(link);
}

static void answer_hello(struct link *link, const struct frame *frame)
{
    struct fields list = fields_of(frame->payload, frame->size);
    struct field field;
    const uint8_t *nonce = NULL;
    uint64_t version = 0;
    bool magic = false, right = fields_valid(frame->payload, frame->size);
    while (fields_next(&list, &field)) {
        if (field.tag == 1)
            magic = field.size == HELLO_MAGIC_SIZE && memcmp(field.data, HELLO_MAGIC, HELLO_MAGIC_SIZE) == 0;
        else if (field.tag == 2)
            right = right && field_number(&field, &version);
        else if (field.tag == 3)
            nonce = field.size == 16 ? field.data : NULL;
    }
    if (!right || !magic || nonce == NULL || version < 1) {
        link_violation(link);
        return;
    }
    uint8_t bytes[256];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_bytes(&out, 1, HELLO_MAGIC, HELLO_MAGIC_SIZE);
    write_number(&out, 2, 1);
    write_bytes(&out, 3, nonce, 16);
    write_number(&out, 5, epoch);
    write_bytes(&out, 6, instance, sizeof instance);
    write_bytes(&out, 7, AGENT_VERSION, strlen(AGENT_VERSION));
    write_number(&out, 8, CHANNELS_MAX);
    link->greeted = true;
    link_send(link, 0, FRAME_HELLO, out.data, out.size, NULL, 0);
}

static void take_frame(struct link *link, const struct frame *frame)
{
    if (frame->type == FRAME_HELLO) {
        if (link->greeted && !link->stream)
            link_violation(link);
        else {
            if (link->greeted)
                stream_reset(link);
            answer_hello(link, frame);
        }
    } else if (!link->greeted)
        link_violation(link);
    else if (frame->type == FRAME_PING)
        link_send(link, 0, FRAME_PONG, frame->payload, frame->size, NULL, 0);
    else if (frame->type != FRAME_PONG)
        channel_frame(link, frame);
}

/* Bytes before the next HELLO; all but a possible beginning of one if there is none. */
static size_t search_hello(const uint8_t *data, size_t size)
{
    size_t at = 0;
    while (size - at >= HELLO_PATTERN) {
        if (frame_is_hello(data + at, size - at))
            return at;
        at++;
    }
    return at;
}

static size_t parse(struct link *link, const uint8_t *data, size_t size)
{
    size_t at = 0;
    for (;;) {
        mend(link);
        if (link->broken || link->output_size >= LINK_PARSE_HIGH)
            break;
        if (link->searching) {
            at += search_hello(data + at, size - at);
            if (size - at < HELLO_PATTERN)
                break;
            link->searching = false;
        }
        if (size - at < FRAME_HEADER)
            break;
        struct frame frame;
        if (!frame_parse_header(data + at, &frame)) {
            link_violation(link);
            continue;
        }
        if (size - at - FRAME_HEADER < frame.size)
            break;
        frame.payload = data + at + FRAME_HEADER;
        take_frame(link, &frame);
        at += link->broken ? 1 : FRAME_HEADER + frame.size;
    }
    return at;
}

/* Keeps what could not be parsed yet. */
static void keep_input(struct link *link, const uint8_t *data, size_t size)
{
    if (size == 0) {
        keep_spare(&spare_input, link->input);
        link->input = NULL;
    } else if (link->input == NULL) {
        link->input = spare_input != NULL ? spare_input : malloc(FRAME_MAX);
        spare_input = NULL;
        if (link->input == NULL) {
            link_violation(link);
            size = 0;
        } else
            memcpy(link->input, data, size);
    } else if (data != link->input)
        memmove(link->input, data, size);
    link->input_size = size;
}

static bool streams_paused;

static void arm(struct link *link)
{
    if (link->broken || (link->stream && streams_paused))
        return;
    uint32_t in = link->output_size >= LINK_PARSE_HIGH ? 0 : EPOLLIN;
    uint32_t out = link->output_size != 0 ? EPOLLOUT : 0;
    if (link->out.fd != link->in.fd)
        loop_arm(&link->out, out);
    else
        in |= out;
    if (loop_arm(&link->in, in) < 0)
        link_violation(link);
}

static void stream_gone(struct link *link);

static void read_link(struct link *link)
{
    uint8_t *data = link->input != NULL ? link->input : scratch;
    size_t have = link->input_size;
    ssize_t got = read(link->in.fd, data + have, FRAME_MAX - have);
    if (got <= 0) {
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (link->stream)
            stream_gone(link);
        else {
            link->broken = true;
            mark_dirty(link);
        }
        return;
    }
    size_t size = have + (size_t)got, used = parse(link, data, size);
    if (!link->broken)
        keep_input(link, data + used, size - used);
}

static void write_link(struct link *link)
{
    while (link->output_size != 0) {
        ssize_t wrote = write(link->out.fd, link->output + link->output_start, link->output_size);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0 && errno == EAGAIN)
            return;
        if (wrote < 0) {
            if (link->stream)
                stream_reset(link);
            else
                link->broken = true;
            return;
        }
        link->output_start += (size_t)wrote;
        link->output_size -= (size_t)wrote;
    }
    link->output_start = 0;
    if (link->output_capacity > 8192)
        drop_output(link);
}

static void pump_channels(struct link *link)
{
    link->hungry = false;
    for (unsigned i = 0; i < CHANNEL_BUCKETS; i++)
        for (struct channel *channel = link->buckets[i], *next; channel != NULL; channel = next) {
            next = channel->next;
            if (channel->ops != NULL && channel->ops->pump != NULL)
                channel->ops->pump(channel);
        }
}

static void destroy(struct link *link)
{
    end_channels(link);
    free(link->input);
    drop_output(link);
    if (link->out.fd == link->in.fd)
        link->out.fd = -1;
    loop_close(&link->in);
    loop_close(&link->out);
    for (struct link **at = &links; *at != NULL; at = &(*at)->next)
        if (*at == link) {
            *at = link->next;
            break;
        }
    link_count--;
    free(link);
}

static void flush(struct link *link)
{
    mend(link);
    if (!link->broken)
        write_link(link);
    if (link->broken) {
        destroy(link);
        return;
    }
    if (link->output_size < LINK_PARSE_HIGH && link->input_size >= FRAME_HEADER) {
        size_t used = parse(link, link->input, link->input_size); /* what had to wait for room */
        if (!link->broken)
            keep_input(link, link->input + used, link->input_size - used);
    }
    if (link->hungry && link->output_size < LINK_DATA_HIGH / 2)
        pump_channels(link);
    arm(link);
}

void links_flush(void)
{
    for (int round = 0; round < 4 && dirty_links != NULL; round++) {
        struct link *list = dirty_links;
        dirty_links = NULL;
        while (list != NULL) {
            struct link *link = list;
            list = link->next_dirty;
            link->dirty = false;
            flush(link);
        }
    }
    for (struct link *link = dirty_links; link != NULL; link = link->next_dirty)
        if (link->broken || !(link->in.armed & EPOLLOUT || link->out.armed & EPOLLOUT))
            loop_again();
}

static struct link *link_of_in(struct source *source)
{
    return (struct link *)((char *)source - offsetof(struct link, in));
}

static void link_ready(struct source *source, uint32_t events)
{
    struct link *link = link_of_in(source);
    if (link->broken)
        return;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        if (events & EPOLLIN || link->in.armed & EPOLLIN)
            read_link(link);
        else { /* paused, and the host is gone */
            link->broken = true;
        }
    }
    mark_dirty(link);
}

static void out_ready(struct source *source, uint32_t events)
{
    (void)events;
    mark_dirty((struct link *)((char *)source - offsetof(struct link, out)));
}

static struct link *prepared;

/* Before a socket is taken: without memory it can wait where it is, later it could only be closed. */
bool link_prepare(void)
{
    if (prepared == NULL)
        prepared = calloc(1, sizeof *prepared);
    return prepared != NULL;
}

void link_adopt(int in, int out, bool stream)
{
    struct link *link = link_prepare() ? prepared : NULL;
    prepared = NULL;
    if (link == NULL) {
        close(in);
        if (out != in)
            close(out);
        return;
    }
    link->in = (struct source){.fd = in, .ready = link_ready};
    link->out = (struct source){.fd = out, .ready = out_ready};
    link->stream = stream;
    link->guest_next = 2;
    link->next = links;
    links = link;
    link_count++;
    arm(link);
    if (!stream)
        link_ready(&link->in, EPOLLIN); /* the HELLO has often come already */
}

void links_close_all(void)
{
    for (struct link *link = links, *next; link != NULL; link = next) {
        next = link->next;
        link_violation(link);
    }
}

unsigned links_channels(void)
{
    unsigned sum = 0;
    for (const struct link *link = links; link != NULL; link = link->next)
        sum += link->channels;
    return sum;
}

/* The far end of a stream is away (nothing attached to the serial port): look again from time to time. */
static void stream_again(struct timer *timer)
{
    (void)timer;
    for (struct link *link = links; link != NULL; link = link->next)
        if (link->stream)
            arm(link);
}

static struct timer stream_timer = {.expired = stream_again};

static void stream_gone(struct link *link)
{
    stream_reset(link);
    link->searching = true;
    free(link->input);
    link->input = NULL;
    link->input_size = 0;
    loop_arm(&link->in, 0);
    if (link->out.fd != link->in.fd)
        loop_arm(&link->out, 0);
    timer_set(&stream_timer, 200000000u);
}

/* During a sleep nothing is read from a stream: its next HELLO belongs to the next epoch. */
void stream_pause(bool pause)
{
    streams_paused = pause;
    for (struct link *link = links; link != NULL; link = link->next) {
        if (!link->stream)
            continue;
        if (pause) {
            loop_arm(&link->in, 0);
            if (link->out.fd != link->in.fd)
                loop_arm(&link->out, 0);
        } else
            arm(link);
    }
}

void stream_start(void)
{
    if (config.stream_in < 0)
        return;
    link_adopt(config.stream_in, config.stream_out, true);
    if (links != NULL)
        links->searching = true;
}
