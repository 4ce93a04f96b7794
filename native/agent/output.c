/* Output of commands: from pipes into rings, from rings to the channels that read them; and their stdin. */
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define READ_MAX 65536

static bool anyone_starved;

/* The oldest offset that must not be lost: what the slowest reader may still need, or, without readers, everything
 * (nothing if the command is to run on). Bytes count as taken when the host gave credit for them, so that a host
 * killed after a read can resume; where the ring is smaller than the window that would stall, so sent counts. */
static uint64_t keep_from(const struct process *process, unsigned index)
{
    const struct ring *ring = &process->out[index].ring;
    uint64_t keep = UINT64_MAX;
    bool any = false;
    for (const struct reader *reader = process->readers; reader != NULL; reader = reader->next) {
        if (reader->silent)
            continue;
        uint64_t taken = reader->at[index], granted = reader->channel->granted[index + 1];
        if (ring->limit >= reader->window && granted < taken - reader->from[index])
            taken = reader->from[index] + granted;
        if (taken < keep)
            keep = taken;
        any = true;
    }
    if (!any)
        return process->drop ? ring->end : ring->start;
    return keep;
}

/* A command that ends closes its pipes a moment before its parent hears of it. EOF waits so long for the exit, that
 * both go out in one write: a host that runs many short commands wakes up once less for each. */
#define LINGER_NS 1000000u

static void linger_over(struct timer *timer)
{
    (void)timer;
    for (struct process *process = processes; process != NULL; process = process->next)
        if (process->lingering) {
            process->lingering = false;
            readers_pump(process);
        }
}

static struct timer linger_timer = {.expired = linger_over};

/* Nobody is left who could read stdin (or hold the terminal): its descriptor is not kept for the record's life. */
void input_settle(struct process *process)
{
    bool over = process->state == PROCESS_EXITED || process->state == PROCESS_KILLED;
    if (!over || process->out[0].source.fd >= 0 || process->out[1].source.fd >= 0)
        return;
    loop_close(&process->in);
    queue_clear(&process->queue);
}

static void output_ended(struct output *output)
{
    if (output->process->state == PROCESS_RUNNING && output->source.fd >= 0) {
        output->process->lingering = true;
        if (linger_timer.due == 0)
            timer_set(&linger_timer, LINGER_NS);
    }
    loop_close(&output->source);
    output->starved = false;
    if (output->ring.start == output->ring.end)
        ring_forget(&output->ring);
    input_settle(output->process);
}

/* Reads once. False: nothing more to read now. */
static bool output_read(struct output *output)
{
    struct process *process = output->process;
    unsigned index = output == &process->out[0] ? 0 : 1;
    uint64_t keep = keep_from(process, index);
    size_t space = ring_space(&output->ring, keep);
    if (space == 0) {
        loop_arm(&output->source, 0); /* until a reader has taken bytes */
        return false;
    }
    int waiting = 0;
    if (ioctl(output->source.fd, FIONREAD, &waiting) < 0 || waiting <= 0)
        waiting = process->pty ? 4096 : 256; /* its end, or a terminal that knows better when it is read */
    size_t want = (size_t)waiting < space ? (size_t)waiting : space;
    want = ring_reserve(&output->ring, want < READ_MAX ? want : READ_MAX, keep);
    if (want == 0) {
        output->starved = anyone_starved = true;
        loop_arm(&output->source, 0);
        return false;
    }
    ssize_t got = ring_read_from(&output->ring, output->source.fd, want);
    if (got > 0)
        return true;
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    output_ended(output); /* EIO is the end of a terminal */
    return false;
}

static void output_ready(struct source *source, uint32_t events)
{
    (void)events;
    struct output *output = (struct output *)((char *)source - offsetof(struct output, source));
    output_read(output);
    readers_pump(output->process);
}

void output_resume(struct process *process)
{
    for (unsigned i = 0; i < 2; i++) {
        struct output *output = &process->out[i];
        if (output->source.fd < 0 || output->source.armed || output->starved)
            continue;
        if (ring_space(&output->ring, keep_from(process, i)) != 0)
            loop_arm(&output->source, EPOLLIN);
    }
}

