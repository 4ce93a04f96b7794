/* A core dump of a sandbox is written, or piped to a program, by the host's kernel with the host's rights. */
#include "verdict.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

int main(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_CORE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_CORE, &limit);
    int status = 0;
    pid_t pid = fork();
    if (pid < 0) denied(errno);
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        kill(getpid(), SIGABRT);
        _exit(1);
    }
    if (waitpid(pid, &status, 0) != pid) denied(errno);
    verdict(WIFSIGNALED(status) && WCOREDUMP(status) ? "succeeded" : "no-dump");
}
