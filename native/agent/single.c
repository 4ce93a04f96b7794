/* The only stream of a wall that has no listening socket: many links over it. docs/PROTOCOL.md has the format.
 *
 * Each link is a pair of sockets: one end is adopted as if a host had dialled, the other is filled and emptied here. */
#include "agent.h"
#include "mux.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define AWAY_NS 200000000u

static struct mux *mux;
static struct source sources[MUX_SLOTS], in = {.fd = -1}, out = {.fd = -1};
static bool paused, away;

/* The two descriptors may be 0 and 1, which commands inherit numbers of: take them up to where nothing is passed on. */
bool single_claim(void)
{
    if (config.mux_path != NULL) {
        config.mux_in = config.mux_out = open(config.mux_path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
        return config.mux_in >= 0;
    }
    if (config.mux_in < 0)
        return true;
    int first = fcntl(config.mux_in, F_DUPFD_CLOEXEC, 3);
    int second = config.mux_out == config.mux_in ? first : fcntl(config.mux_out, F_DUPFD_CLOEXEC, 3);
    if (first < 0 || second < 0)
        return false;
    close(config.mux_in);
    if (config.mux_out != config.mux_in)
        close(config.mux_out);
    config.mux_in = first;
    config.mux_out = second;
    return true;
}

static int open_link(struct mux *unused, struct mux_link *link)
{
    (void)unused;
    (void)link;
    int ends[2];
    if (link_count >= config.max_links || !link_prepare() ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        return -1;
    link_adopt(ends[0], ends[0], false);
    return ends[1];
}

static void close_link(struct mux *unused, struct mux_link *link)
{
    (void)unused;
    struct source *source = &sources[link - mux->links];
    if (source->fd == link->fd)
        loop_close(source);
    else
        close(link->fd); /* the loop has never seen it */
}

static void link_ready(struct source *source, uint32_t events)
{
    struct mux_link *link = &mux->links[source - sources];
    uint32_t asked = source->armed;
    int fd = link->fd;
    if (asked & EPOLLOUT && events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
        mux_writable(mux, link);
    if (asked & EPOLLIN && events & (EPOLLIN | EPOLLHUP | EPOLLERR) && link->fd == fd)
        mux_readable(mux, link);
}

static void look_again(struct timer *timer)
{
    (void)timer;
    away = false;
}

static struct timer far_end = {.expired = look_again};

static void gone(void)
{
    if (config.leave)
        _exit(0);
    mux_forget(mux);
    away = true;
    timer_set(&far_end, AWAY_NS);
}

static void read_stream(struct source *source, uint32_t events)
{
    if (source == &in && events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t got = read(in.fd, scratch, FRAME_MAX);
        if (got > 0)
            mux_feed(mux, scratch, (size_t)got);
        else if (got == 0 || (errno != EAGAIN && errno != EINTR))
            gone();
    }
}

static void write_stream(void)
{
    while (mux->output_size != 0) {
        ssize_t wrote = write(config.mux_out, mux->output + mux->output_start, mux->output_size);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0 && errno != EAGAIN)
            gone();
        if (wrote <= 0)
            return;
        mux_wrote(mux, (size_t)wrote);
    }
}

static void arm(void)
{
    bool stopped = paused || away;
    uint32_t write = stopped || mux->output_size == 0 ? 0 : EPOLLOUT;
    loop_arm(&in, stopped ? 0 : EPOLLIN | (config.mux_out == config.mux_in ? write : 0));
    if (config.mux_out != config.mux_in)
        loop_arm(&out, write);
    for (unsigned i = 0; i < MUX_SLOTS; i++) {
        struct mux_link *link = &mux->links[i];
        if (!link->used || link->fd < 0)
            continue;
        sources[i].fd = link->fd;
        loop_arm(&sources[i], (mux_wants_read(mux, link) ? EPOLLIN : 0) | (mux_wants_write(link) ? EPOLLOUT : 0));
    }
}

void single_turn(void)
{
    if (mux == NULL)
        return;
    if (!paused && !away) {
        bool filled;
        do { /* a link that had to wait for room is asked by nobody but mux_fill */
            mux_fill(mux);
            filled = mux->output_size != 0;
            write_stream();
        } while (filled && mux->output_size == 0 && !away);
    }
    arm();
}

/* Something that links have said is not on its way to the host yet. */
bool single_busy(void)
{
    if (mux == NULL || paused || away || !mux->open)
        return false;
    if (mux_busy(mux))
        return true;
    for (unsigned i = 0; i < MUX_SLOTS; i++) {
        const struct mux_link *link = &mux->links[i];
        int waiting = 0;
        if (link->used && link->fd >= 0 && link->credit != 0 && !link->got_close &&
            ioctl(link->fd, FIONREAD, &waiting) == 0 && waiting != 0)
            return true;
    }
    return false;
}

/* During a sleep nothing is read: the next RESET belongs to the next epoch. The host learns that its links have ended, and
 * accepts nobody until it has an answer again. */
void single_pause(bool pause)
{
    if (mux == NULL || paused == pause)
        return;
    if (pause) {
        mux_close_all(mux);
        mux_fill(mux);
        write_stream();
    }
    paused = pause;
    loop_again();
}

bool single_start(void)
{
    if (config.mux_in < 0)
        return true;
    mux = malloc(sizeof *mux);
    if (mux == NULL)
        return false;
    mux_start(mux, false);
    mux->open_link = open_link;
    mux->close_link = close_link;
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        sources[i] = (struct source){.fd = -1, .ready = link_ready};
    make_non_blocking(config.mux_in);
    make_non_blocking(config.mux_out);
    in = (struct source){.fd = config.mux_in, .ready = read_stream};
    out = (struct source){.fd = config.mux_out, .ready = read_stream};
    arm();
    return true;
}
