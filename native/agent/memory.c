/* The common budget of all buffers, and rings of output with offsets. */
#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

static size_t taken;

bool budget_take(size_t size)
{
    while (size > BUDGET - taken)
        if (size > BUDGET || !processes_reclaim())
            return false;
    taken += size;
    return true;
}

void budget_give(size_t size) { taken -= size <= taken ? size : taken; }

static bool ring_grow(struct ring *ring, size_t need)
{
    size_t capacity = 256;
    while (capacity < need)
        capacity *= 2;
    if (capacity > ring->limit)
        capacity = ring->limit;
    if (capacity <= ring->capacity || !budget_take(capacity))
        return false;
    uint8_t *data = malloc(capacity);
    if (data == NULL) {
        budget_give(capacity);
        return false;
    }
    for (uint64_t offset = ring->start; offset < ring->end;) {
        const uint8_t *from = NULL;
        size_t size = ring_peek(ring, offset, &from), at = (size_t)(offset % capacity);
        if (size > capacity - at)
            size = capacity - at;
        memcpy(data + at, from, size);
        offset += size;
    }
    free(ring->data);
    budget_give(ring->capacity);
    ring->data = data;
    ring->capacity = capacity;
    return true;
}

/* Bytes that fit if nothing at or after `keep` may be lost and memory is no concern. */
size_t ring_space(const struct ring *ring, uint64_t keep)
{
    if (keep < ring->start)
        keep = ring->start;
    if (keep >= ring->end)
        return ring->limit;
    size_t held = (size_t)(ring->end - keep);
    return held >= ring->limit ? 0 : ring->limit - held;
}

/* Makes room for up to `want` bytes; returns how many may be appended now. Bytes before `keep` may go. */
size_t ring_reserve(struct ring *ring, size_t want, uint64_t keep)
{
    size_t held = (size_t)(ring->end - ring->start);
    if (want > ring->limit)
        want = ring->limit;
    if (held + want > ring->capacity)
        ring_grow(ring, held + want);
    ring->floor = ring->start;
    held = (size_t)(ring->end - ring->start); /* growing may have taken it from this very ring */
    if (held + want > ring->capacity) {
        uint64_t start = ring->start + (held + want - ring->capacity);
        if (start > keep)
            start = keep;
        if (start > ring->end)
            start = ring->end;
        if (start > ring->start)
            ring->start = start;
        held = (size_t)(ring->end - ring->start);
    }
    size_t space = ring->capacity - held;
    return want < space ? want : space;
}

ssize_t ring_read_from(struct ring *ring, int fd, size_t size)
{
    size_t at = (size_t)(ring->end % ring->capacity), first = ring->capacity - at;
    if (first > size)
        first = size;
    struct iovec parts[2] = {{ring->data + at, first}, {ring->data, size - first}};
    ssize_t got = readv(fd, parts, size > first ? 2 : 1);
    if (got > 0)
        ring->end += (uint64_t)got;
    /* room that was made and not used gives its bytes back */
    uint64_t lowest = ring->end > ring->capacity ? ring->end - ring->capacity : 0;
    ring->start = lowest > ring->floor ? lowest : ring->floor;
    return got;
}

size_t ring_peek(const struct ring *ring, uint64_t offset, const uint8_t **at)
{
    if (offset < ring->start || offset >= ring->end)
        return 0;
    size_t position = (size_t)(offset % ring->capacity);
    size_t size = ring->capacity - position, left = (size_t)(ring->end - offset);
    *at = ring->data + position;
    return size < left ? size : left;
}

void ring_forget(struct ring *ring)
{
    free(ring->data);
    budget_give(ring->capacity);
    ring->data = NULL;
    ring->capacity = 0;
    ring->start = ring->end;
}
