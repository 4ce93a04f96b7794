/* Many links over one byte stream. Everything that comes in is hostile: lengths, numbers and states are checked first. */
#include "mux.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PIECE 32768u /* read from one link before the next one's turn */

static const uint8_t seal[MUX_SEAL] = {'R', 'F', 'm', 'x'};

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void put32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static void put_head(uint8_t *at, uint8_t type, uint32_t id, uint32_t size)
{
    at[0] = (uint8_t)size;
    at[1] = (uint8_t)(size >> 8);
    at[2] = type;
    at[3] = 0;
    put32(at + 4, id);
}

void mux_start(struct mux *mux, bool host)
{
    memset(mux, 0, offsetof(struct mux, input));
    mux->host = host;
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        mux->links[i].fd = -1;
}

/* --- output --- */

static uint8_t *room_for(struct mux *mux, size_t size)
{
    if (mux->output_start != 0 && MUX_OUTPUT - mux->output_start - mux->output_size < size) {
        memmove(mux->output, mux->output + mux->output_start, mux->output_size);
        mux->output_start = 0;
    }
    if (MUX_OUTPUT - mux->output_start - mux->output_size < size)
        return NULL;
    return mux->output + mux->output_start + mux->output_size;
}

static bool put(struct mux *mux, uint8_t type, uint32_t id, const uint8_t *payload, uint32_t size)
{
    uint8_t *at = room_for(mux, MUX_HEAD + size + MUX_SEAL);
    if (at == NULL)
        return false;
    put_head(at, type, id, size);
    if (size != 0)
        memcpy(at + MUX_HEAD, payload, size);
    memcpy(at + MUX_HEAD + size, seal, sizeof seal);
    mux->output_size += MUX_HEAD + size + MUX_SEAL;
    return true;
}

static bool put_record(struct mux *mux, uint8_t type)
{
    uint8_t payload[MUX_RECORD - MUX_HEAD - MUX_SEAL];
    memcpy(payload, MUX_MAGIC, 16);
    memcpy(payload + 16, mux->nonce, MUX_NONCE);
    put32(payload + 32, MUX_WINDOW);
    put32(payload + 36, MUX_LINKS);
    return put(mux, type, 0, payload, sizeof payload);
}

void mux_wrote(struct mux *mux, size_t size)
{
    mux->output_start += (uint32_t)size;
    mux->output_size -= (uint32_t)size;
    if (mux->output_size == 0)
        mux->output_start = 0;
}

/* --- links --- */

static void drop_data(struct mux_link *link)
{
    free(link->data);
    link->data = NULL;
    link->start = link->size = 0;
}

static void close_local(struct mux *mux, struct mux_link *link)
{
    drop_data(link);
    link->readable = false;
    if (link->fd < 0)
        return;
    mux->close_link(mux, link);
    link->fd = -1;
}

static void free_link(struct mux *mux, struct mux_link *link)
{
    close_local(mux, link);
    *link = (struct mux_link){.fd = -1};
}

/* What has come to its end is let go. */
static void settle(struct mux *mux, struct mux_link *link)
{
    if (link->sent_close && link->got_close)
        link->id = 0;
    if (link->got_close && link->size == 0)
        close_local(mux, link);
    if (link->used && link->id == 0 && link->fd < 0)
        free_link(mux, link);
}

static void local_ended(struct mux *mux, struct mux_link *link)
{
    close_local(mux, link);
    if (!link->sent_close)
        link->close_due = true;
    settle(mux, link);
}

static void forget_links(struct mux *mux)
{
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        if (mux->links[i].used)
            free_link(mux, &mux->links[i]);
}

void mux_forget(struct mux *mux)
{
    forget_links(mux);
    mux->open = mux->lost_due = mux->ready_due = mux->lost = false;
    mux->input_size = mux->output_start = mux->output_size = 0;
}

static struct mux_link *link_of(struct mux *mux, uint32_t id)
{
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        if (mux->links[i].used && mux->links[i].id == id)
            return &mux->links[i];
    return NULL;
}

static struct mux_link *new_link(struct mux *mux, uint32_t id, int fd)
{
    unsigned numbers = 0;
    struct mux_link *empty = NULL;
    for (unsigned i = 0; i < MUX_SLOTS; i++) {
        if (!mux->links[i].used)
            empty = empty != NULL ? empty : &mux->links[i];
        else if (mux->links[i].id != 0)
            numbers++;
    }
    if (empty == NULL || numbers >= MUX_NUMBERS)
        return NULL;
    *empty = (struct mux_link){.fd = fd, .id = id, .used = true, .credit = mux->peer_window, .room = MUX_WINDOW};
    return empty;
}

