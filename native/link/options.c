/* The arguments: key=value, given by the driver that has the stream. */
#include "link.h"

#include <stdlib.h>
#include <string.h>

static bool number(const char *text, uint64_t limit, uint64_t *value)
{
    char *end;
    if (*text < '0' || *text > '9')
        return false;
    *value = strtoull(text, &end, 10);
    return *end == 0 && *value <= limit;
}

static bool pair(const char *text, int *first, int *second)
{
    char *end;
    if (*text < '0' || *text > '9')
        return false;
    long value = strtol(text, &end, 10);
    if (value > 1 << 20)
        return false;
    *first = *second = (int)value;
    if (*end == 0)
        return true;
    uint64_t other;
    if (*end != ',' || !number(end + 1, 1 << 20, &other))
        return false;
    *second = (int)other;
    return true;
}

static bool set(struct options *options, const char *key, size_t size, const char *text)
{
    uint64_t value = 0;
#define KEY(name) (size == sizeof name - 1 && memcmp(key, name, size) == 0)
    if (KEY("stream"))
        return pair(text, &options->in, &options->out);
    if (KEY("connect"))
        return *(options->connect_path = text) != 0;
    if (KEY("format"))
        return (options->docker = strcmp(text, "docker") == 0) || strcmp(text, "raw") == 0;
    if (!number(text, UINT32_MAX - 1u, &value))
        return false;
    if (KEY("uid"))
        options->uid = (uid_t)value;
    else if (KEY("gid"))
        options->gid = (gid_t)value;
    else if (value > 1 << 20)
        return false;
    else if (KEY("listen"))
        options->listen_fd = (int)value;
    else if (KEY("ready"))
        options->ready_fd = (int)value;
    else if (KEY("owner"))
        options->owner_fd = (int)value;
    else if (KEY("fresh"))
        options->fresh = value != 0;
    else
        return false;
#undef KEY
    return true;
}

bool options_parse(struct options *options, int argc, char **argv)
{
    *options = (struct options){.listen_fd = -1, .in = -1, .out = -1, .ready_fd = -1, .owner_fd = -1, .uid = 65534, .gid = 65534};
    for (int i = 1; i < argc; i++) {
        const char *equals = strchr(argv[i], '=');
        if (equals == NULL || !set(options, argv[i], (size_t)(equals - argv[i]), equals + 1))
            return false;
    }
    return options->listen_fd >= 0 && (options->in >= 0) != (options->connect_path != NULL) && options->uid != 0 &&
           options->gid != 0;
}
