#include "janitor.h"
#include "network.h"
#include "steps.h"
#include "sys.h"

#include <errno.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

/* linux/loop.h has a field named by a C++ keyword and old headers lack LOOP_CONFIGURE: its ABI is frozen. */
struct loop_config {
    uint32_t fd, block_size;
    struct {
        uint64_t device, inode, rdevice, offset, sizelimit;
        uint32_t number, encrypt_type, encrypt_key_size, flags;
        uint8_t file_name[64], crypt_name[64], encrypt_key[32];
        uint64_t init[2];
    } info;
    uint64_t reserved[8];
};
enum { RF_LOOP_CONFIGURE = 0x4C0A, RF_LOOP_CTL_GET_FREE = 0x4C82, RF_LO_AUTOCLEAR = 4 };

#define TRY(call) do { if ((call) < 0) return errno; } while (0)

static int host_root(struct run *run)
{
    if (run->host_root < 0)
        run->host_root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return run->host_root;
}

/* Host paths are resolved below the host's root and through no symbolic link: whoever made the plan has judged the
 * real path, and a folder that is turned into a link meanwhile must fail the start, not show another place. */
static int open_host(struct run *run, const char *path)
{
    struct rf_open_how how = {.flags = O_PATH | O_CLOEXEC,
                              .resolve = RF_RESOLVE_IN_ROOT | RF_RESOLVE_NO_MAGICLINKS | RF_RESOLVE_NO_SYMLINKS};
    int root = host_root(run);
    return root < 0 ? -1 : rf_openat2(root, path, &how);
}

static int give(struct run *run, const char *path)
{
    if (run->owner_uid == UINT32_MAX && run->owner_gid == UINT32_MAX)
        return 0;
    TRY(lchown(path, run->owner_uid, run->owner_gid));
    return 0;
}

/* Makes `path` and its missing parents; the last part as a folder or an empty file. */
static int make_target(struct run *run, const char *path, int folder)
{
    char part[PATH_MAX];
    struct stat found;
    size_t length = strlen(path);
    if (length >= sizeof part)
        return ENAMETOOLONG;
    if (!stat(path, &found))
        return 0;
    for (size_t i = 1; i < length; i++) {
        if (path[i] != '/')
            continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (!mkdir(part, 0755)) {
            int error = give(run, part);
            if (error)
                return error;
        } else if (errno != EEXIST) {
            return errno;
        }
    }
    if (folder) {
        if (mkdir(path, 0755))
            return errno == EEXIST ? 0 : errno;
    } else {
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (fd < 0)
            return errno == EEXIST ? 0 : errno;
        close(fd);
    }
    return give(run, path);
}

static int do_bind(struct run *run, const struct step *step)
{
    const char *source = step->text[0], *target = step->text[1];
    uint64_t flags = step->number[0];
    unsigned clone = RF_OPEN_TREE_CLONE | RF_OPEN_TREE_CLOEXEC | (flags & BIND_FLAT ? 0 : RF_AT_RECURSIVE);
    struct stat found;
    int from = flags & BIND_INSIDE ? open(source, O_PATH | O_CLOEXEC) : open_host(run, source);
    if (from < 0)
        return errno == ENOENT && flags & BIND_OPTIONAL ? 0 : errno;
    if (flags & BIND_MOVE) {
        int moved = rf_move_mount(from, target) ? errno : 0;
        close(from);
        return moved;
    }
    int tree = rf_open_tree(from, "", clone | RF_AT_EMPTY);
    int error = tree < 0 || fstat(from, &found) ? errno : 0;
    close(from);
    if (tree < 0 || error)
        goto out;
    if (flags & BIND_IDMAP && run->userns >= 0) {
        struct rf_mount_attr idmap = {.set = RF_ATTR_IDMAP, .userns = (uint64_t)run->userns};
        /* Some file systems can't: then owners look like nobody's, which only costs looks. */
        if (rf_mount_setattr(tree, "", RF_AT_EMPTY | RF_AT_RECURSIVE, &idmap) && errno != EINVAL && errno != EPERM)
            goto fail;
    }
    struct rf_mount_attr attr = {.set = RF_ATTR_NOSUID | (flags & BIND_DEVICES ? 0 : RF_ATTR_NODEV) |
                                        (flags & BIND_READONLY ? RF_ATTR_RDONLY : 0) |
                                        (flags & BIND_NOEXEC ? RF_ATTR_NOEXEC : 0)};
    if (rf_mount_setattr(tree, "", RF_AT_EMPTY | RF_AT_RECURSIVE, &attr))
        goto fail;
    if (flags & BIND_MAKE && (error = make_target(run, target, S_ISDIR(found.st_mode))))
        goto out;
    if (!rf_move_mount(tree, target) || (errno == ENOENT && flags & BIND_OPTIONAL))
        goto out;
fail:
    error = errno;
out:
    if (tree >= 0)
        close(tree);
    return error;
}

