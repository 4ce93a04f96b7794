# ruff: noqa
# Opens every node under /dev that is more than a harmless one; and the usual dangerous names.
import stat

harmless = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)} | {
    (n, m) for n in range(136, 144) for m in range(1024)
}
names = {
    "/dev/mem",
    "/dev/kmsg",
    "/dev/port",
    "/dev/vda",
    "/dev/sda",
    "/dev/kvm",
    "/dev/fuse",
    "/dev/net/tun",
    "/dev/loop-control",
    "/dev/loop0",
    "/dev/mapper/control",
    "/dev/cpu/0/msr",
    "/dev/uinput",
    "/dev/vhost-net",
    "/dev/vsock",
    "/dev/userfaultfd",
    "/dev/console",
    "/dev/tty0",
    "/dev/ttyS0",
    "/dev/snapshot",
    "/dev/btrfs-control",
}
seen = set()
for base, _, files in os.walk("/dev"):
    names |= {os.path.join(base, name) for name in files}
for name in sorted(names):
    try:
        status = os.stat(name)
    except OSError as error:
        seen.add(describe(error))
        continue
    kind = stat.S_IFMT(status.st_mode)
    if (
        kind not in (stat.S_IFCHR, stat.S_IFBLK)
        or (os.major(status.st_rdev), os.minor(status.st_rdev)) in harmless
    ):
        continue
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
        verdict("succeeded", by=name)
    except OSError as error:
        seen.add(describe(error))
verdict("+".join(sorted(seen)))
