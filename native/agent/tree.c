/* Whole folders: listing and removing, however deep and whatever the names. Runs in a worker. */
#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATH_LIMIT 4096
#define LEVELS_MAX 1000 /* one descriptor each; a path of 4,096 bytes could have twice as many */

struct listing {
    struct work *work;
    uint64_t depth, left;
    char path[PATH_LIMIT];
    uint8_t batch[WORKER_PIECE];
    size_t used;
};

static void flush(struct listing *listing)
{
    if (listing->used != 0)
        work_packet(listing->work, FRAME_DATA, listing->batch, listing->used);
    listing->used = 0;
}

static void add_entry(struct listing *listing, int folder, const char *name, const struct stat *stat)
{
    static char target[PATH_LIMIT];
    ssize_t size = S_ISLNK(stat->st_mode) ? readlinkat(folder, name, target, sizeof target) : 0;
    for (int attempt = 0; attempt < 2; attempt++) {
        struct writer out = writer_of(listing->batch + listing->used, sizeof listing->batch - listing->used);
        uint8_t length[4] = {0};
        write_raw(&out, length, sizeof length);
        write_stat(&out, listing->path, stat, target, size < 0 ? 0 : (size_t)size);
        if (!out.full) {
            put_u32(out.data, (uint32_t)(out.size - 4));
            listing->used += out.size;
            return;
        }
        flush(listing);
    }
}

static bool dots(const char *name) { return name[0] == '.' && (name[1] == 0 || (name[1] == '.' && name[2] == 0)); }

/* What vanishes or can't be opened meanwhile is left out; only the top folder's errors are told. */
static void list_folder(struct listing *listing, int fd, size_t prefix, uint64_t level)
{
    DIR *folder = fdopendir(fd);
    if (folder == NULL) {
        close(fd);
        return;
    }
    const struct dirent *entry;
    while (listing->left != 0 && (entry = readdir(folder)) != NULL) {
        struct stat stat;
        size_t size = strlen(entry->d_name);
        if (dots(entry->d_name) || prefix + size + 1 >= PATH_LIMIT ||
            fstatat(fd, entry->d_name, &stat, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        memcpy(listing->path + prefix, entry->d_name, size + 1);
        add_entry(listing, fd, entry->d_name, &stat);
        listing->left--;
        if (!S_ISDIR(stat.st_mode) || level >= listing->depth || level >= LEVELS_MAX)
            continue;
        int below = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (below < 0)
            continue;
        listing->path[prefix + size] = '/';
        list_folder(listing, below, prefix + size + 1, level + 1);
    }
    closedir(folder);
}

_Noreturn void tree_list(struct work *work)
{
    static struct listing listing;
    listing.work = work;
    listing.depth = work->given >> 2 & 1 ? work->numbers[2] : 1;
    listing.left = work->given >> 3 & 1 ? work->numbers[3] : UINT64_MAX;
    int fd = open(work->path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        work_fail(work, errno, "open");
    work_reply(work, NULL);
    if (listing.depth != 0)
        list_folder(&listing, fd, 0, 1);
    flush(&listing);
    work_eof(work);
}

/* Removes what is not a folder, and says which folder to go into: 1 and its name, 0 if empty, -1. */
static int sweep(int fd, char name[256])
{
    int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = copy < 0 ? NULL : fdopendir(copy);
    if (folder == NULL)
        return -1;
    const struct dirent *entry;
    int result = 0;
    while (result == 0 && (entry = readdir(folder)) != NULL) {
        if (dots(entry->d_name) || unlinkat(fd, entry->d_name, 0) == 0 || errno == ENOENT)
            continue;
        int error = errno;
        struct stat stat;
        if (fstatat(fd, entry->d_name, &stat, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(stat.st_mode)) {
            if (unlinkat(fd, entry->d_name, AT_REMOVEDIR) == 0)
                continue;
            memcpy(name, entry->d_name, strnlen(entry->d_name, 255) + 1);
            name[255] = 0;
            result = 1;
        } else {
            errno = error;
            result = -1;
        }
    }
    int error = errno;
    closedir(folder);
    errno = error;
    return result;
}

/* Goes down and up by "..", so that depth costs neither descriptors nor stack: only the names above. */
int tree_remove(int parent, const char *path)
{
    char name[256];
    char **names = NULL;
    size_t depth = 0, capacity = 0;
    int top = openat(parent, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), fd = top < 0 ? -1 : dup(top);
    while (fd >= 0) {
        int found = sweep(fd, name), next = -1;
        if (found < 0)
            return -1;
        if (found == 0 && depth == 0)
            break;
        if (found == 1) {
            if (depth == capacity) {
                capacity = capacity ? capacity * 2 : 64;
                char **more = realloc(names, capacity * sizeof *names);
                if (more == NULL)
                    return -1;
                names = more;
            }
            names[depth] = strdup(name);
            if (names[depth] == NULL)
                return -1;
            depth++;
            next = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        } else {
            next = openat(fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            depth--;
            if (next >= 0 && unlinkat(next, names[depth], AT_REMOVEDIR) < 0 && errno != ENOENT)
                return -1;
            free(names[depth]);
        }
        close(fd);
        fd = next;
    }
    if (fd < 0)
        return -1;
    close(fd);
    close(top);
    free(names);
    return unlinkat(parent, path, AT_REMOVEDIR);
}
