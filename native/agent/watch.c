/* Watching folders by inotify. Runs in a worker, with the workload's rights, until the agent hangs up. */
#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#define WATCHES_MAX 8192
#define MASK (IN_CREATE | IN_CLOSE_WRITE | IN_MODIFY | IN_DELETE | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | \
              IN_DELETE_SELF | IN_ONLYDIR | IN_DONT_FOLLOW | IN_EXCL_UNLINK)

enum { CREATED = 1, MODIFIED, DELETED, ATTRIBUTES, MOVED };

struct place {
    int descriptor;
    char *path; /* below the watched folder; "" is itself */
};

static struct place *places;
static size_t place_count;
static int notify;
static const struct work *host;

static struct place *find(int descriptor)
{
    for (size_t i = 0; i < place_count; i++)
        if (places[i].descriptor == descriptor)
            return &places[i];
    return NULL;
}

static void tell(const char *path, unsigned kind, bool folder)
{
    static uint8_t bytes[8192];
    struct writer out = writer_of(bytes, sizeof bytes);
    put_u16(bytes, 2);
    out.size = 2;
    write_bytes(&out, 1, path, strlen(path));
    write_number(&out, 2, kind);
    write_number(&out, 3, folder);
    if (!out.full)
        work_packet(host, FRAME_EVENT, out.data, out.size);
}

static void tell_overflow(void)
{
    uint8_t bytes[2];
    put_u16(bytes, 3);
    work_packet(host, FRAME_EVENT, bytes, sizeof bytes);
}

static bool add(const char *real, const char *below)
{
    int descriptor = inotify_add_watch(notify, real, below[0] ? MASK : MASK & ~(uint32_t)IN_DONT_FOLLOW);
    if (descriptor < 0)
        return false;
    struct place *known = find(descriptor);
    char *path = strdup(below);
    if (path == NULL)
        return false;
    if (known != NULL) { /* it was moved */
        free(known->path);
        known->path = path;
        return true;
    }
    struct place *more = place_count < WATCHES_MAX ? realloc(places, (place_count + 1) * sizeof *places) : NULL;
    if (more == NULL) {
        inotify_rm_watch(notify, descriptor);
        free(path);
        errno = ENOSPC;
        return false;
    }
    places = more;
    places[place_count++] = (struct place){descriptor, path};
    return true;
}

static char *join(const char *left, const char *right)
{
    size_t a = strlen(left), b = strlen(right);
    char *path = malloc(a + b + 2);
    if (path == NULL)
        return NULL;
    memcpy(path, left, a);
    if (a != 0)
        path[a++] = '/';
    memcpy(path + a, right, b + 1);
    return path;
}

/* Watches a folder and all below; `new_too`: what is found in it is told, since it came before the watch. */
static bool add_tree(const char *root, const char *below, bool new_too)
{
    char *real = below[0] ? join(root, below) : strdup(root);
    if (real == NULL || strlen(real) >= 4096) {
        free(real);
        return true;
    }
    if (!add(real, below)) {
        int error = errno;
        free(real);
        errno = error;
        return error != ENOSPC && error != EMFILE && below[0]; /* a folder below may vanish or be closed to us */
    }
    DIR *folder = opendir(real);
    free(real);
    bool all = true;
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        struct stat stat;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        bool is_folder = entry->d_type == DT_DIR;
        if (entry->d_type == DT_UNKNOWN && fstatat(dirfd(folder), entry->d_name, &stat, AT_SYMLINK_NOFOLLOW) == 0)
            is_folder = S_ISDIR(stat.st_mode);
        char *path = join(below, entry->d_name);
        if (path == NULL)
            break;
        if (new_too)
            tell(path, CREATED, is_folder);
        if (is_folder && !add_tree(root, path, new_too))
            all = false;
        free(path);
    }
    if (folder != NULL)
        closedir(folder);
    return all;
}

/* A file that file.write has not renamed yet: nobody asked for it. */
static bool temporary(const char *name)
{
    return strncmp(name, ".rf-", 4) == 0 && strlen(name) == 20 && strspn(name + 4, "0123456789abcdef") == 16;
}

static void take(const char *root, const struct inotify_event *event, bool recursive)
{
    if (event->mask & IN_Q_OVERFLOW) {
        tell_overflow();
        return;
    }
    struct place *place = find(event->wd);
    if (place == NULL)
        return;
    if (event->mask & IN_IGNORED) {
        free(place->path);
        *place = places[--place_count];
        return;
    }
    bool folder = event->mask & IN_ISDIR;
    static uint32_t renamed; /* by file.write: what moves in is new content, not a file that lay elsewhere */
    if (event->len != 0 && !folder && temporary(event->name)) {
        if (event->mask & IN_MOVED_FROM)
            renamed = event->cookie;
        return;
    }
    if (event->mask & IN_DELETE_SELF) {
        if (place->path[0] == 0)
            tell("", DELETED, true);
        return;
    }
    char *path = event->len != 0 ? join(place->path, event->name) : strdup(place->path);
    if (path == NULL)
        return;
    unsigned kind = event->mask & IN_CREATE ? CREATED : event->mask & (IN_MODIFY | IN_CLOSE_WRITE) ? MODIFIED
                  : event->mask & IN_DELETE ? DELETED : event->mask & IN_ATTRIB ? ATTRIBUTES : MOVED;
    if (kind == MOVED && event->cookie != 0 && event->cookie == renamed)
        kind = MODIFIED;
    tell(path, kind, folder || event->len == 0);
    if (recursive && folder && event->mask & (IN_CREATE | IN_MOVED_TO) && !add_tree(root, path, event->mask & IN_CREATE))
        tell_overflow();
    free(path);
}

_Noreturn void watch_run(struct work *work)
{
    static uint8_t buffer[16384] __attribute__((aligned(8)));
    bool recursive = work->numbers[2] & 1;
    host = work;
    notify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (notify < 0)
        work_fail(work, errno, "inotify");
    bool all = recursive ? add_tree(work->path, "", false) : add(work->path, "");
    if (!all && place_count == 0)
        work_fail(work, errno, "watch");
    work_reply(work, NULL);
    if (!all)
        tell_overflow();
    for (;;) {
        struct pollfd wait[2] = {{.fd = notify, .events = POLLIN}, {.fd = work->fd, .events = POLLIN}};
        if (poll(wait, 2, -1) < 0)
            continue;
        if (wait[1].revents != 0) {
            size_t size;
            work_receive(work, &size); /* ends the process when the agent has hung up */
        }
        ssize_t got = read(notify, buffer, sizeof buffer);
        for (ssize_t at = 0; at + (ssize_t)sizeof(struct inotify_event) <= got;) {
            const struct inotify_event *event = (const struct inotify_event *)(buffer + at);
            at += (ssize_t)sizeof *event + (ssize_t)event->len;
            take(work->path, event, recursive);
        }
    }
}
