/* Identity and life of the whole sandbox: bind, quiesce and wake, shutdown. */
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define LAST_WORDS_NS 1000000000u /* for a host to read the last answers */
#define TERMINATE_GRACE_MS 5000u

uint64_t epoch = 1;
uint8_t instance[16];
uint64_t agent_started;

static enum { AWAKE, SYNCING, FALLING_ASLEEP, ASLEEP } sleeping;
static enum { NO_SHUTDOWN, ASKED, KILLED } leaving;
static bool farewell; /* the last events are going out */
static bool woken;    /* a wake that came while it fell asleep */
static struct channel *quiescing; /* its answer is due */
static struct child syncer;
static struct source wake = {.fd = -1};

static void tick(struct timer *timer) { (void)timer; } /* the turn that follows looks at the state */

static struct timer limit = {.expired = tick}, grace = {.expired = tick};

static void draw_instance(void)
{
    struct timespec now;
    uint64_t mix;
    memset(instance, 0, sizeof instance);
    if (getrandom(instance, sizeof instance, 0) < 0) {
    }
    /* copies of one snapshot may draw the same bytes, but not at the same time */
    clock_gettime(CLOCK_REALTIME, &now);
    memcpy(&mix, instance, sizeof mix);
    mix ^= (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    memcpy(instance, &mix, sizeof mix);
}

static void wake_ready(struct source *source, uint32_t events)
{
    (void)events;
    loop_close(source);
    control_wake();
}

void control_start(void)
{
    draw_instance();
    agent_started = now_ns();
    wake = (struct source){.fd = config.wake_fd, .ready = wake_ready};
}

/* --- bind --- */

static bool env_valid(const struct field *field)
{
    const uint8_t *equals = memchr(field->data, '=', field->size);
    return equals != NULL && equals != field->data && memchr(field->data, 0, field->size) == NULL;
}

static int bind_environment(const uint8_t *fields, size_t size)
{
    struct fields list = fields_of(fields, size);
    struct field field;
    size_t count = 0, at = 0;
    while (fields_next(&list, &field))
        count += field.tag == 1;
    if (count == 0)
        return 0;
    char **entries = calloc(count, sizeof *entries);
    if (entries == NULL)
        return ENOMEM;
    list = fields_of(fields, size);
    while (fields_next(&list, &field))
        if (field.tag == 1 && (entries[at] = field_text(&field, false)) != NULL)
            at++;
    if (at != count) {
        while (at != 0)
            free(entries[--at]);
        free(entries);
        return ENOMEM;
    }
    environment_bind(entries, count);
    return 0;
}

/* The environment changes last, when everything else could be set. */
void control_bound(uint16_t operation, const uint8_t *fields, size_t size)
{
    if (operation == 48)
        bind_environment(fields, size);
}

void control_bind(struct channel *channel, const uint8_t *fields, size_t size)
{
    struct fields list = fields_of(fields, size);
    struct field field, hostname = {0};
    const char *wrong = NULL;
    bool work = false;
    size_t names = 0;
    uint64_t offset = 0;
    while (fields_next(&list, &field)) {
        if (field.tag == 1 && (!env_valid(&field) || ++names > 2048))
            wrong = "env";
        else if (field.tag == 2 || field.tag == 4)
            work = true;
        else if (field.tag == 3)
            hostname = field;
        else if (field.tag == 5 && !field_number(&field, &offset))
            wrong = "time";
    }
    int error = wrong != NULL ? EINVAL : 0;
    if (error == 0 && offset != 0)
        error = EPERM, wrong = "time"; /* a clock's offset can only be set before the first process */
    if (error == 0 && hostname.data != NULL && sethostname((const char *)hostname.data, hostname.size) < 0)
        error = errno, wrong = "hostname";
    if (error == 0 && work) {
        worker_operation(channel, fields, size);
        return;
    }
    if (error == 0 && (error = bind_environment(fields, size)) != 0)
        wrong = "env";
    if (error != 0)
        channel_error(channel, error, wrong);
    else
        channel_reply_end(channel, NULL);
}

static bool milliseconds(const uint8_t *fields, size_t size, uint64_t *value)
{
    struct fields list = fields_of(fields, size);
    struct field field;
    while (fields_next(&list, &field))
        if (field.tag == 1 && (!field_number(&field, value) || *value > 86400000u))
            return false;
    return true;
}

/* --- quiesce and wake --- */

static void quiesce_ended(struct channel *channel)
{
    (void)channel;
    quiescing = NULL;
    sleeping = AWAKE;
    timer_clear(&limit);
}

static const struct channel_ops quiesce_ops = {.ended = quiesce_ended};

static void synced(struct child *child, int status, const struct rusage *usage)
{
    (void)status;
    (void)usage;
    child->pid = 0;
    if (sleeping != SYNCING || quiescing == NULL)
        return;
    uint8_t bytes[16];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, epoch);
    struct channel *channel = quiescing;
    quiescing = NULL;
    channel->ops = NULL;
    channel_reply_end(channel, &out);
    sleeping = FALLING_ASLEEP;
    woken = false;
    timer_set(&limit, LAST_WORDS_NS);
    loop_again();
}

