/* Secrets, seed and stats: the parts of the sandbox's identity that need files. Runs in a worker. */
#include "worker.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/vfs.h>
#include <unistd.h>

#define SECRETS "/run/secrets"

/* With the agent's own rights, before they are given up: the folder, in memory if it can be. */
void secrets_prepare(void)
{
    char options[64];
    struct statfs kind;
    mkdir("/run", 0755);
    mkdir(SECRETS, 0700);
    int fd = open(SECRETS, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return;
    if (fstatfs(fd, &kind) == 0 && kind.f_type != TMPFS_MAGIC) {
        snprintf(options, sizeof options, "size=1m,mode=0700,uid=%u,gid=%u", config.uid, config.gid);
        mount("secrets", SECRETS, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options);
        close(fd);
        fd = open(SECRETS, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    if (fd >= 0 && fchown(fd, config.uid, config.gid) < 0) {
        /* then it must be the workload's already; writing will tell */
    }
    if (fd >= 0)
        close(fd);
}

static bool name_valid(const struct field *name)
{
    if (name->size < 1 || name->size > 128 || name->data[0] == '.')
        return false;
    for (uint32_t i = 0; i < name->size; i++)
        if (!isalnum(name->data[i]) && strchr("._-", name->data[i]) == NULL)
            return false;
    return memchr(name->data, 0, name->size) == NULL;
}

static void write_secret(const struct work *work, int folder, const struct field *secret)
{
    struct fields list = fields_of(secret->data, secret->size);
    struct field field, name = {0}, value = {0};
    char text[144] = "secret ";
    if (!fields_valid(secret->data, secret->size))
        work_fail(work, EINVAL, "secret");
    while (fields_next(&list, &field)) {
        if (field.tag == 1)
            name = field;
        else if (field.tag == 2)
            value = field;
    }
    if (!name_valid(&name))
        work_fail(work, EINVAL, "secret");
    memcpy(text + 7, name.data, name.size);
    const char *file = text + 7;
    if (unlinkat(folder, file, 0) < 0 && errno != ENOENT)
        work_fail(work, errno, text);
    int fd = openat(folder, file, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0400);
    if (fd < 0)
        work_fail(work, errno, text);
    for (size_t done = 0; done < value.size;) {
        ssize_t wrote = write(fd, value.data + done, value.size - done);
        if (wrote < 0)
            work_fail(work, errno, text);
        done += (size_t)wrote;
    }
    close(fd);
}

_Noreturn void bind_run(struct work *work)
{
    struct fields list = fields_of(work->fields, work->size);
    struct field field;
    int folder = -1;
    while (fields_next(&list, &field)) {
        if (field.tag == 2) {
            if (folder < 0)
                folder = open(SECRETS, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (folder < 0)
                work_fail(work, errno, "secrets");
            write_secret(work, folder, &field);
        } else if (field.tag == 4) {
            int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
            if (fd < 0 || write(fd, field.data, field.size) < 0)
                work_fail(work, errno, "seed");
            close(fd);
        }
    }
    work_done(work, NULL);
}

static bool read_text(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[got < 0 ? 0 : got] = 0;
    return got > 0;
}

_Noreturn void stats_run(struct work *work)
{
    char text[128], path[320];
    uint64_t processes = 0, pages = 0;
    DIR *folder = opendir("/proc");
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        unsigned long size, resident;
        if (!isdigit((unsigned char)entry->d_name[0]) || strtol(entry->d_name, NULL, 10) == getpid())
            continue;
        processes++;
        snprintf(path, sizeof path, "/proc/%s/statm", entry->d_name);
        if (read_text(path, text, sizeof text) && sscanf(text, "%lu %lu", &size, &resident) == 2)
            pages += resident;
    }
    double load = read_text("/proc/loadavg", text, sizeof text) ? strtod(text, NULL) : 0;
    uint8_t bytes[128];
    struct writer out = writer_of(bytes, sizeof bytes);
    write_number(&out, 1, processes);
    write_number(&out, 2, pages * (uint64_t)sysconf(_SC_PAGESIZE));
    write_number(&out, 3, (uint64_t)(load * 1000));
    write_number(&out, 4, now_ns() - agent_started);
    write_number(&out, 5, links_channels());
    write_number(&out, 6, link_count);
    work_done(work, &out);
}
