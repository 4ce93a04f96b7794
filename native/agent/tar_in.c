/* Unpacking a tar stream into a folder. Runs in a worker, with the workload's rights. */
#include "tar.h"
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HOLE 4096

struct node {
    dev_t device;
    ino_t inode;
};

struct late_mode {
    struct late_mode *next;
    unsigned mode;
    char name[];
};

struct unpacking {
    int root, file, parent; /* `parent`: the folder of `parent_name`, kept for the next entry */
    char *parent_name;
    struct timespec times[2];
    off_t position;
    bool hole;
    uint64_t entries;
    struct node *links; /* symlinks that this archive made: an open hash table */
    size_t link_count, link_capacity;
    struct late_mode *late;
};

static struct node *slot(struct node *table, size_t capacity, dev_t device, ino_t inode)
{
    size_t at = (size_t)((inode * 0x9E3779B97F4A7C15u) ^ device) & (capacity - 1);
    while (table[at].inode != 0 && (table[at].inode != inode || table[at].device != device))
        at = (at + 1) & (capacity - 1);
    return &table[at];
}

static bool is_ours(const struct unpacking *unpacking, const struct stat *stat)
{
    return unpacking->link_count != 0 &&
           slot(unpacking->links, unpacking->link_capacity, stat->st_dev, stat->st_ino)->inode != 0;
}

static int remember(struct unpacking *unpacking, const struct stat *stat)
{
    if (unpacking->link_count * 2 >= unpacking->link_capacity) {
        size_t capacity = unpacking->link_capacity != 0 ? unpacking->link_capacity * 2 : 64;
        struct node *table = calloc(capacity, sizeof *table);
        if (table == NULL)
            return ENOMEM;
        for (size_t i = 0; i < unpacking->link_capacity; i++)
            if (unpacking->links[i].inode != 0)
                *slot(table, capacity, unpacking->links[i].device, unpacking->links[i].inode) = unpacking->links[i];
        free(unpacking->links);
        unpacking->links = table;
        unpacking->link_capacity = capacity;
    }
    struct node *node = slot(unpacking->links, unpacking->link_capacity, stat->st_dev, stat->st_ino);
    if (node->inode == 0)
        unpacking->link_count++;
    *node = (struct node){stat->st_dev, stat->st_ino};
    return 0;
}