void control_quiesce(struct channel *channel, const uint8_t *fields, size_t size)
{
    uint64_t deadline = 5000;
    if (!milliseconds(fields, size, &deadline)) {
        channel_error(channel, EINVAL, "deadline");
        return;
    }
    if (sleeping != AWAKE || leaving != NO_SHUTDOWN || syncer.pid != 0) {
        channel_error(channel, EBUSY, "quiesce");
        return;
    }
    pid_t pid = fork();
    if (pid == 0) {
        sync();
        _exit(0);
    }
    if (pid < 0) {
        channel_error(channel, errno, "sync");
        return;
    }
    syncer.ended = synced;
    child_watch(&syncer, pid);
    channel->ops = &quiesce_ops;
    quiescing = channel;
    sleeping = SYNCING;
    timer_set(&limit, deadline * 1000000u + 1);
}

static bool output_left(void)
{
    for (const struct link *link = links; link != NULL; link = link->next)
        if (link->output_size != 0)
            return true;
    return single_busy();
}

static void sleep_turn(void)
{
    if (sleeping == SYNCING && limit.due == 0 && quiescing != NULL) {
        struct channel *channel = quiescing;
        quiescing = NULL;
        sleeping = AWAKE;
        channel->ops = NULL;
        channel_error(channel, ETIMEDOUT, "sync");
    } else if (sleeping == FALLING_ASLEEP && (!output_left() || limit.due == 0)) {
        timer_clear(&limit);
        sleeping = ASLEEP;
        links_close_all();
        link_unlisten();
        stream_pause(true);
        single_pause(true);
        loop_arm(&wake, EPOLLIN);
        loop_again();
        if (woken)
            control_wake();
    }
}

static void listen_again(struct timer *timer)
{
    if (!link_listen())
        timer_set(timer, 100000000u);
}

void control_wake(void)
{
    static struct timer retry = {.expired = listen_again};
    /* The host may have read the reply, and call, before the last links are closed. */
    woken = sleeping == FALLING_ASLEEP;
    if (sleeping != ASLEEP)
        return;
    sleeping = AWAKE;
    epoch++;
    draw_instance();
    stream_pause(false);
    single_pause(false);
    listen_again(&retry);
}

/* --- shutdown --- */

static void begin_shutdown(uint64_t after_ms)
{
    leaving = ASKED;
    kill(-1, SIGTERM);
    kill(-1, SIGCONT); /* a stopped process can't end by itself */
    timer_set(&grace, after_ms * 1000000u + 1);
    children_look();
    loop_again();
}

void control_shutdown(struct channel *channel, const uint8_t *fields, size_t size)
{
    uint64_t after = 0;
    if (!milliseconds(fields, size, &after)) {
        channel_error(channel, EINVAL, "grace");
        return;
    }
    channel_reply_end(channel, NULL);
    if (leaving == NO_SHUTDOWN)
        begin_shutdown(after);
}

void control_terminate(void)
{
    if (leaving == NO_SHUTDOWN)
        begin_shutdown(TERMINATE_GRACE_MS);
}

static void shutdown_turn(void)
{
    if (leaving == ASKED && grace.due == 0 && !children_none) {
        leaving = KILLED;
        kill(-1, SIGKILL);
        timer_set(&grace, LAST_WORDS_NS);
    } else if (children_none || (leaving == KILLED && grace.due == 0)) {
        if (!farewell) {
            farewell = true;
            timer_set(&limit, LAST_WORDS_NS);
        }
        if (output_left() && limit.due != 0)
            return;
        link_unlisten();
        _exit(0);
    }
}

void control_turn(void)
{
    if (leaving != NO_SHUTDOWN)
        shutdown_turn();
    else if (sleeping != AWAKE)
        sleep_turn();
}
