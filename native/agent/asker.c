/* Who opened a connection inside, as far as the kernel's tables say. It is told to the host as `reported`, and decides
 * nothing. What is read there belongs to the workload, so every look is bounded: in what it reads, and in the time that
 * all of them take together (the table of connections is walked through by the kernel for 3 ms on a large machine,
 * since all of its namespaces share one). Who connects more often than that is handed over unnamed. */
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LINES_MAX 4096        /* of the table */
#define DESCRIPTORS_MAX 4096  /* that are looked at for one connection */
#define TIME_BURST 40000000u  /* ns of processor time at once */
#define TIME_SHARE 20         /* and one part of so many in the long run */

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int64_t level = TIME_BURST;
static uint64_t filled;

static bool time_left(void)
{
    uint64_t now = now_ns(), more = filled == 0 ? 0 : (now - filled) / TIME_SHARE;
    filled = now;
    level = more >= TIME_BURST || level + (int64_t)more > (int64_t)TIME_BURST ? (int64_t)TIME_BURST : level + (int64_t)more;
    return level > 0;
}

/* The other end's owner and inode; false if it is not there (any more). */
static bool socket_of(uint16_t peer, uint16_t named, struct asker *asker)
{
    FILE *table = fopen("/proc/net/tcp", "re");
    char line[256];
    bool found = false;
    for (int i = 0; table != NULL && !found && i < LINES_MAX && fgets(line, sizeof line, table) != NULL; i++) {
        unsigned local, remote, owner;
        if (sscanf(line, " %*d: %*8x:%4x %*8x:%4x %*x %*x:%*x %*x:%*x %*x %u %*u %" SCNu64, &local, &remote, &owner,
                   &asker->inode) == 4 &&
            local == peer && remote == named) {
            asker->uid = owner;
            found = true;
        }
    }
    if (table != NULL)
        fclose(table);
    return found;
}

/* Whether a process holds that socket. `left`: how many descriptors may still be looked at. */
static bool holds(const char *pid, const char *link, unsigned *left)
{
    char path[64], found[64];
    int size = snprintf(path, sizeof path, "/proc/%.20s/fd", pid);
    DIR *folder = size > 0 && (size_t)size < sizeof path ? opendir(path) : NULL;
    bool yes = false;
    for (struct dirent *entry; folder != NULL && !yes && *left > 0 && (entry = readdir(folder)) != NULL; --*left) {
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, found, sizeof found);
        yes = length > 0 && (size_t)length == strlen(link) && memcmp(found, link, (size_t)length) == 0;
    }
    if (folder != NULL)
        closedir(folder);
    return yes;
}

static char last[24]; /* who was found before is often who asks again */

static bool find_process(const char *link)
{
    unsigned left = DESCRIPTORS_MAX;
    if (last[0] != 0 && holds(last, link, &left))
        return true;
    last[0] = 0;
    DIR *folder = opendir("/proc");
    bool found = false;
    for (struct dirent *entry; folder != NULL && !found && left > 0 && (entry = readdir(folder)) != NULL;) {
        const char *name = entry->d_name;
        if (name[0] < '1' || name[0] > '9' || strlen(name) >= sizeof last)
            continue;
        left--;
        found = holds(name, link, &left);
        if (found)
            memcpy(last, name, strlen(name) + 1);
    }
    if (folder != NULL)
        closedir(folder);
    return found;
}

static size_t read_start(const char *file, char *data, size_t capacity)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/%s", last, file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, data, capacity);
    if (fd >= 0)
        close(fd);
    return got < 0 ? 0 : (size_t)got;
}

static void look(struct asker *asker)
{
    char link[40];
    snprintf(link, sizeof link, "socket:[%" PRIu64 "]", asker->inode);
    if (!find_process(link))
        return;
    asker->comm_size = read_start("comm", asker->comm, sizeof asker->comm);
    if (asker->comm_size > 0 && asker->comm[asker->comm_size - 1] == '\n')
        asker->comm_size--;
    asker->name_size = strnlen(asker->name, read_start("cmdline", asker->name, sizeof asker->name));
    asker->pid = strtoull(last, NULL, 10);
}

/* Into processes of another user the agent has no right to look. A child that shares its memory does so in its place:
 * an agent that becomes somebody else, be it for a moment, would lose the signal that ends it with its parent. Nobody
 * inside can reach the child, since only its rights to files are the workload's. */
static void look_as_workload(struct asker *asker)
{
    pid_t child = vfork();
    if (child == 0) {
        setfsgid(config.gid);
        setfsuid(config.uid);
        look(asker);
        level -= (int64_t)cpu_ns(); /* of the child alone */
        _exit(0);
    }
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR)
        ;
}

bool asker_find(uint16_t peer, uint16_t named, struct asker *asker)
{
    memset(asker, 0, sizeof *asker);
    if (!time_left())
        return false;
    uint64_t began = cpu_ns();
    bool found = socket_of(peer, named, asker);
    if (found && asker->inode != 0) {
        if (config.uid == geteuid())
            look(asker);
        else
            look_as_workload(asker);
    }
    level -= (int64_t)(cpu_ns() - began);
    return found;
}
