/* The root file system: a read-only image below, a writable disk above, and what every program expects. */
#include "vminit.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define TRIES 2000 /* of 5 ms */
#define QUIET (MS_NOSUID | MS_NODEV | MS_NOEXEC)

/* `device:filesystem` */
static void mount_disk(const char *what, const char *at, unsigned long flags)
{
    char device[64];
    const char *kind = strchr(what, ':');
    struct stat found;
    const struct timespec pause = {0, 5000000};
    errno = EINVAL;
    if (kind == NULL || (size_t)(kind - what) >= sizeof device)
        die("disk", what);
    memcpy(device, what, (size_t)(kind - what));
    device[kind - what] = 0;
    for (int i = 0; i < TRIES && stat(device, &found) < 0; i++)
        nanosleep(&pause, NULL);
    if (mount(device, at, kind + 1, flags, NULL) < 0)
        die("disk", what);
}

static void make(const char *path, mode_t mode)
{
    if (mkdir(path, mode) < 0 && errno != EEXIST)
        die("folder", path);
}

void root_mount(void)
{
    mount_disk(settings.root, "/lower", MS_RDONLY | MS_NODEV);
    if (settings.disk != NULL)
        mount_disk(settings.disk, "/disk", MS_NODEV | (settings.init != NULL ? 0 : MS_NOSUID));
    else if (mount("disk", "/disk", "tmpfs", MS_NODEV | MS_NOSUID, "mode=0700") < 0)
        die("disk", "tmpfs");
    make("/disk/upper", 0755);
    make("/disk/work", 0700);
    if (chmod("/disk/upper", 0755) < 0)
        die("disk", "upper");
    unsigned long flags = MS_NODEV | (settings.init != NULL ? 0 : MS_NOSUID);
    if (mount("root", "/root", "overlay", flags, "lowerdir=/lower,upperdir=/disk/upper,workdir=/disk/work") < 0)
        die("root", "overlay");
    if (settings.machine_id != NULL) {
        int fd = open("/machine-id", O_WRONLY | O_CREAT | O_CLOEXEC, 0444);
        if (fd >= 0) {
            dprintf(fd, "%s\n", settings.machine_id);
            close(fd);
        }
        struct stat found;
        if (lstat("/root/etc/machine-id", &found) == 0 && S_ISREG(found.st_mode))
            mount("/machine-id", "/root/etc/machine-id", "", MS_BIND, NULL);
    }
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock < 0 || ioctl(sock, SIOCSIFFLAGS, &request) < 0)
        die("loopback", "up");
    close(sock);
    write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "53"); /* the agent answers for names there */
    write_file("/proc/sys/kernel/dmesg_restrict", "1");
    write_file("/proc/sys/kernel/kptr_restrict", "2");
    write_file("/proc/sys/kernel/unprivileged_bpf_disabled", "1");
    write_file("/proc/sys/kernel/perf_event_paranoid", "3");
    write_file("/proc/sys/kernel/core_pattern", "core");
    write_file("/proc/sys/kernel/modules_disabled", "1");
    write_file("/proc/sys/user/max_user_namespaces", "0");
    write_file("/proc/sys/fs/protected_hardlinks", "1");
    write_file("/proc/sys/fs/protected_symlinks", "1");
}

static void mount_at(const char *kind, const char *at, unsigned long flags, const char *options)
{
    if (mount(kind, at, kind, flags, options) < 0)
        die("mount", at);
}

