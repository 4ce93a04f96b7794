/* Typing into the terminal that the host's user sits at. tiocsti.c VARIANT: on standard input if it is a terminal,
   else on a terminal made here (a filter that looks at the request number denies both). */
#include "verdict.h"
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>

int main(int argc, char **argv) {
    int fd = 0;
    char byte = '\n', linux_request[2] = {3, 0};
    if (!isatty(0)) {
        fd = posix_openpt(O_RDWR | O_NOCTTY);
        if (fd < 0) denied(errno);
        grantpt(fd);
        unlockpt(fd);
        char *slave = ptsname(fd);
        pid_t child = setsid() < 0 ? fork() : 0; /* a leader can't have another terminal: its child can */
        if (child > 0) {
            waitpid(child, NULL, 0);
            _exit(0);
        }
        if (getsid(0) != getpid()) setsid();
        fd = open(slave, O_RDWR);
        if (fd < 0) denied(errno);
        ioctl(fd, TIOCSCTTY, 0);
    }
    if (IS("tiocsti")) call(ioctl(fd, TIOCSTI, &byte));
    if (IS("tiocsti-high")) call(syscall(SYS_ioctl, fd, 0xffffffff00000000ul | TIOCSTI, &byte));
    if (IS("tioclinux")) {
        if (ioctl(fd, TIOCLINUX, linux_request) == 0 || errno == ENOTTY || errno == EINVAL) verdict("reached");
        denied(errno);
    }
    usage();
}
