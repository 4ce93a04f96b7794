/* kill_all.c PID_NAMESPACE: SIGKILL to every process that can be signalled; the test looks at its victim afterwards.
   PID_NAMESPACE is the test's own ("pid:[…]"): in that one, and in the machine's first, it does nothing. */
#include "verdict.h"
#include <signal.h>

int main(int argc, char **argv) {
    char own[64] = "";
    if (argc < 2) usage();
    if (readlink("/proc/self/ns/pid", own, sizeof own - 1) <= 0) verdict("error:no /proc");
    if (strcmp(own, argv[1]) == 0 || strcmp(own, "pid:[4026531836]") == 0) verdict("error:the test's own namespace");
    if (kill(-1, SIGKILL) != 0 && errno != ESRCH) denied(errno);
    verdict("sent");
}
