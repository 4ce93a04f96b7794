/* Names and clocks. Every value set is the value that is there, so that nothing changes where it works. */
#include "verdict.h"
#include <sched.h>
#include <sys/timex.h>
#include <sys/time.h>
#include <time.h>

int main(int argc, char **argv) {
    char name[65] = "";
    if (IS("hostname")) {
        gethostname(name, 64);
        call(sethostname(name, strlen(name)));
    }
    if (IS("domainname")) {
        getdomainname(name, 64);
        call(setdomainname(name, strlen(name)));
    }
    if (IS("tick")) { /* needs CAP_SYS_TIME; sets the tick to itself */
        struct timex t = {.modes = 0};
        if (adjtimex(&t) < 0) denied(errno);
        t.modes = ADJ_TICK;
        call(adjtimex(&t));
    }
    if (IS("settime-invalid")) { /* a time no kernel takes: EINVAL says that the right was there */
        struct timespec t = {.tv_sec = 0, .tv_nsec = -1};
        if (syscall(SYS_clock_settime, CLOCK_REALTIME, &t) == 0 || errno == EINVAL) succeeded();
        denied(errno);
    }
    if (IS("timens-offsets")) { /* an offset of nothing, in a namespace of its own if it can have one */
        unshare(0x80 /* CLONE_NEWTIME */);
        int fd = open("/proc/self/timens_offsets", O_WRONLY);
        if (fd < 0) denied(errno);
        call(write(fd, "monotonic 0 0\n", 14));
    }
    usage();
}
