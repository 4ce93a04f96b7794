/* Either end of the mux before a hostile peer: whatever comes, buffers stay bounded and states sound. The first byte chooses
 * the end, the others are instructions: feed bytes of the peer, let a local side speak, or let it end. */
#include "link.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct mux mux;
static int far[64];
static unsigned count;

static int local(void)
{
    int ends[2];
    if (count == sizeof far / sizeof *far || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) < 0)
        return -1;
    int small = 2048;
    setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    far[count++] = ends[0];
    return ends[1];
}

static int open_link(struct mux *unused, struct mux_link *link)
{
    (void)unused;
    (void)link;
    return local();
}

static void close_link(struct mux *unused, struct mux_link *link)
{
    (void)unused;
    close(link->fd);
}

static void check(void)
{
    unsigned numbers = 0;
    if (mux.output_start + mux.output_size > MUX_OUTPUT || mux.input_size > MUX_FRAME_MAX)
        abort();
    for (unsigned i = 0; i < MUX_SLOTS; i++) {
        const struct mux_link *link = &mux.links[i];
        if (!link->used) {
            if (link->fd >= 0 || link->data != NULL)
                abort();
            continue;
        }
        numbers += link->id != 0;
        if (link->size > MUX_WINDOW || link->room > MUX_WINDOW || (link->size != 0) != (link->data != NULL))
            abort();
        for (unsigned j = 0; link->id != 0 && j < i; j++)
            if (mux.links[j].used && mux.links[j].id == link->id)
                abort();
    }
    if (numbers > MUX_NUMBERS)
        abort();
}

static void turn(void)
{
    for (unsigned i = 0; i < MUX_SLOTS; i++) {
        if (mux_wants_write(&mux.links[i]))
            mux_writable(&mux, &mux.links[i]);
        if (mux_wants_read(&mux, &mux.links[i]))
            mux_readable(&mux, &mux.links[i]);
    }
    mux_fill(&mux);
    check();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t nonce[MUX_NONCE] = {1};
    static struct docker docker;
    uint8_t copy[4096], head[MUX_HEAD] = {MUX_RECORD - MUX_HEAD - MUX_SEAL, 0, 0, 0, 0, 0, 0, 0};
    if (size == 0)
        return 0;
    signal(SIGPIPE, SIG_IGN);
    mux_start(&mux, (*data & 1) != 0);
    mux.input_size = mux.output_start = mux.output_size = 0;
    mux.open_link = open_link;
    mux.close_link = close_link;
    if (mux.host)
        mux_begin(&mux, nonce, (*data & 2) != 0);
    if (*data & 4) { /* begun, as it should be */
        head[2] = mux.host ? MUX_READY : MUX_RESET;
        mux_feed(&mux, head, sizeof head);
        mux_feed(&mux, (const uint8_t *)MUX_MAGIC, 16);
        mux_feed(&mux, nonce, sizeof nonce);
        mux_feed(&mux, (const uint8_t *)"\0\0\2\0\100\0\0\0RFmx", 12);
        if (!mux.open)
            abort();
    }
    bool format = (*data & 8) != 0;
    for (size_t at = 1; at < size;) {
        uint8_t what = data[at++];
        size_t part = (size_t)(what >> 2) * 16;
        part = part < size - at ? part : size - at;
        if ((what & 3) < 2) {
            size_t left = part;
            memcpy(copy, data + at, part);
            if (format)
                left = docker_take(&docker, copy, part);
            mux_feed(&mux, copy, left);
            at += part;
        } else if ((what & 3) == 2 && mux.host) {
            int fd = local();
            if (fd >= 0 && !mux_adopt(&mux, fd))
                close(fd);
        } else if (count != 0) {
            int fd = far[(what >> 3) % count];
            if (what & 4)
                shutdown(fd, SHUT_RDWR);
            else if (write(fd, data + at, part) < 0 || read(fd, copy, sizeof copy) < 0) {
            }
        }
        check();
        turn();
        mux_wrote(&mux, mux.output_size < part ? mux.output_size : part * 8 < mux.output_size ? part * 8 : 0);
        if (mux.lost)
            mux_begin(&mux, nonce, true);
        if (mux.taken)
            break;
    }
    mux_close_all(&mux);
    check();
    mux_forget(&mux);
    while (count != 0)
        close(far[--count]);
    return 0;
}
