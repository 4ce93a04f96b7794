/* Packing a file or folder as a pax tar. Runs in a worker, with the workload's rights. */
#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK 512
#define PATH_LIMIT 4096
#define LEVELS_MAX 1000

static struct work *host;
static uint8_t *pending; /* NULL: nothing is put together */
static size_t pending_size, capacity;
static char path[PATH_LIMIT];

static void flush(void)
{
    if (pending_size != 0)
        work_data(host, pending_size);
    pending = NULL;
    pending_size = 0;
}

/* Where the next bytes go: at least one and at most `want`, which it lowers. */
static uint8_t *next(size_t *want)
{
    if (pending == NULL)
        pending = work_space(host, &capacity);
    if (*want > capacity - pending_size)
        *want = capacity - pending_size;
    return pending + pending_size;
}

static void took(size_t size)
{
    pending_size += size;
    if (pending_size == capacity)
        flush();
}

static void put(const void *data, size_t size)
{
    const uint8_t *from = data;
    while (size != 0) {
        size_t piece = size;
        memcpy(next(&piece), from, piece);
        took(piece);
        from += piece;
        size -= piece;
    }
}

static void pad(uint64_t size)
{
    static const uint8_t zeros[BLOCK];
    put(zeros, (size_t)((BLOCK - size % BLOCK) % BLOCK));
}

static void octal(uint8_t *field, size_t digits, uint64_t value)
{
    for (size_t i = digits; i-- > 0; value >>= 3)
        field[i] = (uint8_t)('0' + (value & 7));
}

static void put_header(const char *name, char type, const struct stat *stat, uint64_t size, const char *link)
{
    uint8_t block[BLOCK] = {0};
    size_t named = strlen(name), linked = strlen(link);
    memcpy(block, name, named < 100 ? named : 100);
    octal(block + 100, 7, stat->st_mode & 07777);
    octal(block + 108, 7, stat->st_uid > 07777777 ? 07777777 : stat->st_uid);
    octal(block + 116, 7, stat->st_gid > 07777777 ? 07777777 : stat->st_gid);
    octal(block + 124, 11, size > 077777777777 ? 0 : size);
    octal(block + 136, 11, stat->st_mtim.tv_sec < 0 ? 0 : (uint64_t)stat->st_mtim.tv_sec & 077777777777);
    memset(block + 148, ' ', 8);
    block[156] = (uint8_t)type;
    memcpy(block + 157, link, linked < 100 ? linked : 100);
    memcpy(block + 257, "ustar\00000", 8);
    unsigned sum = 0;
    for (size_t i = 0; i < BLOCK; i++)
        sum += block[i];
    octal(block + 148, 6, sum);
    block[154] = 0;
    put(block, sizeof block);
}

/* One record "length key=value\n", whose length counts itself. */
static size_t record(char *out, const char *key, const char *value)
{
    size_t rest = strlen(key) + strlen(value) + 3, size = rest + 1;
    for (;;) {
        int digits = snprintf(NULL, 0, "%zu", size);
        if (rest + (size_t)digits == size)
            break;
        size = rest + (size_t)digits;
    }
    return (size_t)sprintf(out, "%zu %s=%s\n", size, key, value);
}

static bool plain(const char *text, size_t limit)
{
    size_t size = strlen(text);
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)text[i] >= 128)
            return false;
    return size <= limit;
}

static void put_entry(const char *name, char type, const struct stat *stat, uint64_t size, const char *link)
{
    static char records[3 * PATH_LIMIT];
    size_t used = 0;
    if (!plain(name, 100))
        used += record(records + used, "path", name);
    if (!plain(link, 100))
        used += record(records + used, "linkpath", link);
    if (size > 077777777777) {
        char digits[24];
        snprintf(digits, sizeof digits, "%llu", (unsigned long long)size);
        used += record(records + used, "size", digits);
    }
    if (used != 0) {
        struct stat none = {.st_mode = 0644};
        put_header("pax", 'x', &none, used, "");
        put(records, used);
        pad(used);
    }
    put_header(name, type, stat, size, link);
}

