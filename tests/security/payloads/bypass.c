/* A seccomp filter for one way of making system calls, and the other ways of making them. */
#include "verdict.h"
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

static void on_signal(int number) { verdict(number == SIGSYS ? "killed:SIGSYS" : "killed:SIGSEGV"); }

#if defined(__x86_64__)
static long int80(long number, long a) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a) : "memory", "r8", "r9", "r10", "r11");
    return (int)result;
}
#endif

int main(int argc, char **argv) {
    signal(SIGSYS, on_signal);
    signal(SIGSEGV, on_signal);
#if defined(__x86_64__)
    if (IS("int80")) { /* unshare is 310 in the 32-bit table */
        long result = int80(310, CLONE_NEWUSER);
        if (result < 0) denied((int)-result);
        succeeded();
    }
    if (IS("int80-getpid")) {
        long result = int80(20, 0);
        if (result < 0) denied((int)-result);
        succeeded();
    }
    if (IS("x32")) call(syscall(0x40000000 | SYS_unshare, CLONE_NEWUSER));
#endif
    if (IS("high-number")) call(syscall((long)0xffffffff00000000ul | SYS_unshare, CLONE_NEWUSER));
    if (IS("second-filter")) { /* a filter that allows everything must not loosen the first */
        struct { unsigned short code; unsigned char jt, jf; unsigned k; } allow = {6, 0, 0, 0x7fff0000};
        struct { unsigned short len; void *filter; } program = {1, &allow};
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        if (syscall(SYS_seccomp, 1, 0, &program) != 0) denied(errno);
        call(unshare(CLONE_NEWUSER));
    }
    usage();
}
