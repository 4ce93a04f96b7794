#include "killing.h"
#include "sys.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAUSE_NS = 200000, PATIENCE = 5000 /* pauses */, TREE_MAX = 4096, LIST_MAX = 65536 };

/* What a file of /proc holds, as a string; its length. */
static size_t text_of(const char *path, char *text, size_t most)
{
    size_t length = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    for (ssize_t size = 1; fd >= 0 && size > 0 && length < most - 1; length += size > 0 ? (size_t)size : 0)
        size = read(fd, text + length, most - 1 - length);
    if (fd >= 0)
        close(fd);
    text[length] = 0;
    return length;
}

/* The letter of /proc/PID/stat, 'X' if there is no such process. */
static char state_of(int pid)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    text_of(path, text, sizeof text);
    const char *at = strrchr(text, ')');
    return at && at[1] ? at[2] : 'X';
}

/* Adds the children of all threads of a process to the list; its new length. */
static unsigned add_children(int pid, int *list, unsigned count)
{
    static char text[LIST_MAX];
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *threads = opendir(path);
    for (struct dirent *entry; threads && (entry = readdir(threads));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%.12s/children", pid, entry->d_name);
        text_of(path, text, sizeof text);
        for (char *at = text, *end; count < TREE_MAX; at = end) {
            long child = strtol(at, &end, 10);
            if (end == at)
                break;
            list[count++] = (int)child;
        }
    }
    if (threads)
        closedir(threads);
    return count;
}

void kill_tree(int pid)
{
    static int list[TREE_MAX];
    struct timespec pause = {.tv_nsec = PAUSE_NS};
    /* Stopped first, so that the list of its children is whole when they are killed. */
    kill(pid, SIGSTOP);
    for (int i = 0; i < PATIENCE && !strchr("TZX", state_of(pid)); i++)
        nanosleep(&pause, NULL);
    unsigned count = add_children(pid, list, 0);
    for (unsigned i = 0; i < count; i++)
        count = add_children(list[i], list, count);
    for (unsigned i = 0; i < count; i++)
        kill(list[i], SIGKILL);
    kill(pid, SIGKILL);
}
