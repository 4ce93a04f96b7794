/* The poll loop: one stream, one listening socket, many links. */
#include "link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FIRST_ANSWER_MS 1000
#define LAST_ANSWER_MS 30000
#define BETWEEN_MS 1000 /* the guest can make us begin anew no more often, in the long run */
#define AT_ONCE 8       /* and so many times without a pause */
#define ACCEPT_AGAIN_MS 100

static struct mux mux;
static struct docker docker;
static uint64_t begun_at, answer_ms, accept_at, paid_until; /* the last: when all that was begun anew is paid for */

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

static bool begin(bool padded)
{
    uint8_t nonce[MUX_NONCE];
    if (getrandom(nonce, sizeof nonce, 0) != sizeof nonce)
        return false;
    mux_begin(&mux, nonce, padded);
    begun_at = now_ms();
    return true;
}

static void close_link(struct mux *unused, struct mux_link *link)
{
    (void)unused;
    close(link->fd);
}

static void accept_links(const struct options *options)
{
    for (int i = 0; i < 8 && mux_number_free(&mux) && mux_live(&mux) + 4 < options->most_open; i++) {
        int fd = accept4(options->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) /* out of descriptors or memory */
                accept_at = now_ms() + ACCEPT_AGAIN_MS;
            return;
        }
        if (!mux_adopt(&mux, fd))
            close(fd);
    }
}

/* False: the stream has ended. */
static bool read_stream(const struct options *options)
{
    static uint8_t bytes[MUX_FRAME_MAX];
    ssize_t got = read(options->in, bytes, sizeof bytes);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR;
    size_t size = (size_t)got;
    if (options->docker)
        size = docker_take(&docker, bytes, size);
    mux_feed(&mux, bytes, size);
    return got != 0;
}

static bool write_stream(const struct options *options)
{
    while (mux.output_size != 0) {
        ssize_t wrote = write(options->out, mux.output + mux.output_start, mux.output_size);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return errno == EAGAIN;
        mux_wrote(&mux, (size_t)wrote);
    }
    return true;
}

static int timeout(uint64_t now)
{
    uint64_t due = UINT64_MAX;
    if (mux.lost)
        due = paid_until < AT_ONCE * BETWEEN_MS ? 0 : paid_until - AT_ONCE * BETWEEN_MS;
    else if (!mux.open && mux.output_size == 0)
        due = begun_at + answer_ms;
    if (accept_at != 0 && accept_at < due)
        due = accept_at;
    return due == UINT64_MAX ? -1 : due <= now ? 0 : (int)(due - now);
}

static bool anew(uint64_t now)
{
    if (mux.lost && now + AT_ONCE * BETWEEN_MS >= paid_until) {
        paid_until = (paid_until > now ? paid_until : now) + BETWEEN_MS;
        answer_ms = FIRST_ANSWER_MS;
        return begin(true);
    }
    if (!mux.lost && !mux.open && mux.output_size == 0 && now >= begun_at + answer_ms) {
        answer_ms = answer_ms * 2 < LAST_ANSWER_MS ? answer_ms * 2 : LAST_ANSWER_MS;
        return begin(true);
    }
    return true;
}

static void say_ready(int fd)
{
    static bool said;
    if (said || fd < 0)
        return;
    said = true;
    if (write(fd, "", 1) < 0) { /* whoever waited is gone */
    }
    close(fd);
}

static struct pollfd polled[4 + MUX_SLOTS];
static struct mux_link *of[4 + MUX_SLOTS];

static nfds_t ask(const struct options *options, uint64_t now)
{
    nfds_t count = 4;
    /* poll takes no more entries than descriptors may be open, whatever their numbers. */
    bool accepting = mux.open && mux_number_free(&mux) && mux_live(&mux) + count < options->most_open && now >= accept_at;
    if (now >= accept_at)
        accept_at = 0;
    polled[0] = (struct pollfd){.fd = mux.lost ? -1 : options->in, .events = POLLIN};
    polled[1] = (struct pollfd){.fd = mux.output_size != 0 ? options->out : -1, .events = POLLOUT};
    polled[2] = (struct pollfd){.fd = accepting ? options->listen_fd : -1, .events = POLLIN};
    polled[3] = (struct pollfd){.fd = options->owner_fd, .events = 0}; /* only its end is of interest */
    for (unsigned i = 0; i < MUX_SLOTS; i++) {
        struct mux_link *link = &mux.links[i];
        short events = (short)((mux_wants_read(&mux, link) ? POLLIN : 0) | (mux_wants_write(link) ? POLLOUT : 0));
        if (events == 0)
            continue;
        of[count] = link;
        polled[count++] = (struct pollfd){.fd = link->fd, .events = events};
    }
    return count;
}

static void serve_links(nfds_t count)
{
    for (nfds_t i = 4; i < count; i++) {
        struct mux_link *link = of[i];
        short got = polled[i].revents, asked = polled[i].events;
        if (got == 0 || link->fd != polled[i].fd)
            continue;
        if (asked & POLLOUT && got & (POLLOUT | POLLHUP | POLLERR))
            mux_writable(&mux, link);
        if (asked & POLLIN && got & (POLLIN | POLLHUP | POLLERR) && link->fd == polled[i].fd)
            mux_readable(&mux, link);
    }
}

int serve(const struct options *options)
{
    mux_start(&mux, true);
    mux.close_link = close_link;
    answer_ms = FIRST_ANSWER_MS;
    if (!begin(!options->fresh))
        return 1;
    for (;;) {
        bool filled;
        do { /* a link that had to wait for room is asked by nobody but mux_fill */
            mux_fill(&mux);
            filled = mux.output_size != 0;
            if (!write_stream(options))
                return 0;
        } while (filled && mux.output_size == 0);
        uint64_t now = now_ms();
        if (!anew(now))
            return 1;
        nfds_t count = ask(options, now);
        if (poll(polled, count, timeout(now)) < 0) {
            if (errno != EINTR)
                return 1;
            continue;
        }
        if (polled[3].revents != 0)
            return 0;
        serve_links(count); /* before the stream: a frame may close a link, and its number be given out again */
        if (polled[0].revents != 0 && !read_stream(options))
            return 0;
        if (mux.taken)
            return 0;
        if (mux.open)
            say_ready(options->ready_fd);
        if (polled[2].revents != 0 && mux.open)
            accept_links(options);
    }
}
