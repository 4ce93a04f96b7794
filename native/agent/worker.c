/* The agent's side of workers: forks them, carries their packets to channels, and believes none of them. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <signal.h>

#define SHARED_SIZE ((size_t)WORKER_PARTS * WORKER_PART)
#define ABANDONED_NS 5000000000u /* a worker whose channel is gone may clean up for so long */

struct worker {
    struct child child;
    struct worker *next;
    struct channel *channel; /* NULL: gone */
    struct source source;
    struct queue queue;
    struct timer timer;
    uint8_t *fields; /* waits for its turn: not forked yet */
    size_t size;
    uint16_t operation;
    bool running, replied;
    uint8_t *held; /* DATA that waits for credit or room: kept once it was needed */
    size_t held_size, held_done; /* 0: none waits */
    uint8_t *shared; /* parts that the worker fills in turn, or NULL. It may write there at any time. */
    unsigned part;   /* the one that is filled next, or that waits */
    bool waits;      /* it's the part that waits, not `held` */
    uint64_t sent;
    bool missed; /* events were left out */
};

static struct worker *workers; /* oldest first */
static unsigned running, watching;

/* How an operation ends: by its REPLY, by EOF after REPLY, or by the host. */
static bool reply_ends(uint16_t operation)
{
    return (operation >= 19 && operation <= 22) || operation == 48 || operation == 49;
}

static bool sends_data(uint16_t operation) { return operation == 16 || operation == 18 || operation == 25; }

static bool takes_data(uint16_t operation) { return operation == 17 || operation == 24; }

static bool is_watch(const struct worker *worker) { return worker->operation == 23; }

static void worker_free(struct worker *worker)
{
    for (struct worker **at = &workers; *at != NULL; at = &(*at)->next)
        if (*at == worker) {
            *at = worker->next;
            break;
        }
    timer_clear(&worker->timer);
    loop_close(&worker->source);
    queue_clear(&worker->queue);
    free(worker->fields);
    if (worker->held != NULL)
        budget_give(WORKER_PACKET);
    free(worker->held);
    if (worker->shared != NULL) {
        budget_give(SHARED_SIZE);
        munmap(worker->shared, SHARED_SIZE);
    }
    free(worker);
}

/* Its socket is closed and it was reaped (or never ran). */
static void worker_over(struct worker *worker)
{
    if (worker->source.fd < 0 && !worker->running)
        worker_free(worker);
}

static void kill_abandoned(struct timer *timer)
{
    struct worker *worker = (struct worker *)((char *)timer - offsetof(struct worker, timer));
    if (worker->running)
        kill(worker->child.pid, SIGKILL);
}

/* The socket is closed: the worker finds out at its next packet, and gets some time for it. */
static void worker_leave(struct worker *worker)
{
    loop_close(&worker->source);
    queue_clear(&worker->queue);
    if (worker->running)
        timer_set(&worker->timer, ABANDONED_NS);
    worker_over(worker);
}

static void detach(struct worker *worker)
{
    struct channel *channel = worker->channel;
    queue_forget(&worker->queue, channel);
    channel->ops = NULL;
    channel->owner = NULL;
    worker->channel = NULL;
}

static void worker_fail(struct worker *worker, int error, const char *what)
{
    struct channel *channel = worker->channel;
    if (channel != NULL) {
        detach(worker);
        channel_error(channel, error, what);
    }
    worker_leave(worker);
}

static void worker_close(struct worker *worker)
{
    struct channel *channel = worker->channel;
    detach(worker);
    channel_close(channel);
    worker_leave(worker);
}

static void take_error(struct worker *worker, const uint8_t *data, size_t size)
{
    char what[64];
    size_t length = 0;
    int error = size >= 4 ? (int)(get_u32(data) & 0xfff) : EIO;
    for (size_t i = 4; i < size && length < sizeof what - 1; i++)
        what[length++] = data[i] >= 32 && data[i] < 127 ? (char)data[i] : '?';
    what[length] = 0;
    worker_fail(worker, error != 0 ? error : EIO, what);
}