unsigned mux_live(const struct mux *mux)
{
    unsigned live = 0;
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        live += mux->links[i].used && mux->links[i].fd >= 0;
    return live;
}

bool mux_busy(const struct mux *mux)
{
    if (mux->output_size != 0)
        return true;
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        if (mux->links[i].used && (mux->links[i].close_due || (mux->links[i].readable && mux->links[i].credit != 0)))
            return true;
    return false;
}

bool mux_number_free(const struct mux *mux)
{
    unsigned numbers = 0, used = 0;
    for (unsigned i = 0; i < MUX_SLOTS; i++) {
        used += mux->links[i].used;
        numbers += mux->links[i].used && mux->links[i].id != 0;
    }
    return used < MUX_SLOTS && numbers < MUX_NUMBERS;
}

bool mux_adopt(struct mux *mux, int fd)
{
    if (!mux->open || mux_live(mux) >= MUX_LINKS || mux_live(mux) >= mux->peer_links)
        return false;
    do
        mux->next_id++;
    while (mux->next_id == 0 || link_of(mux, mux->next_id) != NULL);
    struct mux_link *link = new_link(mux, mux->next_id, fd);
    if (link == NULL)
        return false;
    link->announce = true;
    return true;
}

/* --- the local side of a link --- */

static void consumed(struct mux_link *link, uint32_t size)
{
    link->owed += size;
}

void mux_writable(struct mux *mux, struct mux_link *link)
{
    while (link->size != 0 && link->fd >= 0) {
        ssize_t wrote = write(link->fd, link->data + link->start, link->size);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0 && errno == EAGAIN)
            return;
        if (wrote <= 0) {
            consumed(link, link->size);
            link->deaf = true;
            link->size = 0;
            break;
        }
        consumed(link, (uint32_t)wrote);
        link->start += (uint32_t)wrote;
        link->size -= (uint32_t)wrote;
    }
    if (link->size == 0)
        drop_data(link);
    settle(mux, link);
}

static bool deliver(struct mux *mux, struct mux_link *link, const uint8_t *data, uint32_t size)
{
    link->room -= size;
    if (link->fd < 0 || link->deaf || link->sent_close) {
        consumed(link, size);
        return true;
    }
    if (link->size == 0) { /* most often the socket takes it all */
        ssize_t wrote = write(link->fd, data, size);
        if (wrote > 0) {
            consumed(link, (uint32_t)wrote);
            data += wrote;
            size -= (uint32_t)wrote;
        } else if (wrote < 0 && errno != EAGAIN && errno != EINTR) {
            consumed(link, size);
            link->deaf = true;
            return true;
        }
        if (size == 0)
            return true;
    }
    if (link->data == NULL && (link->data = malloc(MUX_WINDOW)) == NULL) {
        local_ended(mux, link);
        return true;
    }
    if (MUX_WINDOW - link->size < size)
        return false; /* can't be: what waits was counted in `room` */
    if (MUX_WINDOW - link->start - link->size < size) {
        memmove(link->data, link->data + link->start, link->size);
        link->start = 0;
    }
    memcpy(link->data + link->start + link->size, data, size);
    link->size += size;
    return true;
}

bool mux_wants_write(const struct mux_link *link)
{
    return link->used && link->fd >= 0 && link->size != 0;
}

bool mux_wants_read(const struct mux *mux, const struct mux_link *link)
{
    if (!link->used || link->fd < 0 || link->readable)
        return false;
    return link->got_close || (mux->open && link->credit != 0 && mux->output_size < MUX_OUTPUT_HIGH);
}

void mux_readable(struct mux *mux, struct mux_link *link)
{
    if (!link->got_close) {
        link->readable = true;
        return;
    }
    uint8_t nobody[4096]; /* the peer is done: what the local side still says is for nobody */
    ssize_t got = read(link->fd, nobody, sizeof nobody);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
        local_ended(mux, link);
}

/* One piece of a link into `output`. False: nothing to take now. */
static bool take(struct mux *mux, struct mux_link *link)
{
    if (!link->readable || link->fd < 0 || link->sent_close || link->close_due || link->got_close || link->credit == 0)
        return false;
    uint32_t size = link->credit < PIECE ? link->credit : PIECE;
    uint8_t *at = room_for(mux, MUX_HEAD + size + MUX_SEAL);
    if (at == NULL)
        return false;
    ssize_t got = read(link->fd, at + MUX_HEAD, size);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        link->readable = errno == EINTR;
        return false;
    }
    if (got <= 0) {
        local_ended(mux, link);
        return false;
    }
    put_head(at, MUX_DATA, link->id, (uint32_t)got);
    memcpy(at + MUX_HEAD + got, seal, sizeof seal);
    mux->output_size += MUX_HEAD + (uint32_t)got + MUX_SEAL;
    link->credit -= (uint32_t)got;
    if ((uint32_t)got < size)
        link->readable = false; /* asked again by the loop */
    return true;
}

