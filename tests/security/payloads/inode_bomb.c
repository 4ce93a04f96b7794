/* inode_bomb.c FOLDER COUNT: empty files. */
#include "verdict.h"
#include <sys/stat.h>

int main(int argc, char **argv) {
    if (argc < 3) usage();
    char text[64];
    long count = atol(argv[2]);
    char folder[4096];
    snprintf(folder, sizeof folder, "%s/rf-inodes", argv[1]);
    mkdir(folder, 0700);
    int dir = open(folder, O_RDONLY | O_DIRECTORY);
    if (dir < 0) denied(errno);
    for (long i = 0; i < count; i++) {
        snprintf(text, sizeof text, "f%ld", i);
        if (mknodat(dir, text, S_IFREG | 0600, 0) != 0) {
            snprintf(text, sizeof text, "contained:%s", error_name(errno));
            verdict(text);
        }
    }
    succeeded();
}
