/* disk_bomb.c FOLDER MIB: writes one file. Removes it, so that a control leaves nothing. */
#include "verdict.h"

int main(int argc, char **argv) {
    if (argc < 3) usage();
    char path[4096], text[64];
    static char block[1 << 20];
    snprintf(path, sizeof path, "%s/rf-bomb", argv[1]);
    memset(block, 'x', sizeof block);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0) denied(errno);
    long mib = atol(argv[2]);
    for (long i = 0; i < mib; i++)
        for (size_t at = 0; at < sizeof block;) {
            ssize_t n = write(fd, block + at, sizeof block - at);
            if (n < 0) {
                snprintf(text, sizeof text, "contained:%s", error_name(errno));
                unlink(path);
                verdict(text);
            }
            at += (size_t)n;
        }
    unlink(path);
    succeeded();
}