static void make_devices(void)
{
    static const struct { const char *name; unsigned major, minor; } nodes[] = {
        {"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
    };
    static const char *const links[][2] = {
        {"/proc/self/fd", "/dev/fd"}, {"/proc/self/fd/0", "/dev/stdin"}, {"/proc/self/fd/1", "/dev/stdout"},
        {"/proc/self/fd/2", "/dev/stderr"}, {"pts/ptmx", "/dev/ptmx"},
    };
    char path[32], options[64];
    mount_at("tmpfs", "/dev", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k");
    for (unsigned i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        snprintf(path, sizeof path, "/dev/%s", nodes[i].name);
        if (mknod(path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0 || chmod(path, 0666) < 0)
            die("device", path);
    }
    for (unsigned i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]) < 0)
            die("device", links[i][1]);
    make("/dev/pts", 0755);
    make("/dev/shm", 01777);
    if (mount("", "/dev", "", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL) < 0)
        die("mount", "/dev");
    mount_at("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,max=256");
    unsigned long long size = settings.shm != 0 ? settings.shm : 16u << 20;
    snprintf(options, sizeof options, "mode=1777,size=%llu,nr_inodes=%llu", size, size / 8192);
    mount_at("tmpfs", "/dev/shm", QUIET, options);
}

static void read_only(const char *path)
{
    if (mount(path, path, "", MS_BIND | MS_REC, NULL) < 0) {
        if (errno != ENOENT)
            die("read-only", path);
        return;
    }
    if (mount("", path, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) < 0)
        die("read-only", path);
}

#define EMPTY "/.ringfence/empty"

/* What files are covered with: nothing to read, and nobody may write it. */
static void make_empty(void)
{
    mount_at("tmpfs", "/.ringfence", QUIET, "size=4k,nr_inodes=2,mode=0700");
    int fd = open(EMPTY, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    if (fd < 0)
        die("mask", EMPTY);
    close(fd);
}

static void mask(const char *path)
{
    struct stat found;
    if (lstat(path, &found) < 0)
        return;
    if (S_ISDIR(found.st_mode)) {
        if (mount("tmpfs", path, "tmpfs", QUIET | MS_RDONLY, "size=0,nr_inodes=2,mode=0555") < 0)
            die("mask", path);
    } else if (mount(EMPTY, path, "", MS_BIND, NULL) < 0 ||
               mount("", path, "", MS_BIND | MS_REMOUNT | MS_RDONLY | QUIET, NULL) < 0)
        die("mask", path);
}

/* `uid:path`: a folder of that owner, and its parents. Within the sandbox's root, wherever links lead there. */
static void make_point(const char *text)
{
    char *path, part[4096];
    unsigned uid = (unsigned)strtoul(text, &path, 10);
    struct stat found;
    if (*path++ != ':' || strlen(path) >= sizeof part)
        die("point", text);
    if (stat(path, &found) == 0)
        return;
    for (const char *at = strchr(path + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
        memcpy(part, path, (size_t)(at - path));
        part[at - path] = 0;
        make(part, 0755);
    }
    make(path, 0755);
    if (chown(path, uid, uid) < 0)
        die("point", path);
}

/* In the agent's own namespaces. Where the machine has an init of its own, that one's mounts are shown. */
void root_enter(void)
{
    char options[96];
    static const char *const folders[] = {"/dev", "/proc", "/sys", "/run", "/run/secrets", "/.ringfence"};
    if (settings.init != NULL) {
        int system = open("/proc/1/ns/mnt", O_RDONLY | O_CLOEXEC);
        if (system < 0 || setns(system, CLONE_NEWNS) < 0 || unshare(CLONE_NEWNS) < 0)
            die("root", "the system's mounts");
        close(system);
    }
    if (mount("", "/", "", MS_REC | MS_PRIVATE, NULL) < 0)
        die("root", "private");
    if (settings.init == NULL &&
        (chdir("/root") < 0 || mount(".", "/", "", MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0))
        die("root", "switch");
    for (unsigned i = 0; i < sizeof folders / sizeof *folders; i++)
        if (mkdir(folders[i], 0755) < 0 && errno != EEXIST)
            die("folder", folders[i]);
    for (unsigned i = 0; i < settings.point_count; i++)
        make_point(settings.points[i]);
    mount_at("proc", "/proc", QUIET, NULL);
    make_devices();
    make_empty();
    for (unsigned i = 0; i < settings.masked_count; i++)
        mask(settings.masked[i]);
    snprintf(options, sizeof options, "size=1m,nr_inodes=1024,mode=0755,uid=%u,gid=%u", settings.agent_uid,
             settings.agent_gid);
    mount_at("tmpfs", "/run/secrets", QUIET, options);
    mount_at("tmpfs", "/sys", QUIET | MS_RDONLY, "size=0,nr_inodes=2,mode=0555");
    mount_at("tmpfs", "/.ringfence", QUIET | MS_RDONLY, "size=0,nr_inodes=2,mode=0700");
    if (settings.readonly_root) {
        for (unsigned i = 0; i < settings.read_write_count; i++) {
            const char *path = settings.read_write[i];
            if (mount(path, path, "", MS_BIND | MS_REC, NULL) < 0)
                die("read-write", path);
        }
        if (mount("", "/", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NODEV | MS_NOSUID, NULL) < 0)
            die("root", "read-only");
    }
    for (unsigned i = 0; i < settings.read_only_count; i++)
        read_only(settings.read_only[i]);
}
