#include "steps.h"
#include "sys.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

static int write_file(int pid, const char *name, const char *text, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = write(fd, text, size) == (ssize_t)size ? 0 : errno;
    close(fd);
    return error;
}

static int write_map(int pid, const struct step *maps, uint32_t kind)
{
    char text[MAPS_MAX * 36 + 1];
    size_t size = 0;
    for (unsigned i = 0; i < maps->length / sizeof(struct id_map); i++) {
        struct id_map map = plan_map(maps, i);
        if (map.kind == kind)
            size += (size_t)snprintf(text + size, sizeof text - size, "%u %u %u\n", map.inside, map.outside, map.count);
    }
    return size ? write_file(pid, kind ? "gid_map" : "uid_map", text, size) : 0;
}

int userns_write_maps(int pid, const struct step *maps, int deny_setgroups)
{
    int error = deny_setgroups ? write_file(pid, "setgroups", "deny", 4) : 0;
    if (!error)
        error = write_map(pid, maps, 0);
    return error ? error : write_map(pid, maps, 1);
}

int userns_make(const struct step *maps)
{
    struct rf_clone_args args = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
    struct timespec second = {1, 0};
    char path[64];
    static volatile uint32_t *ready;
    if (!ready) {
        void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED)
            return -errno;
        ready = page;
    }
    *ready = 0;
    int pid = (int)syscall(SYS_clone3, &args, sizeof args);
    if (pid < 0)
        return -errno;
    if (!pid) {
        /* No user namespaces below this one: a second lock beside seccomp. Kernels may lack the file. */
        int fd = open("/proc/sys/user/max_user_namespaces", O_WRONLY | O_CLOEXEC);
        if (fd >= 0 && write(fd, "0", 1) != 1)
            _exit(1);
        *ready = 1;
        syscall(SYS_futex, ready, FUTEX_WAKE, 1, NULL, NULL, 0);
        for (;;)
            pause();
    }
    int error = userns_write_maps(pid, maps, 0), fd = -1;
    if (!*ready)
        syscall(SYS_futex, ready, FUTEX_WAIT, 0, &second, NULL, 0);
    if (!error && !*ready)
        error = ETIMEDOUT;
    if (!error) {
        snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        error = fd < 0 ? errno : 0;
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return error ? -error : fd;
}

struct cached {
    int fd;
    uint32_t length;
    uint8_t maps[4 * sizeof(struct id_map)];
};

enum { CACHED_MAX = 256 };

static struct cached cache[CACHED_MAX];
static unsigned cache_next;

int userns_cached(const struct step *maps)
{
    if (maps->length > sizeof cache[0].maps)
        return -E2BIG;
    for (unsigned i = 0; i < CACHED_MAX; i++)
        if (cache[i].length && cache[i].length == maps->length && !memcmp(cache[i].maps, maps->bytes, maps->length))
            return cache[i].fd;
    int fd = userns_make(maps);
    if (fd < 0)
        return fd;
    struct cached *entry = &cache[cache_next++ % CACHED_MAX];
    if (entry->length)
        close(entry->fd);
    entry->fd = fd;
    entry->length = maps->length;
    memcpy(entry->maps, maps->bytes, maps->length);
    return fd;
}