/* Exactly `stat->st_size` bytes follow the header, whatever happens to the file meanwhile. */
static void put_file(int fd, const char *name, const struct stat *stat)
{
    uint64_t size = (uint64_t)stat->st_size, left = size;
    put_entry(name, '0', stat, size, "");
    while (left != 0) {
        size_t want = left < WORKER_PART ? (size_t)left : WORKER_PART;
        uint8_t *space = next(&want);
        ssize_t got = read(fd, space, want);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            work_fail(host, errno, "read");
        if (got == 0) {
            memset(space, 0, want);
            got = (ssize_t)want;
        }
        took((size_t)got);
        left -= (uint64_t)got;
    }
    pad(size);
}

static bool left_out(const char *name)
{
    struct fields list = fields_of(host->fields, host->size);
    struct field field;
    while (fields_next(&list, &field))
        if (field.tag == 2 && field.size == strlen(name) && memcmp(field.data, name, field.size) == 0)
            return true;
    return false;
}

static void pack_folder(int fd, size_t prefix, unsigned level);

static void pack(int folder, const char *name, size_t prefix, unsigned level)
{
    struct stat stat;
    size_t size = strlen(name);
    if (fstatat(folder, name, &stat, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno == ENOENT)
            return; /* it went away */
        work_fail(host, errno, "stat");
    }
    if (prefix + size + 2 >= PATH_LIMIT || level >= LEVELS_MAX)
        work_fail(host, ENAMETOOLONG, "path");
    memcpy(path + prefix, name, size + 1);
    if (S_ISLNK(stat.st_mode)) {
        static char target[PATH_LIMIT];
        ssize_t length = readlinkat(folder, name, target, sizeof target - 1);
        if (length > 0) {
            target[length] = 0;
            put_entry(path, '2', &stat, 0, target);
        }
        return;
    }
    if (!S_ISDIR(stat.st_mode) && !S_ISREG(stat.st_mode))
        return; /* sockets, pipes and devices can't be carried */
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) {
        if (errno == ENOENT)
            return;
        work_fail(host, errno, "open");
    }
    if (fstat(fd, &stat) < 0)
        work_fail(host, errno, "stat");
    if (S_ISREG(stat.st_mode)) {
        put_file(fd, path, &stat);
        close(fd);
    } else if (S_ISDIR(stat.st_mode)) {
        memcpy(path + prefix + size, "/", 2);
        put_entry(path, '5', &stat, 0, "");
        pack_folder(fd, prefix + size + 1, level + 1);
    } else
        close(fd);
}

static void pack_folder(int fd, size_t prefix, unsigned level)
{
    DIR *folder = fdopendir(fd);
    if (folder == NULL)
        work_fail(host, errno, "open");
    const struct dirent *entry;
    while ((entry = readdir(folder)) != NULL) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || (level == 0 && left_out(name)))
            continue;
        pack(fd, name, prefix, level);
    }
    closedir(folder);
}

_Noreturn void tar_out_run(struct work *work)
{
    static const uint8_t zeros[BLOCK];
    struct stat stat;
    host = work;
    int fd = open(work->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &stat) < 0)
        work_fail(work, errno, "open");
    if (!S_ISDIR(stat.st_mode) && !S_ISREG(stat.st_mode))
        work_fail(work, EINVAL, "neither file nor folder");
    work_reply(work, NULL);
    if (S_ISDIR(stat.st_mode))
        pack_folder(fd, 0, 0);
    else {
        const char *slash = strrchr(work->path, '/');
        put_file(fd, slash != NULL ? slash + 1 : work->path, &stat);
    }
    put(zeros, sizeof zeros);
    put(zeros, sizeof zeros);
    flush();
    work_eof(work);
}