static void take_reply(struct worker *worker, const uint8_t *data, size_t size)
{
    struct writer out = {(uint8_t *)data, size, size, false};
    struct channel *channel = worker->channel;
    if (worker->replied || size > FRAME_PAYLOAD_MAX || !fields_valid(data, size)) {
        worker_fail(worker, EIO, "worker");
        return;
    }
    worker->replied = true;
    if (reply_ends(worker->operation)) {
        detach(worker);
        control_bound(worker->operation, worker->fields, worker->size);
        channel_reply_end(channel, &out);
        worker_leave(worker);
        return;
    }
    channel_reply(channel, &out);
    if (takes_data(worker->operation))
        worker_close(worker);
}

static void take_event(struct worker *worker, const uint8_t *data, size_t size)
{
    static const struct writer nothing;
    if (!is_watch(worker) || !worker->replied || size < 2 || size > FRAME_PAYLOAD_MAX ||
        !fields_valid(data + 2, size - 2)) {
        worker_fail(worker, EIO, "worker");
        return;
    }
    if (link_room(worker->channel->link) <= size + FRAME_HEADER) {
        worker->missed = worker->channel->link->hungry = true;
        return;
    }
    if (worker->missed)
        channel_event(worker->channel, 3, &nothing);
    worker->missed = false;
    struct writer out = {(uint8_t *)data + 2, size - 2, size - 2, false};
    channel_event(worker->channel, get_u16(data), &out);
}

/* Sends what is allowed now; true when nothing is left. */
static bool send_data(struct worker *worker, const uint8_t *data, size_t size, size_t *done)
{
    while (*done < size) {
        size_t room = channel_room(worker->channel, 1), piece = size - *done;
        if (room == 0)
            return false;
        if (piece > room)
            piece = room;
        channel_data(worker->channel, 1, worker->sent, data + *done, piece);
        worker->sent += piece;
        *done += piece;
    }
    return true;
}

static uint32_t interest(const struct worker *worker)
{
    return (worker->held_size == 0 ? EPOLLIN : 0u) | (worker->queue.head != NULL ? EPOLLOUT : 0u);
}

/* True: the next packet may follow at once. */
static bool take_data(struct worker *worker, const uint8_t *data, size_t size)
{
    size_t done = 0;
    if (!sends_data(worker->operation) || !worker->replied || size == 0) {
        worker_fail(worker, EIO, "worker");
        return false;
    }
    if (send_data(worker, data, size, &done))
        return link_room(worker->channel->link) > WORKER_PACKET;
    if (worker->held == NULL && budget_take(WORKER_PACKET)) {
        worker->held = malloc(WORKER_PACKET);
        if (worker->held == NULL)
            budget_give(WORKER_PACKET);
    }
    if (worker->held == NULL) {
        worker_fail(worker, ENOMEM, "worker");
        return false;
    }
    memcpy(worker->held, data, size);
    worker->held_size = size;
    worker->held_done = done;
    loop_arm(&worker->source, interest(worker));
    return false;
}

