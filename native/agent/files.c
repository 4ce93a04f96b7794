/* File operations on one path: read, write, stat, move, remove, mkdir. Runs in a worker. */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1u
#endif

#define WRITE_PARENTS 1u
#define WRITE_APPEND 2u
#define WRITE_DIRECT 4u
#define WRITE_NEW 8u

static int stat_following(const char *path, struct stat *result) { return fstatat(AT_FDCWD, path, result, 0); }

void write_stat(struct writer *out, const char *path, const struct stat *stat, const char *target, size_t target_size)
{
    unsigned type = S_ISREG(stat->st_mode) ? 1 : S_ISDIR(stat->st_mode) ? 2 : S_ISLNK(stat->st_mode) ? 3 : 0;
    write_bytes(out, 1, path, strlen(path));
    write_number(out, 2, type);
    write_number(out, 3, (uint64_t)stat->st_size);
    write_number(out, 4, stat->st_mode & 07777);
    write_number(out, 5, (uint64_t)stat->st_mtim.tv_sec * 1000000000u + (uint64_t)stat->st_mtim.tv_nsec);
    write_number(out, 6, stat->st_uid);
    write_number(out, 7, stat->st_gid);
    if (type == 3)
        write_bytes(out, 8, target, target_size);
    write_number(out, 9, stat->st_ino);
}

static _Noreturn void read_file(struct work *work)
{
    static uint8_t bytes[FRAME_PAYLOAD_MAX];
    struct stat stat;
    int fd = open(work->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &stat) < 0)
        work_fail(work, errno, "open");
    if (S_ISDIR(stat.st_mode))
        work_fail(work, EISDIR, "open");
    if (!S_ISREG(stat.st_mode))
        work_fail(work, EINVAL, "not a file"); /* it might never end, or never begin */
    uint64_t left = work->given >> 3 & 1 ? work->numbers[3] : UINT64_MAX;
    if (work->numbers[2] > INT64_MAX || (work->numbers[2] != 0 && lseek(fd, (off_t)work->numbers[2], SEEK_SET) < 0))
        work_fail(work, EINVAL, "offset");
    struct writer out = writer_of(bytes, sizeof bytes);
    write_stat(&out, work->path, &stat, NULL, 0);
    work_reply(work, &out);
    while (left != 0) {
        size_t size;
        uint8_t *space = work_space(work, &size);
        ssize_t got = read(fd, space, left < size ? (size_t)left : size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            work_fail(work, errno, "read");
        if (got == 0)
            break;
        work_data(work, (size_t)got);
        left -= (uint64_t)got;
    }
    work_eof(work);
}

/* Makes the folders above `path` (and itself, if `last`). An existing folder is fine. */
int make_parents(const char *path, bool last, mode_t mode)
{
    char *copy = strdup(path);
    if (copy == NULL)
        return -1;
    size_t size = strlen(copy);
    while (size > 1 && copy[size - 1] == '/')
        copy[--size] = 0;
    int result = 0;
    for (size_t at = 1; at <= size && result == 0; at++) {
        bool end = at == size;
        if ((!end && copy[at] != '/') || copy[at - 1] == '/' || (end && !last))
            continue;
        copy[at] = 0;
        if (mkdir(copy, end ? mode : 0755) < 0) {
            struct stat stat;
            int error = errno;
            if (lstat(copy, &stat) < 0 || (S_ISLNK(stat.st_mode) && stat_following(copy, &stat) < 0) ||
                !S_ISDIR(stat.st_mode)) {
                errno = error;
                result = -1;
            }
        }
        if (!end)
            copy[at] = '/';
    }
    int error = errno;
    free(copy);
    errno = error;
    return result;
}

/* A name beside `path` that nobody uses. */
static int open_temporary(const char *path, mode_t mode, char **name)
{
    const char *slash = strrchr(path, '/');
    size_t folder = slash != NULL ? (size_t)(slash - path) + 1 : 0;
    char *made = malloc(folder + 32);
    if (made == NULL)
        return -1;
    memcpy(made, path, folder);
    for (int i = 0; i < 16; i++) {
        uint64_t random = now_ns();
        if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0)
            random += (uint64_t)i;
        snprintf(made + folder, 32, ".rf-%016llx", (unsigned long long)random);
        int fd = open(made, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
        if (fd >= 0 || errno != EEXIST) {
            *name = made;
            return fd;
        }
    }
    return -1;
}

static void receive_into(const struct work *work, int fd)
{
    for (;;) {
        size_t size;
        const uint8_t *data = work_receive(work, &size);
        if (size == 0)
            return;
        while (size != 0) {
            ssize_t wrote = write(fd, data, size);
            if (wrote < 0 && errno == EINTR)
                continue;
            if (wrote < 0)
                work_fail(work, errno, "write");
            data += wrote;
            size -= (size_t)wrote;
        }
    }
}

