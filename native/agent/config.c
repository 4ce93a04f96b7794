/* The agent's arguments: key=value, given by whoever built the wall. */
#include "agent.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

struct config config = {
    .listen_fd = -1, .stream_in = -1, .stream_out = -1, .mux_in = -1, .mux_out = -1, .wake_fd = -1, .ready_fd = -1, .filter_fd = -1,
    .workdir = "/", .oom = 500, .max_links = LINKS_MAX, 
    .as_uid = (uid_t)-1, .uid = (uid_t)-1, .gid = (gid_t)-1,
};

static bool number(const char *text, int base, uint64_t limit, uint64_t *value)
{
    char *end;
    if (*text < '0' || *text > 'f')
        return false;
    *value = strtoull(text, &end, base);
    return *end == 0 && *value <= limit;
}

static bool numbers(const char *text, int *list, int limit, int *count)
{
    *count = 0;
    while (*text != 0) {
        char *end;
        long value = strtol(text, &end, 10);
        if (end == text || (*end != 0 && *end != ',') || value < 0 || value > 1 << 20 || *count == limit)
            return false;
        list[(*count)++] = (int)value;
        text = *end == ',' ? end + 1 : end;
    }
    return true;
}

static bool set(const char *key, size_t size, const char *text)
{
    uint64_t value = 0;
    int pair[2], count;
#define KEY(name) (size == sizeof name - 1 && memcmp(key, name, size) == 0)
    if (KEY("listen")) {
        if (number(text, 10, 1 << 20, &value))
            config.listen_fd = (int)value;
        else
            config.listen_path = text;
        return *text != 0;
    }
    if (KEY("stream")) {
        if (!numbers(text, pair, 2, &count) || count == 0)
            return false;
        config.stream_in = pair[0];
        config.stream_out = pair[count - 1];
        return true;
    }
    if (KEY("mux")) {
        if (*text == '/')
            return (config.mux_path = text) != NULL;
        if (!numbers(text, pair, 2, &count) || count == 0)
            return false;
        config.mux_in = pair[0];
        config.mux_out = pair[count - 1];
        return true;
    }
    if (KEY("users"))
        return *(config.users = text) != 0;
    if (KEY("groups"))
        return *(config.groups = text) != 0;
    if (KEY("as")) {
        if (!numbers(text, pair, 2, &count) || count != 2)
            return false;
        config.as_uid = (uid_t)pair[0];
        config.as_gid = (gid_t)pair[1];
        return true;
    }
    if (KEY("own") && config.own_count < OWN_MAX)
        return (config.own[config.own_count++] = text)[0] != 0;
    if (KEY("held"))
        return number(text, 16, UINT64_MAX, &config.held);
    if (KEY("leave") && number(text, 10, 1, &value))
        return (config.leave = value != 0) == (value != 0);
    if (KEY("cgroup") && *text == '/')
        return (config.cgroup_folder = text) != NULL;
    if (KEY("filter") && *text == '/')
        return (config.filter_fd = open(text, O_RDONLY | O_CLOEXEC)) >= 0;
    if (KEY("cgroup"))
        return numbers(text, config.cgroups, CGROUPS_MAX, &config.cgroup_count);
    if (KEY("workdir"))
        return (config.workdir = text)[0] == '/';
    if (KEY("home"))
        return (config.home = text)[0] == '/';
    if (KEY("filter") && number(text, 10, 1 << 20, &value))
        return (config.filter_fd = (int)value) >= 0;
    if (KEY("caps"))
        return number(text, 16, UINT64_MAX, &config.caps);
    if (KEY("uid") && number(text, 10, UINT32_MAX - 1u, &value))
        return (config.uid = (uid_t)value) == value;
    if (KEY("gid") && number(text, 10, UINT32_MAX - 1u, &value))
        return (config.gid = (gid_t)value) == value;
    if (KEY("root") && number(text, 10, 1, &value))
        return (config.root = value != 0) == (value != 0);
    if (KEY("oom") && number(text, 10, 1000, &value))
        return (config.oom = (int)value) >= 0;
    if (KEY("wake") && number(text, 10, 1 << 20, &value))
        return (config.wake_fd = (int)value) >= 0;
    if (KEY("ready") && number(text, 10, 1 << 20, &value))
        return (config.ready_fd = (int)value) >= 0;
    if (KEY("processes") && number(text, 10, 1 << 20, &value))
        return (config.processes = (unsigned)value) != 0;
    if (KEY("max_links") && number(text, 10, LINKS_MAX, &value))
        return (config.max_links = (unsigned)value) != 0;
#undef KEY
    return false;
}

bool config_parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *equals = strchr(argv[i], '=');
        if (equals == NULL || !set(argv[i], (size_t)(equals - argv[i]), equals + 1))
            return false;
    }
    return (config.listen_fd >= 0 || config.listen_path != NULL || config.stream_in >= 0 || config.mux_in >= 0 ||
            config.mux_path != NULL) &&
           config.uid != (uid_t)-1 && config.gid != (gid_t)-1;
}
