/* mount.c VARIANT FOLDER: mounting in every way there is. The namespace is the attacker's own; a mount in it would unmask what is masked. */
#include "verdict.h"
#include <sys/mount.h>
#include <sys/stat.h>

int main(int argc, char **argv) {
    if (argc < 3) usage();
    const char *place = argv[2];
    char upper[256], work[256], options[600];
    snprintf(upper, sizeof upper, "%s-upper", place);
    snprintf(work, sizeof work, "%s-work", place);
    snprintf(options, sizeof options, "lowerdir=/usr,upperdir=%s,workdir=%s,userxattr", upper, work);
    mkdir(place, 0777);
    if (IS("tmpfs")) call(mount("none", place, "tmpfs", 0, ""));
    if (IS("proc")) call(mount("none", place, "proc", 0, ""));
    if (IS("sysfs")) call(mount("none", place, "sysfs", 0, ""));
    if (IS("bind")) call(mount("/usr", place, NULL, MS_BIND | MS_REC, NULL));
    if (IS("remount")) call(mount(NULL, "/usr", NULL, MS_REMOUNT | MS_BIND, NULL));
    if (IS("propagation")) call(mount(NULL, "/", NULL, MS_REC | MS_SHARED, NULL));
    if (IS("overlay")) {
        mkdir(upper, 0777);
        mkdir(work, 0777);
        call(mount("overlay", place, "overlay", 0, options));
    }
    if (IS("umount")) call(umount2("/proc", MNT_DETACH));
    if (IS("fsopen")) call(syscall(430, "tmpfs", 0));
    if (IS("open_tree")) call(syscall(428, AT_FDCWD, "/", 1 | 0x8000)); /* CLONE, RECURSIVE */
    if (IS("move_mount")) call(syscall(429, AT_FDCWD, "/proc", AT_FDCWD, place, 0));
    if (IS("mount_setattr")) {
        unsigned long attr[4] = {0, 1, 0, 0}; /* clear MOUNT_ATTR_RDONLY */
        call(syscall(442, AT_FDCWD, "/usr", 0, attr, sizeof attr));
    }
    if (IS("pivot_root")) {
        chdir(place);
        call(syscall(SYS_pivot_root, ".", "."));
    }
    usage();
}