/* The part was sent: the worker may fill it again. One that keeps the rules has room for so few words. */
static bool part_free(struct worker *worker)
{
    static const uint8_t word = FRAME_CREDIT;
    worker->part = (worker->part + 1) % WORKER_PARTS;
    if (send(worker->source.fd, &word, 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EPIPE && errno != ECONNRESET) {
        worker_fail(worker, EIO, "worker");
        return false;
    }
    return true;
}

/* As take_data(), for what lies in the next part. */
static bool take_part(struct worker *worker, const uint8_t *told, size_t told_size)
{
    size_t size = told_size == 4 ? get_u32(told) : 0, done = 0;
    if (worker->shared == NULL || !worker->replied || size == 0 || size > WORKER_PART) {
        worker_fail(worker, EIO, "worker");
        return false;
    }
    if (send_data(worker, worker->shared + (size_t)worker->part * WORKER_PART, size, &done))
        return part_free(worker) && link_room(worker->channel->link) > WORKER_PART;
    worker->waits = true;
    worker->held_size = size;
    worker->held_done = done;
    loop_arm(&worker->source, interest(worker));
    return false;
}

static bool take_packet(struct worker *worker, const uint8_t *packet, size_t size)
{
    switch (packet[0]) {
    case FRAME_REPLY: take_reply(worker, packet + 1, size - 1); break;
    case FRAME_ERROR: take_error(worker, packet + 1, size - 1); break;
    case FRAME_EVENT: take_event(worker, packet + 1, size - 1); break;
    case FRAME_DATA: return take_data(worker, packet + 1, size - 1);
    case WORKER_SHARED: return take_part(worker, packet + 1, size - 1);
    case FRAME_EOF:
        if (!sends_data(worker->operation) || !worker->replied) {
            worker_fail(worker, EIO, "worker");
            break;
        }
        channel_eof(worker->channel, 1, worker->sent);
        worker_close(worker);
        break;
    default: worker_fail(worker, EIO, "worker");
    }
    return false;
}

/* Writes what the host sent. */
static void worker_write(struct worker *worker)
{
    if (queue_write(&worker->queue, worker->source.fd, true) < 0)
        queue_clear(&worker->queue); /* it has ended; what it said last is still to be read */
    loop_arm(&worker->source, interest(worker));
}

static void worker_ready(struct source *source, uint32_t events)
{
    struct worker *worker = (struct worker *)((char *)source - offsetof(struct worker, source));
    if (events & EPOLLOUT)
        worker_write(worker);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)) || worker->held_size != 0)
        return;
    ssize_t got;
    do {
        got = recv(source->fd, scratch, WORKER_PACKET, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET))
            return; /* reset: it ended without taking all we sent, which hides its last words only once */
        if (got <= 0) {
            worker_fail(worker, EIO, "worker");
            return;
        }
    } while (take_packet(worker, scratch, (size_t)got));
}

static void worker_ended(struct child *child, int status, const struct rusage *usage)
{
    (void)status;
    (void)usage;
    struct worker *worker = (struct worker *)((char *)child - offsetof(struct worker, child));
    worker->running = false;
    timer_clear(&worker->timer);
    running--;
    if (is_watch(worker))
        watching--;
    worker_over(worker); /* else its last packets are still in the socket */
}

/* --- the channel's calls --- */