static int rename_new(const char *from, const char *to)
{
    if (syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return -1;
    struct stat stat;
    if (lstat(to, &stat) == 0) {
        errno = EEXIST;
        return -1;
    }
    return rename(from, to);
}

static _Noreturn void written(const struct work *work, int fd)
{
    uint8_t bytes[16];
    struct stat stat = {0};
    struct writer out = writer_of(bytes, sizeof bytes);
    fstat(fd, &stat);
    write_number(&out, 1, (uint64_t)stat.st_size);
    work_done(work, &out);
}

static _Noreturn void write_file(struct work *work)
{
    uint64_t flags = work->numbers[3];
    mode_t mode = work->given >> 2 & 1 ? (mode_t)(work->numbers[2] & 0777) : 0644;
    struct stat stat;
    bool exists = lstat(work->path, &stat) == 0;
    if (flags & WRITE_PARENTS && make_parents(work->path, false, 0755) < 0)
        work_fail(work, errno, "parents");
    if (exists && flags & WRITE_NEW)
        work_fail(work, EEXIST, "open");
    if (exists && S_ISLNK(stat.st_mode)) { /* what it points at is written, the link stays */
        char *real = realpath(work->path, NULL);
        if (real != NULL)
            work->path = real;
        exists = lstat(work->path, &stat) == 0;
    }
    if (exists && S_ISDIR(stat.st_mode))
        work_fail(work, EISDIR, "open");
    if (exists && !S_ISREG(stat.st_mode) && !S_ISLNK(stat.st_mode))
        work_fail(work, EINVAL, "not a file");
    if (flags & (WRITE_APPEND | WRITE_DIRECT) || (exists && S_ISLNK(stat.st_mode))) {
        int how = flags & WRITE_APPEND ? O_APPEND : O_TRUNC;
        int fd = open(work->path, O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | how |
                      (flags & WRITE_NEW ? O_EXCL : 0), mode);
        if (fd < 0)
            work_fail(work, errno, "open");
        receive_into(work, fd);
        written(work, fd);
    }
    int fd = open_temporary(work->path, mode, &work_undo);
    if (fd < 0) {
        work_undo = NULL;
        work_fail(work, errno, "open");
    }
    receive_into(work, fd);
    if (fdatasync(fd) < 0 && errno != EINVAL)
        work_fail(work, errno, "sync");
    if ((flags & WRITE_NEW ? rename_new(work_undo, work->path) : rename(work_undo, work->path)) < 0)
        work_fail(work, errno, "rename");
    work_undo = NULL;
    written(work, fd);
}

static _Noreturn void stat_path(struct work *work)
{
    static uint8_t bytes[16384];
    static char target[4096];
    struct stat stat;
    ssize_t size = 0;
    if ((work->numbers[2] & 1 ? stat_following(work->path, &stat) : lstat(work->path, &stat)) < 0)
        work_fail(work, errno, "stat");
    if (S_ISLNK(stat.st_mode))
        size = readlink(work->path, target, sizeof target);
    struct writer out = writer_of(bytes, sizeof bytes);
    write_stat(&out, work->path, &stat, target, size < 0 ? 0 : (size_t)size);
    work_done(work, &out);
}

static _Noreturn void remove_path(struct work *work)
{
    struct stat stat;
    if (lstat(work->path, &stat) < 0) {
        if (errno == ENOENT && work->numbers[2] & 2)
            work_done(work, NULL);
        work_fail(work, errno, "stat");
    }
    int result;
    if (!S_ISDIR(stat.st_mode))
        result = unlink(work->path);
    else if (work->numbers[2] & 1)
        result = tree_remove(AT_FDCWD, work->path);
    else
        result = rmdir(work->path);
    if (result < 0)
        work_fail(work, errno, "remove");
    work_done(work, NULL);
}

_Noreturn void files_run(struct work *work)
{
    mode_t mode = work->given >> 2 & 1 ? (mode_t)(work->numbers[2] & 0777) : 0755;
    switch (work->operation) {
    case 16: read_file(work);
    case 17: write_file(work);
    case 19: stat_path(work);
    case 20:
        if ((work->numbers[3] & 1 ? rename_new(work->path, work->other) : rename(work->path, work->other)) < 0)
            work_fail(work, errno, "move");
        work_done(work, NULL);
    case 21: remove_path(work);
    case 22:
        if ((work->numbers[3] & 1 ? make_parents(work->path, true, mode) : mkdir(work->path, mode)) < 0)
            work_fail(work, errno, "mkdir");
        work_done(work, NULL);
    default: work_fail(work, ENOSYS, "operation");
    }
}