static int do_mask(const char *path)
{
    struct stat found;
    if (lstat(path, &found))
        return errno == ENOENT ? 0 : errno;
    if (S_ISLNK(found.st_mode)) /* what it shows would be hidden, and the link could be replaced */
        return ELOOP;
    if (S_ISDIR(found.st_mode)) {
        TRY(mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0,nr_inodes=2,mode=0555"));
        return 0;
    }
    TRY(mount("/dev/null", path, NULL, MS_BIND, NULL));
    return 0;
}

/* Not by mount(2), which would follow a link at the end of the path: the link itself could be replaced later. */
static int do_readonly(const char *path)
{
    int tree = rf_open_tree(AT_FDCWD, path, RF_OPEN_TREE_CLONE | RF_OPEN_TREE_CLOEXEC | RF_AT_RECURSIVE);
    if (tree < 0)
        return errno == ENOENT ? 0 : errno;
    struct rf_mount_attr attr = {.set = RF_ATTR_RDONLY};
    int error = rf_mount_setattr(tree, "", RF_AT_EMPTY | RF_AT_RECURSIVE, &attr) || rf_move_mount(tree, path) ? errno : 0;
    close(tree);
    return error;
}

static int do_loop(const struct step *step)
{
    char device[32];
    int image = open(step->text[0], O_RDWR | O_CLOEXEC);
    if (image < 0)
        return errno;
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    int error = control < 0 ? errno : EBUSY, loop = -1;
    /* Another process may take the free device between the two calls: ask again, a bounded number of times. */
    for (int attempt = 0; control >= 0 && attempt < 64 && error == EBUSY; attempt++) {
        int number = ioctl(control, RF_LOOP_CTL_GET_FREE);
        if (number < 0) {
            error = errno;
            break;
        }
        snprintf(device, sizeof device, "/dev/loop%d", number);
        loop = open(device, O_RDWR | O_CLOEXEC);
        if (loop < 0) {
            error = errno;
            break;
        }
        struct loop_config config = {.fd = (uint32_t)image, .info.flags = RF_LO_AUTOCLEAR};
        error = ioctl(loop, RF_LOOP_CONFIGURE, &config) ? errno : 0;
        if (error) {
            close(loop);
            loop = -1;
        }
    }
    if (!error)
        error = mount(device, step->text[1], step->text[2], step->number[0], NULL) ? errno : 0;
    if (loop >= 0)
        close(loop);
    if (control >= 0)
        close(control);
    close(image);
    return error;
}

static int do_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    int error = ioctl(fd, SIOCSIFFLAGS, &request) ? errno : 0;
    close(fd);
    return error;
}

static int do_write(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return errno;
    ssize_t size = (ssize_t)strlen(text);
    int error = write(fd, text, (size_t)size) == size ? 0 : errno;
    close(fd);
    return error;
}

static int do_pivot(struct run *run, const char *path)
{
    if (host_root(run) < 0)
        return errno;
    TRY(chdir(path));
    TRY(syscall(SYS_pivot_root, ".", "."));
    TRY(chdir("/"));
    return 0;
}

static int detach_now(struct run *run)
{
    TRY(fchdir(run->host_root));
    int error = umount2(".", MNT_DETACH) ? errno : 0;
    TRY(chdir("/")); /* in any case: nobody may start with a foot in the host's root */
    return error;
}

/* Whatever the janitor does or fails to do: when this returns 0, the host's root is gone. */
static int do_detach(struct run *run)
{
    int error = 0;
    if (run->host_root < 0)
        return EBADF;
    if (run->detaching)
        error = janitor_await(run->host_root);
    if (!run->detaching || error == EBUSY)
        error = detach_now(run);
    if (run->detaching && error == EINVAL)
        error = janitor_await(run->host_root); /* the janitor was faster after all: make sure of it */
    if (error)
        return error;
    close(run->host_root);
    run->host_root = -1;
    return 0;
}

static int do_enter(struct run *run, const char *path)
{
    if (host_root(run) < 0)
        return errno;
    TRY(chdir(path));
    TRY(chroot("."));
    return 0;
}

