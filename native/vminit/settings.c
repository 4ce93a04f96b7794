/* The config: written by the host, so it is trusted; what can't be right stops the start all the same. */
#include "vminit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct settings settings;

static char text[256 * 1024];

static void list(const char **into, unsigned *count, unsigned most, const char *value)
{
    errno = E2BIG;
    if (*count == most)
        die("config", value);
    into[(*count)++] = value;
}

static void set(char *entry)
{
    char *value = strchr(entry, '=');
    errno = EINVAL;
    if (value == NULL)
        die("config", entry);
    *value++ = 0;
    struct settings *s = &settings;
#define TEXT(name) if (!strcmp(entry, #name)) { s->name = value; return; }
#define NUMBER(name, type, base) if (!strcmp(entry, #name)) { s->name = (type)strtoull(value, NULL, base); return; }
#define LIST(key, name, counter) if (!strcmp(entry, key)) { \
        list((const char **)s->name, &s->counter, sizeof s->name / sizeof *s->name - 1, value); return; }
    TEXT(root) TEXT(disk) TEXT(hostname) TEXT(link) TEXT(control) TEXT(init) TEXT(init_script) TEXT(machine_id) TEXT(up)
    NUMBER(capabilities, uint64_t, 16) NUMBER(memory, uint64_t, 10) NUMBER(processes, uint64_t, 10)
    NUMBER(shm, uint64_t, 10) NUMBER(agent_uid, uint32_t, 10) NUMBER(agent_gid, uint32_t, 10)
    NUMBER(readonly_root, bool, 10)
    LIST("module", modules, module_count) LIST("read_write", read_write, read_write_count)
    LIST("read_only", read_only, read_only_count) LIST("mask", masked, masked_count)
    LIST("point", points, point_count) LIST("limit", limits, limit_count) LIST("arg", arguments, argument_count)
    LIST("env", environment, environment_count)
    die("config", entry);
}

void settings_read(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die("config", path);
    size_t size = 0;
    for (ssize_t got; size < sizeof text - 1 && (got = read(fd, text + size, sizeof text - 1 - size)) > 0;)
        size += (size_t)got;
    close(fd);
    unlink(path);
    for (size_t at = 0, length; at < size; at += length + 1) {
        length = strlen(text + at);
        set(text + at); /* cuts it at its `=` */
    }
    errno = EINVAL;
    if (settings.root == NULL || settings.link == NULL || settings.control == NULL || settings.argument_count == 0)
        die("config", "incomplete");
}