static void fill_link(struct mux *mux, struct mux_link *link)
{
    if (link->announce) {
        if (!put(mux, MUX_OPEN, link->id, NULL, 0))
            return;
        link->announce = false;
    }
    if (link->owed >= MUX_WINDOW / 4 && !link->sent_close && !link->close_due && !link->got_close) {
        uint8_t bytes[4];
        put32(bytes, link->owed);
        if (!put(mux, MUX_CREDIT, link->id, bytes, sizeof bytes))
            return;
        link->room += link->owed;
        link->owed = 0;
    }
    if (link->close_due && put(mux, MUX_CLOSE, link->id, NULL, 0)) {
        link->close_due = false;
        link->sent_close = true;
        settle(mux, link);
    }
}

void mux_fill(struct mux *mux)
{
    if (mux->ready_due && put_record(mux, MUX_READY))
        mux->ready_due = false;
    if (mux->lost_due && put(mux, MUX_LOST, 0, NULL, 0))
        mux->lost_due = false;
    if (!mux->open)
        return;
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        if (mux->links[i].used && mux->links[i].id != 0)
            fill_link(mux, &mux->links[i]);
    for (bool more = true; more && mux->output_size < MUX_OUTPUT_HIGH;) {
        more = false;
        for (unsigned i = 0; i < MUX_SLOTS && mux->output_size < MUX_OUTPUT_HIGH; i++) {
            struct mux_link *link = &mux->links[mux->turn++ % MUX_SLOTS];
            if (link->used && link->id != 0)
                more = take(mux, link) || more;
        }
    }
    for (unsigned i = 0; i < MUX_SLOTS; i++) /* ends that were found just now */
        if (mux->links[i].used && mux->links[i].id != 0 && mux->links[i].close_due)
            fill_link(mux, &mux->links[i]);
}

/* --- input --- */

/* The place in the stream is lost: nothing of before holds. */
static void violation(struct mux *mux)
{
    forget_links(mux);
    mux->open = false;
    if (mux->host)
        mux->lost = true;
    else {
        mux->ready_due = false;
        mux->lost_due = true;
    }
}

void mux_close_all(struct mux *mux)
{
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        if (mux->links[i].used)
            local_ended(mux, &mux->links[i]);
    for (unsigned i = 0; i < MUX_SLOTS; i++)
        if (mux->links[i].used && mux->links[i].id != 0)
            fill_link(mux, &mux->links[i]);
    violation(mux);
}

void mux_begin(struct mux *mux, const uint8_t nonce[MUX_NONCE], bool padded)
{
    mux_forget(mux);
    memcpy(mux->nonce, nonce, MUX_NONCE);
    if (padded) {
        memset(mux->output, 0, MUX_FRAME_MAX);
        mux->output_size = MUX_FRAME_MAX;
    }
    put_record(mux, MUX_RESET);
}

static bool good_record(const struct mux *mux, const uint8_t *payload, uint32_t size)
{
    return size == MUX_RECORD - MUX_HEAD - MUX_SEAL && memcmp(payload, MUX_MAGIC, 16) == 0 &&
           (!mux->host || memcmp(payload + 16, mux->nonce, MUX_NONCE) == 0) && get32(payload + 32) != 0 &&
           get32(payload + 36) != 0;
}

static void begun(struct mux *mux, const uint8_t *payload)
{
    mux->peer_window = get32(payload + 32);
    if (mux->peer_window > 1u << 24)
        mux->peer_window = 1u << 24;
    mux->peer_links = get32(payload + 36);
    mux->open = true;
    if (mux->host)
        return;
    forget_links(mux);
    memcpy(mux->nonce, payload + 16, MUX_NONCE);
    mux->output_start = mux->output_size = 0; /* the host looks for READY, wherever what was written stopped */
    mux->lost_due = false;
    mux->ready_due = true;
}

static bool open_from_host(struct mux *mux, uint32_t id, uint32_t size)
{
    if (mux->host || size != 0 || id == 0 || link_of(mux, id) != NULL)
        return false;
    struct mux_link *link = new_link(mux, id, -1);
    if (link == NULL)
        return false;
    link->fd = mux->open_link(mux, link);
    if (link->fd < 0)
        link->close_due = true;
    return true;
}