static int do_leave(struct run *run)
{
    if (run->host_root < 0)
        return EBADF;
    TRY(fchdir(run->host_root));
    TRY(chroot("."));
    return 0;
}

static int do_mkdir(const struct step *step)
{
    uint32_t uid = (uint32_t)step->number[1], gid = (uint32_t)step->number[2];
    if (mkdir(step->text[0], (mode_t)step->number[0]))
        return errno == EEXIST ? 0 : errno;
    if (uid != UINT32_MAX || gid != UINT32_MAX)
        TRY(lchown(step->text[0], uid, gid));
    return 0;
}

static int do_rlimit(const struct step *step)
{
    struct rlimit now, limit = {step->number[1], step->number[2]};
    int resource = (int)step->number[0];
    TRY(getrlimit(resource, &now));
    if (now.rlim_max < limit.rlim_max)
        limit.rlim_max = now.rlim_max;
    if (limit.rlim_max < limit.rlim_cur)
        limit.rlim_cur = limit.rlim_max;
    TRY(setrlimit(resource, &limit));
    return 0;
}

static int do_landlock(struct run *run, uint64_t handled, uint64_t scoped)
{
    struct {
        uint64_t handled_fs, handled_net, scoped;
    } attr = {0};
    long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, 1);
    if (abi < 1)
        return 0; /* not in this kernel, or switched off: slot->landlock stays 0 and tells */
    unsigned rights = abi >= 5 ? 16 : abi >= 3 ? 15 : abi >= 2 ? 14 : 13;
    attr.handled_fs = handled & ((1u << rights) - 1);
    attr.scoped = abi >= 6 ? scoped : 0;
    run->ruleset = (int)syscall(SYS_landlock_create_ruleset, &attr, abi >= 6 ? 24 : abi >= 4 ? 16 : 8, 0);
    if (run->ruleset < 0)
        return errno;
    run->slot->landlock = (uint32_t)abi;
    return 0;
}

static int do_landlock_path(struct run *run, const char *path, uint64_t rights)
{
    struct __attribute__((packed)) {
        uint64_t rights;
        int32_t parent;
    } rule = {rights, -1};
    struct stat found;
    if (run->ruleset < 0)
        return 0;
    unsigned known = run->slot->landlock >= 5 ? 16 : run->slot->landlock >= 3 ? 15 : run->slot->landlock >= 2 ? 14 : 13;
    rule.rights &= (1u << known) - 1;
    rule.parent = open(path, O_PATH | O_CLOEXEC);
    if (rule.parent < 0)
        return errno == ENOENT ? 0 : errno;
    /* Rights of folders (make, remove, list) can't be granted on a file. */
    if (!fstat(rule.parent, &found) && !S_ISDIR(found.st_mode))
        rule.rights &= 1u << 0 | 1u << 1 | 1u << 2 | 1u << 14 | 1u << 15;
    int error = syscall(SYS_landlock_add_rule, run->ruleset, 1, &rule, 0) ? errno : 0;
    close(rule.parent);
    return error;
}

static int do_landlock_apply(struct run *run)
{
    if (run->ruleset < 0)
        return 0;
    TRY(syscall(SYS_landlock_restrict_self, run->ruleset, 0));
    close(run->ruleset);
    run->ruleset = -1;
    return 0;
}

static int set_capabilities(uint64_t permitted, uint64_t effective, uint64_t inheritable)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    for (int i = 0; i < 2; i++) {
        data[i].permitted = (uint32_t)(permitted >> 32 * i);
        data[i].effective = (uint32_t)(effective >> 32 * i);
        data[i].inheritable = (uint32_t)(inheritable >> 32 * i);
    }
    TRY(syscall(SYS_capset, &header, data));
    return 0;
}

/* The order matters: inheritable while the bounding set still holds them, ids while SETUID is held, the
 * bounding set while SETPCAP is, ambient last because changing the user clears it. */
static int do_become(const struct step *step)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    uint32_t uid = (uint32_t)step->number[0], gid = (uint32_t)step->number[1];
    uint64_t keep = step->number[3];
    int error;
    TRY(syscall(SYS_capget, &header, data));
    uint64_t permitted = data[0].permitted | (uint64_t)data[1].permitted << 32;
    if ((error = set_capabilities(permitted, permitted, keep)))
        return error;
    if (step->number[2])
        TRY(syscall(SYS_setgroups, 0, NULL));
    TRY(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0));
    TRY(syscall(SYS_setresgid, gid, gid, gid));
    TRY(syscall(SYS_setresuid, uid, uid, uid));
    if ((error = set_capabilities(permitted, permitted, keep)))
        return error;
    for (int capability = 0; capability < 64; capability++)
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)) {
            if (errno == EINVAL && capability > 30)
                break; /* past the last one that this kernel knows */
            return errno;
        }
    if ((error = set_capabilities(keep, keep, keep)))
        return error;
    for (int capability = 0; capability < 64; capability++)
        if (keep >> capability & 1)
            TRY(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0));
    return 0;
}

