/* The epoll loop, timers and time. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64

uint8_t scratch[FRAME_MAX] __attribute__((aligned(4096)));

static int epoll_fd = -1;
static struct epoll_event batch[BATCH];
static int batch_size, batch_at;
static struct timer *timers;
static bool again;

bool loop_start(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd >= 0;
}

int loop_arm(struct source *source, uint32_t events)
{
    if (source->armed == events || source->fd < 0)
        return 0;
    struct epoll_event event = {.events = events, .data.ptr = source};
    int operation = events == 0 ? EPOLL_CTL_DEL : source->armed == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    if (epoll_ctl(epoll_fd, operation, source->fd, &event) < 0)
        return -1;
    source->armed = events;
    return 0;
}

void loop_close(struct source *source)
{
    if (source->fd < 0)
        return;
    loop_arm(source, 0);
    close(source->fd);
    source->fd = -1;
    source->armed = 0;
    for (int i = batch_at; i < batch_size; i++) /* its events of this turn are void */
        if (batch[i].data.ptr == source)
            batch[i].data.ptr = NULL;
}

void loop_again(void) { again = true; }

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void timer_clear(struct timer *timer)
{
    for (struct timer **at = &timers; *at != NULL; at = &(*at)->next)
        if (*at == timer) {
            *at = timer->next;
            break;
        }
    timer->due = 0;
}

void timer_set(struct timer *timer, uint64_t delay_ns)
{
    timer_clear(timer);
    timer->due = now_ns() + delay_ns;
    timer->next = timers;
    timers = timer;
}

static int next_timeout(void)
{
    if (again)
        return 0;
    if (timers == NULL)
        return -1;
    uint64_t now = now_ns(), due = UINT64_MAX;
    for (const struct timer *timer = timers; timer != NULL; timer = timer->next)
        if (timer->due < due)
            due = timer->due;
    if (due <= now)
        return 0;
    uint64_t milliseconds = (due - now + 999999u) / 1000000u;
    return milliseconds > 60000 ? 60000 : (int)milliseconds;
}

static void run_timers(void)
{
    if (timers == NULL)
        return;
    uint64_t now = now_ns();
    for (struct timer *timer = timers; timer != NULL;) {
        if (timer->due > now) {
            timer = timer->next;
            continue;
        }
        timer_clear(timer);
        timer->expired(timer);
        timer = timers; /* the list may have changed */
    }
}

void loop_turn(void)
{
    int timeout = next_timeout();
    again = false;
    batch_at = 0;
    batch_size = epoll_wait(epoll_fd, batch, BATCH, timeout);
    while (batch_at < batch_size) {
        struct source *source = batch[batch_at].data.ptr;
        uint32_t events = batch[batch_at].events;
        batch_at++;
        if (source != NULL)
            source->ready(source, events);
    }
    batch_size = batch_at = 0;
    run_timers();
    children_reap();
    processes_resume();
    workers_turn();
    single_turn();
    control_turn();
    links_flush();
}

void make_non_blocking(int fd)
{
    int flags = fd < 0 ? -1 : fcntl(fd, F_GETFL);
    if (flags >= 0)
        fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}