/* One step down. Links that were there before are followed (it is the workload's tree), the archive's own never. */
static int step(struct unpacking *unpacking, int folder, const char *name, int *next)
{
    struct stat stat;
    if (fstatat(folder, name, &stat, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno != ENOENT || mkdirat(folder, name, 0755) < 0)
            return errno;
    } else if (S_ISLNK(stat.st_mode) && is_ours(unpacking, &stat))
        return EINVAL;
    *next = openat(folder, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return *next < 0 ? errno : 0;
}

/* The folder that an entry lies in, and the entry's own name there. */
static int parent_of(struct unpacking *unpacking, const char *name, int *folder, const char **leaf)
{
    const char *slash = strrchr(name, '/');
    size_t size = slash != NULL ? (size_t)(slash - name) : 0;
    *leaf = slash != NULL ? slash + 1 : name;
    if (size == 0) {
        *folder = unpacking->root;
        return 0;
    }
    if (unpacking->parent_name != NULL && strlen(unpacking->parent_name) == size &&
        memcmp(unpacking->parent_name, name, size) == 0) {
        *folder = unpacking->parent;
        return 0;
    }
    int at = unpacking->root;
    for (const char *part = name; part < name + size;) {
        char single[256];
        size_t length = strcspn(part, "/");
        memcpy(single, part, length); /* at most 255: the reader has checked */
        single[length] = 0;
        int next = -1, error = step(unpacking, at, single, &next);
        if (at != unpacking->root)
            close(at);
        if (error != 0)
            return error;
        at = next;
        part += length + 1;
    }
    if (unpacking->parent_name != NULL) {
        free(unpacking->parent_name);
        close(unpacking->parent);
    }
    unpacking->parent_name = strndup(name, size);
    if (unpacking->parent_name == NULL) {
        close(at);
        return ENOMEM;
    }
    *folder = unpacking->parent = at;
    return 0;
}

static int make_folder(struct unpacking *unpacking, int parent, const char *leaf, const struct tar_entry *entry)
{
    struct stat stat;
    if (mkdirat(parent, leaf, entry->mode | 0700) < 0) {
        int error = errno;
        if (error != EEXIST || fstatat(parent, leaf, &stat, AT_SYMLINK_NOFOLLOW) < 0)
            return error;
        if (S_ISLNK(stat.st_mode) && is_ours(unpacking, &stat))
            return EINVAL;
        return fstatat(parent, leaf, &stat, 0) == 0 && S_ISDIR(stat.st_mode) ? 0 : EEXIST;
    }
    if ((entry->mode & 0700) == 0700)
        return 0;
    struct late_mode *late = malloc(sizeof *late + strlen(entry->name) + 1);
    if (late == NULL)
        return ENOMEM;
    strcpy(late->name, entry->name);
    late->mode = entry->mode;
    late->next = unpacking->late; /* innermost first */
    unpacking->late = late;
    return 0;
}

static int make_symlink(struct unpacking *unpacking, int parent, const char *leaf, const struct tar_entry *entry)
{
    struct stat stat;
    if (symlinkat(entry->link, parent, leaf) < 0 || fstatat(parent, leaf, &stat, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    return remember(unpacking, &stat);
}

/* The target's folder is looked up by itself: `parent` is kept open by a copy, since looking up may close it. */
static int make_hardlink(struct unpacking *unpacking, int parent, const char *leaf, const struct tar_entry *entry)
{
    const char *other;
    int folder, copy = fcntl(parent, F_DUPFD_CLOEXEC, 3);
    if (copy < 0)
        return errno;
    int error = parent_of(unpacking, entry->link, &folder, &other);
    if (error == 0 && linkat(folder, other, copy, leaf, 0) < 0)
        error = errno;
    close(copy);
    return error;
}

static int on_entry(void *context, const struct tar_entry *entry)
{
    struct unpacking *unpacking = context;
    const char *leaf;
    int parent;
    unpacking->entries++;
    if (entry->name[0] == 0)
        return 0; /* the folder itself */
    int error = parent_of(unpacking, entry->name, &parent, &leaf);
    if (error != 0)
        return error;
    if (entry->kind == TAR_FOLDER)
        return make_folder(unpacking, parent, leaf, entry);
    if (unlinkat(parent, leaf, 0) < 0 && errno != ENOENT)
        return errno;
    if (entry->kind == TAR_SYMLINK)
        return make_symlink(unpacking, parent, leaf, entry);
    if (entry->kind == TAR_HARDLINK)
        return make_hardlink(unpacking, parent, leaf, entry);
    if (entry->kind == TAR_FIFO)
        return mkfifoat(parent, leaf, entry->mode) < 0 ? errno : 0;
    unpacking->file = openat(parent, leaf, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, entry->mode);
    if (unpacking->file < 0)
        return errno;
    unpacking->position = 0;
    unpacking->hole = false;
    unpacking->times[0] = (struct timespec){.tv_nsec = UTIME_OMIT};
    unpacking->times[1] = (struct timespec){.tv_sec = (time_t)entry->mtime, .tv_nsec = (long)entry->mtime_ns};
    return 0;
}

static bool all_zero(const uint8_t *data, size_t size)
{
    return data[0] == 0 && memcmp(data, data + 1, size - 1) == 0;
}

/* Runs of zeros become holes, so that a sparse file does not fill the disk. */
static int on_data(void *context, const uint8_t *data, size_t size)
{
    struct unpacking *unpacking = context;
    while (size != 0) {
        size_t piece = HOLE - (size_t)(unpacking->position % HOLE);
        if (piece > size)
            piece = size;
        if (all_zero(data, piece)) {
            unpacking->hole = true;
        } else {
            if (piece == HOLE) /* as much as is not zero at once */
                while (piece + HOLE <= size && !all_zero(data + piece, HOLE))
                    piece += HOLE;
            ssize_t wrote = pwrite(unpacking->file, data, piece, unpacking->position);
            if (wrote < 0 && errno == EINTR)
                continue;
            if (wrote < 0)
                return errno;
            piece = (size_t)wrote;
        }
        unpacking->position += (off_t)piece;
        data += piece;
        size -= piece;
    }
    return 0;
}

static int on_end(void *context)
{
    struct unpacking *unpacking = context;
    int error = 0;
    if (unpacking->file < 0)
        return 0;
    if (unpacking->hole && ftruncate(unpacking->file, unpacking->position) < 0)
        error = errno;
    futimens(unpacking->file, unpacking->times);
    if (close(unpacking->file) < 0 && error == 0)
        error = errno;
    unpacking->file = -1;
    return error;
}

static int late_modes(struct unpacking *unpacking)
{
    for (const struct late_mode *late = unpacking->late; late != NULL; late = late->next) {
        const char *leaf;
        int parent, error = parent_of(unpacking, late->name, &parent, &leaf);
        if (error != 0)
            return error;
        int fd = openat(parent, leaf, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0 || fchmod(fd, late->mode) < 0)
            return errno;
        close(fd);
    }
    return 0;
}

_Noreturn void tar_in_run(struct work *work)
{
    static struct unpacking unpacking = {.file = -1};
    static struct tar_reader reader;
    const struct tar_sink sink = {on_entry, on_data, on_end, &unpacking};
    if (make_parents(work->path, true, 0755) < 0)
        work_fail(work, errno, "folder");
    unpacking.root = open(work->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (unpacking.root < 0)
        work_fail(work, errno, "folder");
    tar_start(&reader, &sink);
    int error = 0;
    for (;;) {
        size_t size;
        const uint8_t *data = work_receive(work, &size);
        if (size == 0)
            break;
        error = tar_feed(&reader, data, size);
        if (error != 0)
            work_fail(work, error, "archive");
    }
    error = tar_finish(&reader);
    if (error == 0)
        error = late_modes(&unpacking);
    if (error != 0)
        work_fail(work, error, "archive");
    uint8_t bytes[16];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, unpacking.entries);
    work_done(work, &out);
}
