/* fork_bomb.c TARGET: children that stay, until TARGET live at once or the system says no. Bounded by itself. */
#include "verdict.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

int main(int argc, char **argv) {
    if (argc < 2) usage();
    int target = atoi(argv[1]), failure = 0, n = 0;
    pid_t *children = calloc((size_t)target, sizeof *children);
    for (n = 0; n < target; n++) {
        pid_t pid = fork();
        if (pid < 0) {
            failure = errno;
            break;
        }
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (;;) pause();
        }
        children[n] = pid;
    }
    for (int i = 0; i < n; i++) kill(children[i], SIGKILL);
    while (wait(NULL) > 0) {}
    if (n == target) succeeded();
    char text[64];
    snprintf(text, sizeof text, "contained:%s", failure == EAGAIN ? "EAGAIN" : error_name(failure));
    verdict(text);
}