/* Nothing waits before it: straight out of the link's buffer. */
static bool pass_on(const struct worker *worker, const uint8_t *data, size_t size)
{
    uint8_t type = FRAME_DATA;
    struct iovec parts[2] = {{&type, 1}, {(void *)data, size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    return worker->source.fd >= 0 && worker->queue.head == NULL &&
           sendmsg(worker->source.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

static void on_data(struct channel *channel, const uint8_t *data, size_t size)
{
    struct worker *worker = channel->owner;
    if (takes_data(worker->operation) && worker->running && channel->host_credit < HOST_WINDOW / 2)
        channel_widen(channel, UPLOAD_WINDOW); /* there is more to come */
    if (!takes_data(worker->operation) || pass_on(worker, data, size)) {
        channel_consumed(channel, size);
        return;
    }
    if (!queue_packet(&worker->queue, channel, FRAME_DATA, data, size)) {
        worker_fail(worker, ENOMEM, "worker");
        return;
    }
    if (worker->source.fd >= 0)
        worker_write(worker);
}

static void on_eof(struct channel *channel)
{
    struct worker *worker = channel->owner;
    if (!queue_packet(&worker->queue, NULL, FRAME_EOF, NULL, 0)) {
        worker_fail(worker, ENOMEM, "worker");
        return;
    }
    if (worker->source.fd >= 0)
        worker_write(worker);
}

static void on_pump(struct channel *channel)
{
    struct worker *worker = channel->owner;
    if (worker->missed && link_room(channel->link) > 1024) {
        static const struct writer nothing;
        worker->missed = false;
        channel_event(channel, 3, &nothing);
    }
    const uint8_t *data = worker->waits ? worker->shared + (size_t)worker->part * WORKER_PART : worker->held;
    if (worker->held_size == 0 || !send_data(worker, data, worker->held_size, &worker->held_done))
        return;
    worker->held_size = 0;
    if (worker->waits && !part_free(worker))
        return;
    worker->waits = false;
    loop_arm(&worker->source, interest(worker));
}

static void on_ended(struct channel *channel)
{
    struct worker *worker = channel->owner;
    detach(worker);
    worker_leave(worker);
}

static const struct channel_ops worker_ops = {.data = on_data, .eof = on_eof, .pump = on_pump, .ended = on_ended};

/* --- starting --- */

/* Without it packets carry everything, only slower. */
static void share(struct worker *worker)
{
    if (worker->shared != NULL || !budget_take(SHARED_SIZE))
        return;
    void *made = mmap(NULL, SHARED_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED)
        budget_give(SHARED_SIZE);
    else
        worker->shared = made;
}

static bool start(struct worker *worker)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        return false;
    if (worker->operation == 16 || worker->operation == 25)
        share(worker);
    pid_t pid = fork();
    if (pid == 0)
        work_start(ends[1], worker->operation, worker->fields, worker->size, worker->shared);
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return false;
    }
    worker->source.fd = ends[0];
    make_non_blocking(ends[0]);
    worker->running = true;
    running++;
    if (is_watch(worker))
        watching++;
    child_watch(&worker->child, pid);
    if (worker->operation != 48) { /* bind still needs them */
        free(worker->fields);
        worker->fields = NULL;
    }
    if (loop_arm(&worker->source, interest(worker)) == 0)
        worker_write(worker);
    return true;
}

void worker_operation(struct channel *channel, const uint8_t *fields, size_t size)
{
    struct worker *worker = calloc(1, sizeof *worker);
    if (worker != NULL)
        worker->fields = malloc(size + 1);
    if (worker == NULL || worker->fields == NULL) {
        free(worker);
        channel_error(channel, ENOMEM, "worker");
        return;
    }
    memcpy(worker->fields, fields, size);
    worker->size = size;
    worker->operation = channel->operation;
    worker->channel = channel;
    worker->source = (struct source){.fd = -1, .ready = worker_ready};
    worker->child.ended = worker_ended;
    worker->timer.expired = kill_abandoned;
    channel->ops = &worker_ops;
    channel->owner = worker;
    struct fields list = fields_of(fields, size);
    struct field field;
    while (fields_next(&list, &field)) {
        uint64_t window;
        if (field.tag != 8 || channel->operation != 16)
            continue;
        if (!field_number(&field, &window) || window > UINT32_MAX) {
            detach(worker);
            worker_free(worker);
            channel_error(channel, EINVAL, "window");
            return;
        }
        channel_windows(channel, window);
    }
    struct worker **at = &workers;
    while (*at != NULL)
        at = &(*at)->next;
    *at = worker;
    if (is_watch(worker) && watching >= WATCHERS_MAX)
        worker_fail(worker, EMFILE, "watches");
    else if (running - watching < WORKERS_MAX && !start(worker) && running == watching)
        worker_fail(worker, errno, "worker"); /* nobody is there to make room */
}

/* Those that wait get the places of those that ended. */
void workers_turn(void)
{
    for (struct worker *worker = workers, *next; worker != NULL && running - watching < WORKERS_MAX; worker = next) {
        next = worker->next;
        if (worker->running || worker->source.fd >= 0 || worker->channel == NULL)
            continue;
        if (!start(worker)) {
            if (running == watching)
                worker_fail(worker, errno, "worker");
            return;
        }
    }
}
