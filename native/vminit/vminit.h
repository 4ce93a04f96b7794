/* The first process of a virtual machine: makes a guest agent's surroundings, then answers its host. */
#ifndef RINGFENCE_VMINIT_H
#define RINGFENCE_VMINIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LIST_MAX 512

enum { LINK_FD = 3, FILTER_FD = 4, CGROUP_FD = 5 };

/* From the file `config`: zero-terminated `key=value` texts. What may come several times is a list. */
struct settings {
    const char *root, *disk, *hostname, *link, *control, *init, *init_script, *machine_id, *up;
    const char *modules[32], *read_write[64], *read_only[64], *masked[64], *limits[16], *points[128];
    char *arguments[LIST_MAX], *environment[LIST_MAX];
    unsigned module_count, read_write_count, read_only_count, masked_count, limit_count, point_count, argument_count,
        environment_count;
    uint64_t capabilities, memory, processes, shm;
    uint32_t agent_uid, agent_gid;
    bool readonly_root;
};

extern struct settings settings;

void settings_read(const char *path);

_Noreturn void die(const char *step, const char *what);
void write_file(const char *path, const char *text);
bool read_file(const char *path, char *text, size_t size);

void devices_load(void);
int port_open(const char *transport, int flags);
void root_mount(void);
void root_enter(void);
void cgroup_make(void);
long cgroup_kills(void);
_Noreturn void agent_become(void);

_Noreturn void serve(int agent, int port);

#endif
