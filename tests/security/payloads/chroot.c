/* The classic: chroot into a folder while holding the old root, climb, read. chroot.c FOLDER DECOY MARKER */
#include "verdict.h"
#include <sys/stat.h>

int main(int argc, char **argv) {
    char text[256] = "";
    if (argc < 4) usage();
    mkdir(argv[1], 0777);
    int root = open("/", O_RDONLY | O_DIRECTORY);
    if (chroot(argv[1]) != 0) denied(errno);
    if (fchdir(root) != 0) denied(errno);
    for (int i = 0; i < 64; i++) chdir("..");
    if (chroot(".") != 0) denied(errno);
    int fd = open(argv[2], O_RDONLY);
    if (fd < 0) denied(errno);
    if (read(fd, text, sizeof text - 1) < 0) denied(errno);
    verdict(strstr(text, argv[3]) ? "succeeded" : "different");
}
