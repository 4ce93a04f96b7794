/* The beginning of a worker process, and its packets. Blocking calls are fine from here on. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SMALL 16384 /* bytes that a packet carries as quickly as shared memory */

char *work_undo;

static _Noreturn void gone(void)
{
    if (work_undo != NULL)
        unlink(work_undo);
    _exit(1);
}

void work_packet(const struct work *work, uint8_t type, const void *data, size_t size)
{
    struct iovec parts[2] = {{&type, 1}, {(void *)data, size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = size != 0 ? 2 : 1};
    while (sendmsg(work->fd, &message, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            gone();
}

uint8_t *work_space(struct work *work, size_t *size)
{
    static uint8_t own[WORKER_PIECE];
    *size = work->shared != NULL ? WORKER_PART : sizeof own;
    if (work->shared == NULL)
        return own;
    while (work->lent == WORKER_PARTS) {
        work_receive(work, size);
        work->lent -= work->packet[0] == FRAME_CREDIT;
        *size = WORKER_PART;
    }
    return work->shared + (size_t)work->part * WORKER_PART;
}

void work_data(struct work *work, size_t size)
{
    uint8_t told[4];
    size_t capacity;
    uint8_t *space = work_space(work, &capacity);
    if (work->shared == NULL || size <= SMALL) {
        work_packet(work, FRAME_DATA, space, size);
        return;
    }
    put_u32(told, (uint32_t)size);
    work_packet(work, WORKER_SHARED, told, sizeof told);
    work->part = (work->part + 1) % WORKER_PARTS;
    work->lent++;
}

void work_reply(const struct work *work, const struct writer *fields)
{
    if (fields != NULL && fields->full)
        work_fail(work, ENAMETOOLONG, "reply");
    work_packet(work, FRAME_REPLY, fields != NULL ? fields->data : NULL, fields != NULL ? fields->size : 0);
}

_Noreturn void work_done(const struct work *work, const struct writer *fields)
{
    work_reply(work, fields);
    _exit(0);
}

_Noreturn void work_eof(const struct work *work)
{
    work_packet(work, FRAME_EOF, NULL, 0);
    _exit(0);
}

_Noreturn void work_fail(const struct work *work, int error, const char *what)
{
    uint8_t bytes[64];
    put_u32(bytes, (uint32_t)error);
    size_t size = strlen(what);
    if (size > sizeof bytes - 4)
        size = sizeof bytes - 4;
    memcpy(bytes + 4, what, size);
    if (work_undo != NULL)
        unlink(work_undo);
    work_packet(work, FRAME_ERROR, bytes, size + 4);
    _exit(1);
}

const uint8_t *work_receive(const struct work *work, size_t *size)
{
    ssize_t got;
    do
        got = recv(work->fd, work->packet, WORKER_PACKET, 0);
    while (got < 0 && errno == EINTR);
    if (got < 1)
        gone();
    *size = work->packet[0] == FRAME_DATA ? (size_t)got - 1 : 0;
    return work->packet + 1;
}

/* Which tags are text and which are numbers; a field of the wrong kind is the caller's mistake. */
static unsigned texts_of(uint16_t operation)
{
    return operation == 20 ? 6u : operation == 48 || operation == 49 ? 0u : 2u;
}

static unsigned numbers_of(uint16_t operation)
{
    switch (operation) {
    case 16: return 1u << 2 | 1u << 3 | 1u << 8;
    case 17: case 18: case 22: return 1u << 2 | 1u << 3;
    case 19: case 21: case 23: return 1u << 2;
    case 20: return 1u << 3;
    case 48: return 1u << 5;
    default: return 0;
    }
}

static void parse(struct work *work)
{
    struct fields list = fields_of(work->fields, work->size);
    struct field field;
    while (fields_next(&list, &field)) {
        if (field.tag > 8)
            continue;
        if (texts_of(work->operation) >> field.tag & 1) {
            char *text = field_text(&field, false);
            if (text == NULL)
                work_fail(work, errno, "path");
            *(field.tag == 1 ? &work->path : &work->other) = text;
        } else if (numbers_of(work->operation) >> field.tag & 1) {
            if (!field_number(&field, &work->numbers[field.tag]))
                work_fail(work, EINVAL, "fields");
        }
        work->given |= 1u << field.tag;
    }
    if ((texts_of(work->operation) & 2 && work->path == NULL) ||
        (texts_of(work->operation) & 4 && work->other == NULL))
        work_fail(work, EINVAL, "path");
}

_Noreturn void work_start(int fd, uint16_t operation, const uint8_t *fields, size_t size, uint8_t *shared)
{
    struct work work = {
        .fd = 3, .operation = operation, .fields = fields, .size = size, .packet = scratch, .shared = shared};
    struct rlimit files;
    if (operation == 48)
        secrets_prepare();
    if (dup2(fd, 3) < 0)
        _exit(1);
    if (syscall(SYS_close_range, 4u, 0x7fffffffu, 0u) < 0)
        for (int other = 4; other < 4096; other++)
            close(other);
    if (!become_workload(false))
        work_fail(&work, errno, "identity");
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    umask(0);
    if (chdir(config.workdir) < 0 && errno != ENOENT)
        work_fail(&work, errno, "workdir");
    parse(&work);
    switch (operation) {
    case 18: tree_list(&work);
    case 23: watch_run(&work);
    case 24: tar_in_run(&work);
    case 25: tar_out_run(&work);
    case 48: bind_run(&work);
    case 49: stats_run(&work);
    default: files_run(&work);
    }
}