static int do_await(int fd)
{
    char byte;
    ssize_t size;
    while ((size = read(fd, &byte, 1)) < 0)
        if (errno != EINTR)
            return errno;
    return size ? 0 : EPIPE;
}

static int do_death_signal(struct run *run, int number)
{
    struct pollfd launcher = {run->alive, 0, 0};
    TRY(prctl(PR_SET_PDEATHSIG, number, 0, 0, 0));
    /* It may have died before this was set; its end of the pipe is gone then. */
    if (poll(&launcher, 1, 0) == 1 && launcher.revents & POLLERR)
        return ESRCH;
    return 0;
}

static int do_fd(struct run *run, int from, int to)
{
    if (run->place_count == FDS_MAX || to < 0 || to >= PLACES)
        return EINVAL;
    /* Out of the way of every target number, while the limit of open files is still high. */
    from = fcntl(from, F_DUPFD_CLOEXEC, PLACES);
    if (from < 0)
        return errno;
    run->places[run->place_count++] = (struct place){from, to};
    return 0;
}

/* Puts the descriptors where the program expects them and marks all others to be closed by the exec. */
static int place(struct run *run)
{
    if (run->placed)
        return 0;
    for (unsigned i = 0; i < run->plan->count; i++)
        if (run->plan->steps[i].op == OP_EXEC_FD) {
            run->exec_fd = run->descriptors[run->plan->steps[i].number[0]];
            for (unsigned p = 0; p < run->place_count; p++)
                if (run->places[p].to >= run->exec_fd)
                    run->exec_fd = fcntl(run->exec_fd, F_DUPFD_CLOEXEC, run->places[p].to + 1);
            if (run->exec_fd < 0)
                return errno;
        }
    TRY(rf_close_range(3, ~0u, RF_CLOSE_RANGE_CLOEXEC));
    for (unsigned i = 0; i < run->place_count; i++)
        TRY(dup2(run->places[i].from, run->places[i].to));
    run->placed = 1;
    return 0;
}

