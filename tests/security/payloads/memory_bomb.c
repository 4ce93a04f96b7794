/* memory_bomb.c KIND MIB: takes MIB of memory of a kind and touches all of it. */
#include "verdict.h"
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/socket.h>

static size_t MiB = 1024 * 1024;

static void fill(int fd, long mib) {
    char *block = malloc(MiB);
    memset(block, 'x', MiB);
    for (long i = 0; i < mib; i++)
        for (size_t at = 0; at < MiB;) {
            ssize_t n = write(fd, block + at, MiB - at);
            if (n < 0) {
                char text[64];
                snprintf(text, sizeof text, "contained:%s", error_name(errno));
                verdict(text);
            }
            at += (size_t)n;
        }
    succeeded();
}

/* Who looks at it every now and then must have had his look. */
static void held(void) {
    sleep(3);
    succeeded();
}

int main(int argc, char **argv) {
    if (argc < 3) usage();
    long mib = atol(argv[2]);
    if (IS("anonymous")) {
        for (long i = 0; i < mib; i++) {
            char *p = mmap(NULL, MiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p == MAP_FAILED) verdict("contained:ENOMEM");
            memset(p, 'x', MiB);
        }
        held();
    }
    if (IS("shared")) {
        char *p = mmap(NULL, (size_t)mib * MiB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) verdict("contained:ENOMEM");
        memset(p, 'x', (size_t)mib * MiB);
        held();
    }
    if (IS("memfd")) {
        int fd = memfd_create("bomb", 0);
        if (fd < 0) denied(errno);
        fill(fd, mib);
    }
    if (IS("shm")) {
        int fd = open("/dev/shm/rf-bomb", O_RDWR | O_CREAT, 0600);
        if (fd < 0) denied(errno);
        unlink("/dev/shm/rf-bomb");
        fill(fd, mib);
    }
    if (IS("sysv")) {
        int id = shmget(IPC_PRIVATE, (size_t)mib * MiB, IPC_CREAT | 0600);
        if (id < 0) denied(errno);
        char *p = shmat(id, NULL, 0);
        shmctl(id, IPC_RMID, NULL);
        if (p == (void *)-1) denied(errno);
        memset(p, 'x', (size_t)mib * MiB);
        held();
    }
    if (IS("sockets")) { /* kernel memory: buffers of socket pairs that nobody reads */
        char *block = calloc(1, 65536);
        long left = mib * 1024 * 1024;
        while (left > 0) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) {
                char text[64];
                snprintf(text, sizeof text, "contained:%s", error_name(errno));
                verdict(text);
            }
            ssize_t n;
            while ((n = write(pair[0], block, 65536)) > 0) left -= n;
        }
        succeeded();
    }
    usage();
}