/* False: a violation. */
static bool take_frame(struct mux *mux, uint8_t type, uint32_t id, const uint8_t *payload, uint32_t size)
{
    if (type == MUX_RESET && !mux->host && id == 0 && good_record(mux, payload, size)) {
        begun(mux, payload);
        return true;
    }
    if (type == MUX_READY && mux->host) {
        mux->taken = id == 0 && !good_record(mux, payload, size);
        return false;
    }
    if (type == MUX_LOST || type == MUX_RESET || type == MUX_READY)
        return false; /* LOST too begins anew */
    if (type == MUX_OPEN)
        return open_from_host(mux, id, size);
    struct mux_link *link = id == 0 ? NULL : link_of(mux, id);
    if (link == NULL || link->got_close || link->announce)
        return false;
    if (type == MUX_DATA)
        return size != 0 && size <= link->room && deliver(mux, link, payload, size);
    if (type == MUX_CREDIT) {
        uint32_t more = size == 4 ? get32(payload) : 0;
        if (more == 0 || more > 1u << 24 || link->credit + more > 1u << 25)
            return false;
        link->credit += more;
        return true;
    }
    if (type != MUX_CLOSE || size != 0)
        return false;
    link->got_close = true;
    link->readable = false;
    if (!link->sent_close)
        link->close_due = true;
    settle(mux, link);
    return true;
}

/* Bytes before the record that begins; all but what may be its beginning if there is none. */
static uint32_t search(const struct mux *mux, const uint8_t *data, uint32_t size)
{
    uint8_t wanted[MUX_HEAD + 16 + MUX_NONCE];
    put_head(wanted, mux->host ? MUX_READY : MUX_RESET, 0, MUX_RECORD - MUX_HEAD - MUX_SEAL);
    memcpy(wanted + MUX_HEAD, MUX_MAGIC, 16);
    memcpy(wanted + MUX_HEAD + 16, mux->nonce, MUX_NONCE);
    uint32_t known = MUX_HEAD + 16 + (mux->host ? MUX_NONCE : 0), at = 0;
    while (at < size) {
        const uint8_t *first = memchr(data + at, wanted[0], size - at);
        if (first == NULL)
            return size;
        at = (uint32_t)(first - data);
        uint32_t left = size - at;
        if (memcmp(data + at, wanted, left < known ? left : known) == 0 &&
            (left < MUX_RECORD ||
             (memcmp(data + at + MUX_RECORD - MUX_SEAL, seal, sizeof seal) == 0 &&
              good_record(mux, data + at + MUX_HEAD, MUX_RECORD - MUX_HEAD - MUX_SEAL))))
            return at;
        at++;
    }
    return at;
}

static uint32_t parse(struct mux *mux, const uint8_t *data, uint32_t size)
{
    uint32_t at = 0;
    while (!mux->taken && !mux->lost) {
        if (!mux->open) {
            at += search(mux, data + at, size - at);
            if (size - at < MUX_RECORD)
                return at;
            begun(mux, data + at + MUX_HEAD);
            at += MUX_RECORD;
            continue;
        }
        if (size - at < MUX_HEAD)
            return at;
        const uint8_t *frame = data + at;
        uint32_t length = (uint32_t)frame[0] | (uint32_t)frame[1] << 8;
        if (length > MUX_PAYLOAD_MAX || frame[2] < MUX_RESET || frame[2] > MUX_LOST || frame[3] != 0) {
            violation(mux);
            continue;
        }
        if (size - at < MUX_HEAD + length + MUX_SEAL)
            return at;
        if (memcmp(frame + MUX_HEAD + length, seal, sizeof seal) != 0 ||
            !take_frame(mux, frame[2], get32(frame + 4), frame + MUX_HEAD, length)) {
            violation(mux);
            continue; /* a search from here on: the record may lie within what looked like a frame */
        }
        at += MUX_HEAD + length + MUX_SEAL;
    }
    return size; /* the caller begins anew: nothing of this is of use */
}

void mux_feed(struct mux *mux, const uint8_t *data, size_t size)
{
    while (size != 0 && !mux->taken && !mux->lost) {
        uint32_t space = MUX_FRAME_MAX - mux->input_size;
        uint32_t part = size < space ? (uint32_t)size : space;
        memcpy(mux->input + mux->input_size, data, part);
        mux->input_size += part;
        data += part;
        size -= part;
        uint32_t used = parse(mux, mux->input, mux->input_size);
        mux->input_size -= used;
        if (mux->input_size != 0 && used != 0)
            memmove(mux->input, mux->input + used, mux->input_size);
    }
}