static int do_seccomp(struct run *run, int fd)
{
    static struct sock_filter filter[BPF_MAXINSNS];
    ssize_t size = pread(fd, filter, sizeof filter, 0);
    if (size <= 0 || (size_t)size % sizeof *filter)
        return size < 0 ? errno : EINVAL;
    struct sock_fprog program = {(unsigned short)((size_t)size / sizeof *filter), filter};
    /* What is left to do afterwards is the exec: the filter need not allow more than that. */
    int error = place(run);
    if (error)
        return error;
    TRY(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
    return 0;
}

static int do_exec(struct run *run, const struct step *step)
{
    sigset_t none;
    int error = place(run);
    if (error)
        return error;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    run->slot->ready = 1;
    if (step->op == OP_EXEC)
        execve(step->text[0], run->argv, run->envp);
    else
        syscall(SYS_execveat, run->exec_fd, "", run->argv, run->envp, RF_AT_EMPTY);
    return errno;
}

static int await_maps(struct run *run)
{
    while (!run->slot->go)
        if (syscall(SYS_futex, &run->slot->go, FUTEX_WAIT, 0, NULL, NULL, 0) && errno != EAGAIN && errno != EINTR)
            return errno;
    return 0;
}

static int do_prelude(struct run *run)
{
    const struct plan *plan = run->plan;
    unsigned step = run->slot->step;
    if (run->prelude_done)
        return 0;
    if (!run->prelude)
        return ENODATA;
    run->plan = run->prelude;
    run->prelude_done = 1;
    int error = run_steps(run, STEP_OF_PRELUDE);
    run->plan = plan;
    if (!error)
        run->slot->step = step;
    return error;
}

static int do_step(struct run *run, const struct step *step)
{
    const uint64_t *n = step->number;
    const char *const *t = step->text;
    struct rf_mount_attr attr = {0};
    switch ((enum op)step->op) {
    case OP_MAPS: return await_maps(run);
    case OP_CLONE: case OP_KEEP: case OP_EXIT_FILE: case OP_USERNS: case OP_INTO_CGROUP:
    case OP_READY: return 0;
    case OP_CGROUP_JOIN: TRY(write(run->descriptors[n[0]], "0", 1)); return 0;
    case OP_UNSHARE: TRY(unshare((int)n[0])); return 0;
    case OP_HOSTNAME: TRY(sethostname(t[0], strlen(t[0]))); return 0;
    case OP_LOOPBACK: return do_loopback();
    case OP_PRELUDE: return do_prelude(run);
    case OP_MOUNT: TRY(mount(t[0], t[1], t[2], n[0], t[3])); return 0;
    case OP_BIND: return do_bind(run, step);
    case OP_LOOP: return do_loop(step);
    case OP_PIVOT: return do_pivot(run, t[0]);
    case OP_DETACH: return do_detach(run);
    case OP_DETACH_BEGIN:
        run->detaching = run->host_root >= 0 && !janitor_detach(run->host_root);
        return 0;
    case OP_MKDIR: return do_mkdir(step);
    case OP_SYMLINK: return symlink(t[0], t[1]) && errno != EEXIST ? errno : 0;
    case OP_MKNOD: TRY(mknod(t[0], (mode_t)n[0], makedev((unsigned)n[1], (unsigned)n[2]))); return 0;
    case OP_WRITE: return do_write(t[0], t[1]);
    case OP_MASK: return do_mask(t[0]);
    case OP_READONLY: return do_readonly(t[0]);
    case OP_REMOUNT: attr.set = n[0]; TRY(rf_mount_setattr(AT_FDCWD, t[0], 0, &attr)); return 0;
    case OP_UMOUNT: return umount2(t[0], MNT_DETACH) && errno != EINVAL && errno != ENOENT ? errno : 0;
    case OP_OWNER: run->owner_uid = (uint32_t)n[0]; run->owner_gid = (uint32_t)n[1]; return 0;
    case OP_ENTER: return do_enter(run, t[0]);
    case OP_LEAVE: return do_leave(run);
    case OP_USERNS_ENTER: TRY(setns(run->userns, CLONE_NEWUSER)); return 0;
    case OP_RLIMIT: return do_rlimit(step);
    case OP_NO_NEW_PRIVS: TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)); return 0;
    case OP_LANDLOCK: return do_landlock(run, n[0], n[1]);
    case OP_LANDLOCK_PATH: return do_landlock_path(run, t[0], n[0]);
    case OP_LANDLOCK_APPLY: return do_landlock_apply(run);
    case OP_BECOME: return do_become(step);
    case OP_AWAIT: return do_await(run->descriptors[n[0]]);
    case OP_DEATH_SIGNAL: return do_death_signal(run, (int)n[0]);
    case OP_SECCOMP: return do_seccomp(run, run->descriptors[n[0]]);
    case OP_UMASK: umask((mode_t)n[0]); return 0;
    case OP_CHDIR: TRY(chdir(t[0])); return 0;
    case OP_SETSID: TRY(setsid()); return 0;
    case OP_FD: return do_fd(run, run->descriptors[n[0]], (int)n[1]);
    /* plan_parse has counted them: both arrays have room, with the NULL at the end. */
    case OP_ARG: run->argv[run->argc++] = (char *)(uintptr_t)t[0]; return 0;
    case OP_ENV: run->envp[run->envc++] = (char *)(uintptr_t)t[0]; return 0;
    case OP_EXEC: case OP_EXEC_FD: return do_exec(run, step);
    case OP_NETNS: return network_join(run->descriptors[n[0]]);
    case OP_GUARD: return network_guard_step(n[0], n[1], step->bytes, step->length);
    case OP_DONE: run->slot->ready = 1; _exit(0);
    }
    return ENOSYS;
}

void run_begin(struct run *run, const struct plan *plan, const int *descriptors, struct slot *slot, int alive, int userns)
{
    memset(run, 0, sizeof *run);
    run->plan = plan;
    run->descriptors = descriptors;
    run->slot = slot;
    run->alive = alive;
    run->userns = userns;
    run->host_root = run->ruleset = -1;
    run->owner_uid = run->owner_gid = UINT32_MAX;
}

int run_steps(struct run *run, unsigned mark)
{
    for (unsigned i = 0; i < run->plan->count; i++) {
        run->slot->step = i | mark;
        int error = do_step(run, &run->plan->steps[i]);
        if (error)
            return error;
    }
    return 0;
}