static void starved_again(struct timer *timer)
{
    (void)timer;
    for (struct process *process = processes; process != NULL; process = process->next) {
        process->out[0].starved = process->out[1].starved = false;
        output_resume(process);
    }
}

static struct timer starved_timer = {.expired = starved_again};

void processes_resume(void)
{
    if (!anyone_starved)
        return;
    anyone_starved = false;
    timer_set(&starved_timer, 50000000u);
}

static void input_ready(struct source *source, uint32_t events)
{
    (void)events;
    input_write((struct process *)((char *)source - offsetof(struct process, in)));
}

/* False: stdin is gone. */
bool input_write(struct process *process)
{
    if (process->in.fd < 0) {
        queue_clear(&process->queue);
        return false;
    }
    int left = queue_write(&process->queue, process->in.fd, false);
    if (left > 0)
        return loop_arm(&process->in, EPOLLOUT) == 0;
    if (left < 0 || (process->in_eof && !process->pty)) {
        loop_close(&process->in);
        queue_clear(&process->queue);
        return left == 0;
    }
    loop_arm(&process->in, 0);
    return true;
}

void output_start(struct process *process, int out, int err, int in, size_t limit)
{
    int fds[2] = {out, err};
    for (unsigned i = 0; i < 2; i++) {
        process->out[i].source = (struct source){.fd = fds[i], .ready = output_ready};
        process->out[i].process = process;
        process->out[i].ring.limit = limit;
        if (fds[i] >= 0)
            loop_arm(&process->out[i].source, EPOLLIN);
    }
    process->in = (struct source){.fd = in, .ready = input_ready};
}

void output_drain(struct process *process)
{
    for (unsigned i = 0; i < 2; i++) {
        struct output *output = &process->out[i];
        int waiting = 0;
        for (int round = 0; round < 16 && output->source.fd >= 0 && output_read(output); round++) {
        }
        if (output->source.fd < 0 || ioctl(output->source.fd, FIONREAD, &waiting) < 0 || waiting < 0)
            waiting = 0;
        process->end[i] = output->ring.end + (unsigned)waiting;
    }
}

void output_close(struct process *process)
{
    for (unsigned i = 0; i < 2; i++) {
        output_ended(&process->out[i]);
        ring_forget(&process->out[i].ring);
    }
    loop_close(&process->in);
    queue_clear(&process->queue);
}

/* --- readers --- */

static void reader_free(struct reader *reader)
{
    struct process *process = reader->process;
    queue_forget(&process->queue, reader->channel);
    for (struct reader **at = &process->readers; *at != NULL; at = &(*at)->next)
        if (*at == reader) {
            *at = reader->next;
            break;
        }
    free(reader);
}

static void reader_done(struct reader *reader)
{
    struct channel *channel = reader->channel;
    struct process *process = reader->process;
    reader_free(reader);
    channel_close(channel);
    output_resume(process);
}

static void send_exit(struct reader *reader)
{
    const struct process *process = reader->process;
    uint8_t bytes[128];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, process->state == PROCESS_KILLED ? 2 : 1, (uint64_t)process->code);
    write_number(&out, 3, process->end[0]);
    write_number(&out, 4, process->end[1]);
    write_number(&out, 5, process->user_us);
    write_number(&out, 6, process->system_us);
    write_number(&out, 7, process->resident);
    channel_event(reader->channel, 1, &out);
    reader->told = true;
}

static void pump_stream(struct reader *reader, unsigned index)
{
    const struct output *output = &reader->process->out[index];
    const struct ring *ring = &output->ring;
    if (reader->at[index] < ring->start)
        reader->at[index] = ring->start; /* dropped while memory was short */
    while (reader->at[index] < ring->end) {
        size_t room = channel_room(reader->channel, index + 1);
        const uint8_t *from;
        size_t size = ring_peek(ring, reader->at[index], &from);
        if (size > room)
            size = room;
        if (size == 0)
            return;
        channel_data(reader->channel, index + 1, reader->at[index], from, size);
        reader->at[index] += size;
    }
    bool wait = reader->process->lingering && reader->process->state == PROCESS_RUNNING;
    if (output->source.fd < 0 && !reader->ended[index] && !wait) {
        channel_eof(reader->channel, index + 1, ring->end);
        reader->ended[index] = true;
    }
}

