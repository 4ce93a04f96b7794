/* ringfence-link: the host's end of one byte stream that carries many links. */
#ifndef RINGFENCE_LINK_H
#define RINGFENCE_LINK_H

#include "mux.h"

#include <sys/types.h>

struct options {
    int listen_fd, in, out, ready_fd, owner_fd;
    const char *connect_path;
    bool fresh, docker;
    uid_t uid;
    gid_t gid;
    uint64_t most_open; /* descriptors */
};
bool options_parse(struct options *options, int argc, char **argv);

/* --- docker.c: the format of an attached container --- */
struct docker {
    uint8_t head[8];
    unsigned head_size;
    uint32_t left; /* of this piece */
};
size_t docker_take(struct docker *docker, uint8_t *data, size_t size); /* in place: what is stdout's */

/* --- rights.c --- */
bool rights_drop(const struct options *options); /* errno says why not */
bool rights_filter(void);

/* --- serve.c --- */
int serve(const struct options *options);

#endif
