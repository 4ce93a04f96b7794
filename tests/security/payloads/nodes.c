/* Making device nodes. nodes.c VARIANT PATH */
#include "verdict.h"
#include <sys/stat.h>
#include <sys/sysmacros.h>

int main(int argc, char **argv) {
    if (argc < 3) usage();
    const char *path = argv[2];
    int made = -1;
    if (IS("null")) made = mknod(path, S_IFCHR | 0666, makedev(1, 3));
    else if (IS("mem")) made = mknod(path, S_IFCHR | 0666, makedev(1, 1));
    else if (IS("disk")) made = mknod(path, S_IFBLK | 0666, makedev(254, 0));
    else if (IS("whiteout")) call(mknod(path, S_IFCHR, makedev(0, 0)));
    else usage();
    if (made != 0) denied(errno);
    call(open(path, O_RDONLY));
}
