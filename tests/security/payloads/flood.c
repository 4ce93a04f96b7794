/* flood.c STREAM GIB: output until all is written. Its own verdict goes to the other stream. */
#include "verdict.h"
#include <signal.h>

int main(int argc, char **argv) {
    if (argc < 3) usage();
    static char block[1 << 16];
    int out = IS("stderr") ? 2 : 1;
    long long left = atoll(argv[2]) << 30;
    memset(block, 'x', sizeof block);
    signal(SIGPIPE, SIG_IGN);
    while (left > 0) {
        ssize_t n = write(out, block, sizeof block);
        if (n < 0) break;
        left -= n;
    }
    dup2(out == 1 ? 2 : 1, 1);
    if (left > 0) denied(errno);
    succeeded();
}
