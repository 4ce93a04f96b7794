/* Process 1 of a virtual machine (or a child of the machine's own init, where it has one). */
#include "vminit.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NAMESPACES (CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWCGROUP)
#define UP_TRIES 10000 /* of 50 ms: how long the system's own init may take until the agent is started anyway */

/* On the console, which the host reads while the machine starts. */
_Noreturn void die(const char *step, const char *what)
{
    int error = errno;
    dprintf(1, "ringfence-vminit: %s: %s: %s\n", step, what, strerror(error));
    sync();
    if (getpid() != 1)
        _exit(1);
    reboot(RB_AUTOBOOT);
    _exit(1);
}

static int start_agent(int port)
{
    int agent = (int)syscall(SYS_clone, NAMESPACES | SIGCHLD, NULL, NULL, NULL, 0);
    if (agent < 0)
        die("start", "clone");
    if (agent == 0) {
        if (dup2(port, LINK_FD) < 0)
            die("link", "dup2");
        root_enter();
        agent_become();
    }
    close(port);
    return agent;
}

static void add_text(const char *path, int flags, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | flags, 0644);
    if (fd < 0)
        return;
    if (write(fd, text, strlen(text)) < 0) {
        /* then the agent is started a minute later */
    }
    close(fd);
}

/* Has the system's own init tell when it is up: one line of an inittab, or one unit. In the system's root. */
static void add_service(void)
{
    static const char *const folders[] = {"/etc/systemd", "/etc/systemd/system",
                                          "/etc/systemd/system/multi-user.target.wants"};
    char found[16384], text[512];
    snprintf(text, sizeof text, "\nrfup:2345:once:/bin/sh -c ': > %s'\n", settings.up);
    if (read_file("/etc/inittab", found, sizeof found) && strstr(found, "\nrfup:") == NULL)
        add_text("/etc/inittab", O_APPEND, text);
    if (settings.hostname != NULL) { /* what the system's start will name the machine after */
        snprintf(text, sizeof text, "%s\n", settings.hostname);
        add_text("/etc/hostname", O_CREAT | O_TRUNC, text);
    }
    for (unsigned i = 0; i < sizeof folders / sizeof *folders; i++)
        mkdir(folders[i], 0755);
    snprintf(text, sizeof text, "[Unit]\nDescription=Ringfence: the system is up\n[Service]\nType=oneshot\n"
             "ExecStart=/bin/sh -c ': > %s'\n", settings.up);
    add_text("/etc/systemd/system/ringfence-up.service", O_CREAT | O_TRUNC, text);
    if (symlink("../ringfence-up.service", "/etc/systemd/system/multi-user.target.wants/ringfence-up.service") < 0) {
        /* it is there already */
    }
}

/* Hands the machine to the init of its own root and goes on in a child. */
static void start_system(void)
{
    char *const script = (char *)settings.init_script;
    char *const arguments[] = {(char *)settings.init, script == NULL ? NULL : "-c", script, NULL};
    char *const environment[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TERM=dumb",
                                 "HOME=/", "container=", NULL};
    int gate[2];
    if (pipe2(gate, O_CLOEXEC) < 0)
        die("system", "pipe");
    int child = fork();
    if (child < 0)
        die("system", "fork");
    if (child == 0) {
        char byte;
        close(gate[1]);
        /* Own namespaces, before the parent turns its mounts upside down. */
        if (unshare(CLONE_NEWNS) < 0 || mount("", "/", "", MS_REC | MS_PRIVATE, NULL) < 0)
            die("system", "unshare");
        while (read(gate[0], &byte, 1) < 0 && errno == EINTR) {
        }
        close(gate[0]);
        setsid();
        return;
    }
    close(gate[0]);
    static const char *const moved[] = {"dev", "proc", "sys"};
    char path[64];
    for (unsigned i = 0; i < sizeof moved / sizeof *moved; i++) {
        snprintf(path, sizeof path, "/root/%s", moved[i]);
        mkdir(path, 0755);
        snprintf(path, sizeof path, "/%s", moved[i]);
        char to[64];
        snprintf(to, sizeof to, "/root/%s", moved[i]);
        if (mount(path, to, "", MS_BIND | MS_REC, NULL) < 0)
            die("system", to);
    }
    if (chdir("/root") < 0 || mount(".", "/", "", MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
        die("system", "switch root");
    if (script == NULL)
        add_service();
    execve(settings.init, arguments, environment);
    die("system", settings.init);
}

static void name_machine(void)
{
    if (settings.hostname != NULL)
        sethostname(settings.hostname, strlen(settings.hostname));
}

/* Returns when the machine's own init says that it has brought the system up. */
static void await_system(void)
{
    char path[256];
    struct stat found;
    const struct timespec pause = {0, 50000000};
    snprintf(path, sizeof path, "/proc/1/root%s", settings.up);
    for (int i = 0; i < UP_TRIES && stat(path, &found) < 0; i++)
        nanosleep(&pause, NULL);
}

#ifdef __x86_64__
/* Nanoseconds, and the counter at that time: of many looks at both the one that was interrupted least. */
static uint64_t moment(uint64_t *counter)
{
    uint64_t best = UINT64_MAX, found = 0;
    for (int i = 0; i < 32; i++) {
        struct timespec before, after;
        clock_gettime(CLOCK_MONOTONIC_RAW, &before);
        uint64_t seen = __builtin_ia32_rdtsc();
        clock_gettime(CLOCK_MONOTONIC_RAW, &after);
        uint64_t from = (uint64_t)before.tv_sec * 1000000000u + (uint64_t)before.tv_nsec;
        uint64_t took = (uint64_t)after.tv_sec * 1000000000u + (uint64_t)after.tv_nsec - from;
        if (took < best) {
            best = took;
            found = from + took / 2;
            *counter = seen;
        }
    }
    return found;
}
#endif

/* On the host: the kHz of its time stamp counter, which an emulated guest is shown. A guest on a busy host can't find that
 * out by itself, and without it its clock does not run. */
static int measure_counter(void)
{
#ifdef __x86_64__
    const struct timespec pause = {0, 50000000};
    uint64_t begun, ended;
    uint64_t from = moment(&begun);
    nanosleep(&pause, NULL);
    uint64_t to = moment(&ended);
    dprintf(1, "%llu\n", (unsigned long long)((unsigned __int128)(ended - begun) * 1000000u / (to - from)));
    return 0;
#else
    return 1;
#endif
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "counter"))
        return measure_counter();
    if (getpid() != 1)
        return 1; /* on a host there is nothing else that it could do */
    mkdir("/dev", 0755);
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0 ||
        mount("sys", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0 ||
        (mount("dev", "/dev", "devtmpfs", MS_NOSUID, "mode=0755") < 0 && errno != EBUSY))
        die("init", "mount");
    int console = open("/dev/console", O_RDWR | O_NOCTTY);
    for (int number = 0; number < 3 && console >= 0; number++)
        dup2(console, number);
    if (console > 2)
        close(console);
    settings_read("/config");
    devices_load();
    name_machine();
    root_mount();
    int port = port_open(settings.link, O_RDWR);
    int control = port_open(settings.control, O_RDWR | O_NONBLOCK);
    if (port < 0 || control < 0)
        die("link", port < 0 ? settings.link : settings.control);
    if (settings.init != NULL) {
        start_system();
        if (settings.init_script != NULL)
            return 0; /* the machine is the script's alone */
        await_system();
        name_machine(); /* the system has given it the template's */
    }
    cgroup_make();
    serve(start_agent(port), control);
}