/* Sends what can be sent; ends the channel (and the reader) when all was. */
void reader_pump(struct reader *reader)
{
    const struct process *process = reader->process;
    if (process->state == PROCESS_STARTING)
        return;
    for (unsigned i = 0; i < 2 && !reader->silent; i++)
        pump_stream(reader, i);
    bool over = process->state != PROCESS_RUNNING;
    if (over && !reader->told)
        send_exit(reader);
    if (over && reader->ended[0] && reader->ended[1])
        reader_done(reader);
}

void readers_pump(struct process *process)
{
    for (struct reader *reader = process->readers, *next; reader != NULL; reader = next) {
        next = reader->next;
        reader_pump(reader);
    }
    output_resume(process);
}

void readers_close(struct process *process)
{
    while (process->readers != NULL)
        reader_done(process->readers);
}

void reader_muted(const struct reader *reader)
{
    struct writer nothing = writer_of(NULL, 0);
    channel_event(reader->channel, 4, &nothing);
}

void readers_mute(struct process *process)
{
    for (struct reader *reader = process->readers; reader != NULL; reader = reader->next) {
        if (reader->mute)
            continue;
        reader->mute = true;
        if (reader->channel != process->starter) /* no event before its REPLY */
            reader_muted(reader);
    }
}

static void on_data(struct channel *channel, const uint8_t *data, size_t size)
{
    const struct reader *reader = channel->owner;
    struct process *process = reader->process;
    if (reader->mute) {
        channel_consumed(channel, size);
        return;
    }
    process->in_taken += size;
    if (process->in.fd < 0 || process->in_eof) {
        channel_consumed(channel, size); /* nobody reads it */
        return;
    }
    if (process->queue.head == NULL) { /* the usual case needs no copy */
        ssize_t wrote = write(process->in.fd, data, size);
        if (wrote > 0) {
            channel_consumed(channel, (size_t)wrote);
            data += wrote;
            size -= (size_t)wrote;
        } else if (wrote < 0 && errno != EAGAIN && errno != EINTR) {
            loop_close(&process->in);
            channel_consumed(channel, size);
            return;
        }
    }
    if (size == 0)
        return;
    if (!queue_add(&process->queue, channel, data, size)) {
        link_violation(channel->link); /* bytes of a stream can't be left out */
        return;
    }
    input_write(process);
}

static void on_eof(struct channel *channel)
{
    const struct reader *reader = channel->owner;
    struct process *process = reader->process;
    if (reader->mute || process->in.fd < 0 || process->in_eof)
        return;
    if (process->pty) {
        uint8_t end = 4; /* what a user would type */
        if (queue_add(&process->queue, NULL, &end, 1))
            input_write(process);
        return;
    }
    process->in_eof = true;
    input_write(process);
}

static void on_pump(struct channel *channel)
{
    struct reader *reader = channel->owner;
    struct process *process = reader->process;
    reader_pump(reader);
    output_resume(process);
}

static void on_ended(struct channel *channel)
{
    struct reader *reader = channel->owner;
    struct process *process = reader->process;
    if (process->starter == channel)
        process->starter = NULL;
    reader_free(reader);
    output_resume(process);
}

static const struct channel_ops reader_ops = {.data = on_data, .eof = on_eof, .pump = on_pump, .ended = on_ended};

bool reader_add(struct process *process, struct channel *channel, const uint64_t from[2], uint64_t window, bool silent)
{
    struct reader *reader = calloc(1, sizeof *reader);
    if (reader == NULL)
        return false;
    reader->process = process;
    reader->channel = channel;
    reader->window = window;
    reader->silent = reader->ended[0] = reader->ended[1] = silent;
    for (unsigned i = 0; i < 2; i++)
        reader->at[i] = reader->from[i] = from[i];
    reader->next = process->readers;
    process->readers = reader;
    channel->ops = &reader_ops;
    channel->owner = reader;
    channel_windows(channel, window);
    return true;
}
