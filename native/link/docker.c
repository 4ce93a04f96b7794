/* Docker's format of an attached container without a terminal: type, three zeros, big-endian size, bytes. */
#include "link.h"

#include <string.h>

#define STDOUT 1

size_t docker_take(struct docker *docker, uint8_t *data, size_t size)
{
    size_t at = 0, kept = 0;
    while (at < size) {
        if (docker->left == 0) {
            docker->head[docker->head_size++] = data[at++];
            if (docker->head_size == sizeof docker->head) {
                docker->head_size = 0;
                docker->left = (uint32_t)docker->head[4] << 24 | (uint32_t)docker->head[5] << 16 |
                               (uint32_t)docker->head[6] << 8 | docker->head[7];
            }
            continue;
        }
        size_t part = size - at < docker->left ? size - at : docker->left;
        if (docker->head[0] == STDOUT) {
            memmove(data + kept, data + at, part);
            kept += part;
        }
        docker->left -= (uint32_t)part;
        at += part;
    }
    return kept;
}
