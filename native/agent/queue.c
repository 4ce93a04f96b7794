/* Bytes that the host sent and a descriptor has not taken yet. Credit goes back as they are written. */
#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct chunk {
    struct chunk *next;
    struct channel *from;
    size_t size, done;
    size_t extra; /* bytes that are not the host's */
    uint8_t data[];
};

static bool append(struct queue *queue, struct channel *from, const void *head, size_t extra, const void *data,
                   size_t length)
{
    size_t size = extra + length;
    if (!budget_take(sizeof(struct chunk) + size))
        return false;
    struct chunk *chunk = malloc(sizeof *chunk + size);
    if (chunk == NULL) {
        budget_give(sizeof *chunk + size);
        return false;
    }
    *chunk = (struct chunk){.from = from, .size = size, .extra = extra};
    if (extra != 0)
        memcpy(chunk->data, head, extra);
    if (length != 0)
        memcpy(chunk->data + extra, data, length);
    if (queue->tail != NULL)
        queue->tail->next = chunk;
    else
        queue->head = chunk;
    queue->tail = chunk;
    queue->bytes += size;
    return true;
}

bool queue_add(struct queue *queue, struct channel *from, const void *data, size_t size)
{
    return append(queue, from, NULL, 0, data, size);
}

/* One packet for a worker: its type, then bytes. */
bool queue_packet(struct queue *queue, struct channel *from, uint8_t type, const void *data, size_t size)
{
    return append(queue, from, &type, 1, data, size);
}

static void drop_head(struct queue *queue)
{
    struct chunk *chunk = queue->head;
    queue->head = chunk->next;
    if (queue->head == NULL)
        queue->tail = NULL;
    queue->bytes -= chunk->size - chunk->done;
    if (chunk->from != NULL)
        channel_consumed(chunk->from, chunk->size - chunk->done - chunk->extra);
    budget_give(sizeof *chunk + chunk->size);
    free(chunk);
}

int queue_write(struct queue *queue, int fd, bool packets)
{
    while (queue->head != NULL) {
        struct chunk *chunk = queue->head;
        ssize_t wrote = write(fd, chunk->data + chunk->done, chunk->size - chunk->done);
        if (wrote < 0) {
            if (errno == EINTR)
                continue;
            return errno == EAGAIN ? 1 : -1;
        }
        if (packets || (size_t)wrote == chunk->size - chunk->done) {
            drop_head(queue);
            continue;
        }
        chunk->done += (size_t)wrote;
        queue->bytes -= (size_t)wrote;
        if (chunk->from != NULL)
            channel_consumed(chunk->from, (size_t)wrote);
    }
    return 0;
}

void queue_forget(struct queue *queue, const struct channel *from)
{
    for (struct chunk *chunk = queue->head; chunk != NULL; chunk = chunk->next)
        if (chunk->from == from)
            chunk->from = NULL;
}

void queue_clear(struct queue *queue)
{
    while (queue->head != NULL)
        drop_head(queue);
}
