/* fd_bomb.c COUNT: open descriptors in one process. */
#include "verdict.h"
#include <sys/resource.h>

int main(int argc, char **argv) {
    if (argc < 2) usage();
    char text[64];
    long count = atol(argv[1]);
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    for (long i = 0; i < count; i++)
        if (open("/dev/null", O_RDONLY) < 0) {
            int failure = errno;
            close(3);
            snprintf(text, sizeof text, "contained:%s", error_name(failure));
            verdict(text);
        }
    succeeded();
}
