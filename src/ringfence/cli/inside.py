"""Runs *inside* the sandbox that ``ringfence probe`` starts: tries to get out, and says how far it got.

The source is handed to a Python there (``python3 -I -S -c``), so it needs the standard library only, imports
nothing of ours and works with any Python from 3.8. It reads one JSON object from stdin: the canaries that
the host has put up. It prints one JSON object: for each attempt ``[blocked, detail]``. Nothing here harms:
every attempt stops at the proof that it would have worked. What it says is ``reported``: the host judges its
own side (did anybody connect, was anything written) and puts both together.
"""

# ruff: noqa: D103, S108 - each attempt's name says what it is; /tmp is the sandbox's own
from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import struct
import sys
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
NUMBERS = {  # name: (x86-64, the generic table that arm64 and riscv64 share)
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "clone3": (435, 435),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "setns": (308, 268),
    "sethostname": (170, 161),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000


def call(name: str, *arguments: Any) -> int:
    """A raw system call; 0 or the errno it failed with."""
    number = NUMBERS[name][0 if X86 else 1]
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(number), *values)
    return ctypes.get_errno() if result == -1 else 0


def denied(*attempts: tuple[str, int | None]) -> list[Any]:
    """``(what, errno)`` pairs: blocked if each was refused. EFAULT: the kernel would have gone on."""
    refused: tuple[int, ...] = (
        errno.EPERM,
        errno.ENOSYS,
        errno.EACCES,
        errno.ESRCH,
        errno.ENOENT,
        errno.EAFNOSUPPORT,
    )
    refused += (errno.EROFS, errno.ENXIO, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT, errno.ENODEV)
    through = [what for what, number in attempts if number not in refused]
    if through:
        return [False, "not refused: " + ", ".join(through)]
    names = sorted({errno.errorcode.get(number or 0, str(number)) for _, number in attempts})
    return [True, ", ".join(what for what, _ in attempts) + ": " + "/".join(names)]


def opened(path: str, flags: int) -> int | None:
    """0 if it could be opened, else the errno."""
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.errno
    return 0


def contains(path: str, token: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return token in file.read(1 << 20)
    except OSError:
        return False


def host_files(canary: dict[str, Any]) -> list[Any]:
    token = canary["token"].encode()
    ways = []
    for path in canary["files"]:
        ways += [path, "/proc/1/root" + path, "/proc/self/root" + path, "/proc/self/cwd" + "/.." * 12 + path]
    found = [way for way in ways if contains(way, token)]
    if not found:
        try:
            os.symlink(canary["files"][0], "/tmp/ringfence-probe-link")
            if contains("/tmp/ringfence-probe-link", token):
                found.append("a symlink")
            os.unlink("/tmp/ringfence-probe-link")
        except OSError:
            pass
    return [not found, "read " + found[0] if found else f"{len(ways) + 1} ways tried"]


def host_secrets(canary: dict[str, Any]) -> list[Any]:
    found = []
    for path in ["/etc/shadow", "/root/.ssh", "/root/.bash_history", *canary["secrets"]]:
        try:
            if os.path.isdir(path):
                if os.listdir(path):
                    found.append(path)
            elif os.path.exists(path):
                with open(path, "rb") as file:
                    if file.read(1):
                        found.append(path)
        except OSError:
            continue
    return [not found, "readable: " + ", ".join(found) if found else "none of them is there or readable"]


def environment(canary: dict[str, Any]) -> list[Any]:
    token = canary["token"]
    leaks = [name for name, value in os.environ.items() if token in value]
    if contains("/proc/1/environ", token.encode()):
        leaks.append("/proc/1/environ")
    return [
        not leaks,
        "leaked: " + ", ".join(leaks) if leaks else f"{len(os.environ)} variables, none of the host",
    ]


def descriptors(_: dict[str, Any]) -> list[Any]:
    odd = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue  # the listing's own
        if int(name) > 2 and not target.startswith("/proc/"):
            odd.append(name + " -> " + target)
    return [not odd, "; ".join(odd) or "only stdin, stdout and stderr"]


def host_processes(canary: dict[str, Any]) -> list[Any]:
    token = canary["token"].encode()
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    seen = [pid for pid in pids if contains(f"/proc/{pid}/cmdline", token)]
    seen = [pid for pid in seen if int(pid) != os.getpid()]
    return [
        not seen,
        "saw process " + seen[0] if seen else f"{len(pids)} processes visible, all of the sandbox",
    ]


def signal_host(canary: dict[str, Any]) -> list[Any]:
    if contains(f"/proc/{canary['pid']}/cmdline", canary["token"].encode()):
        try:
            os.kill(canary["pid"], 0)
        except OSError as error:
            return [True, os.strerror(error.errno or 0)]
        return [False, f"signal 0 reached process {canary['pid']}"]
    return [True, "no such process here"]


def trace_others(canary: dict[str, Any]) -> list[Any]:
    buffer = ctypes.create_string_buffer(16)
    local = struct.pack("QQ", ctypes.addressof(buffer), 8)
    remote = struct.pack("QQ", 0x1000, 8)
    vector = [ctypes.c_char_p(local), 1, ctypes.c_char_p(remote), 1, 0]
    seize = 0x4206  # unlike PTRACE_ATTACH it does not stop the process, should it be allowed
    attempts: list[tuple[str, int | None]] = [
        (f"ptrace({pid})", call("ptrace", seize, pid, 0, 0)) for pid in (1, canary["pid"])
    ]
    attempts += [("process_vm_readv(1)", call("process_vm_readv", 1, *vector))]
    attempts += [("/proc/1/mem", opened("/proc/1/mem", os.O_RDWR))]
    return denied(*attempts)


def mounts(_: dict[str, Any]) -> list[Any]:
    name = ctypes.c_char_p
    return denied(
        ("mount", call("mount", name(b"none"), name(b"/tmp"), name(b"tmpfs"), 0, name(b""))),
        ("remount", call("mount", name(b"none"), name(b"/"), name(b""), 0x20 | 0x1000, name(b""))),
        ("umount", call("umount2", name(b"/proc"), 2)),
        ("pivot_root", call("pivot_root", name(b"/tmp"), name(b"/tmp"))),
        ("open_tree", call("open_tree", -100, name(b"/"), 1)),
        ("chroot", chroot()),
    )


def chroot() -> int:
    # In a child: should it work, we must not be the one who sits in there.
    pid = os.fork()
    if pid == 0:
        try:
            os.chroot("/tmp")
        except OSError as error:
            os._exit(error.errno or 255)
        os._exit(0)
    return os.WEXITSTATUS(os.waitpid(pid, 0)[1])


def namespaces(_: dict[str, Any]) -> list[Any]:
    attempts: list[tuple[str, int | None]] = []
    for name, flag in (("user", CLONE_NEWUSER), ("mount", CLONE_NEWNS), ("net", CLONE_NEWNET)):
        pid = os.fork()
        if pid == 0:
            os._exit(call("unshare", flag))
        attempts.append(("unshare " + name, os.WEXITSTATUS(os.waitpid(pid, 0)[1])))
    for name in ("mnt", "pid", "net"):
        try:
            descriptor = os.open("/proc/1/ns/" + name, os.O_RDONLY)
        except OSError as error:
            attempts.append(("setns " + name, error.errno))
            continue
        attempts.append(("setns " + name, call("setns", descriptor, 0)))
        os.close(descriptor)
    return denied(*attempts)


def kernel_settings(_: dict[str, Any]) -> list[Any]:
    paths = [
        "kernel/core_pattern",
        "kernel/modprobe",
        "kernel/hostname",
        "vm/overcommit_memory",
        "fs/file-max",
    ]
    attempts = [(path, opened("/proc/sys/" + path, os.O_WRONLY)) for path in paths]
    attempts.append(("/proc/sysrq-trigger", opened("/proc/sysrq-trigger", os.O_WRONLY)))
    attempts.append(("/sys/kernel/uevent_helper", opened("/sys/kernel/uevent_helper", os.O_WRONLY)))
    return denied(*attempts)


def kernel_memory(_: dict[str, Any]) -> list[Any]:
    paths = ["/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmem", "/dev/kmsg", "/dev/port"]
    found = []
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if os.read(descriptor, 1):  # a masked file opens, and is empty
                found.append(path)
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return [not found, "readable: " + ", ".join(found) if found else f"none of {len(paths)} can be read"]


SAFE_DEVICES = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}


def devices(canary: dict[str, Any]) -> list[Any]:
    odd = []
    for base, folders, names in os.walk("/dev"):
        folders[:] = [name for name in folders if os.path.join(base, name) != "/dev/pts"]
        for name in names:
            path = os.path.join(base, name)
            try:
                kind = os.lstat(path).st_mode & 0o170000
            except OSError:
                continue
            if kind in (0o060000, 0o020000) and name not in SAFE_DEVICES:
                odd.append(path)
    made = []
    for kind, number in ((0o060000, os.makedev(8, 0)), (0o020000, os.makedev(1, 1))):
        try:
            os.mknod("/tmp/ringfence-probe-device", kind | 0o600, number)
        except OSError:
            continue
        # Making one is harmless where devices don't work (nodev): only one that opens counts.
        if opened("/tmp/ringfence-probe-device", os.O_RDONLY) == 0:
            made.append("mknod")
        os.unlink("/tmp/ringfence-probe-device")
    bad = odd[:5] + made
    if canary.get("own_kernel"):  # whatever answers there is the sandbox's own kernel, not the host's
        return [True, "of its own kernel: " + (", ".join(bad) or "only harmless ones")]
    return [not bad, "reachable: " + ", ".join(bad) if bad else "only harmless ones; no new one can be used"]


def status() -> dict[str, str]:
    found = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


def no_new_privs() -> str | None:
    """``1`` or ``0``; None where the kernel knows nothing of it. Not every kernel shows it in ``status``."""
    value = status().get("NoNewPrivs")
    if value is None and (found := LIBC.prctl(39, 0, 0, 0, 0)) >= 0:  # PR_GET_NO_NEW_PRIVS
        value = str(found)
    return value


def capabilities(canary: dict[str, Any]) -> list[Any]:
    values = {name: int(status()["Cap" + name], 16) for name in ("Inh", "Prm", "Eff", "Bnd")}
    values["Amb"] = int(status().get("CapAmb", "0"), 16)  # a kernel without the ambient set has none
    held = [name for name, value in values.items() if value and name != ("Bnd" if canary["root"] else "")]
    text = " ".join(f"{name}={value:x}" for name, value in values.items())
    return [not held or canary["root"], text]


def no_new_privileges(_: dict[str, Any]) -> list[Any]:
    value = no_new_privs()
    return [value == "1", f"NoNewPrivs: {value}"]


def seccomp(_: dict[str, Any]) -> list[Any]:
    value = status().get("Seccomp")
    return [value == "2", f"Seccomp: {value}"]


def forbidden_calls(_: dict[str, Any]) -> list[Any]:
    zero = ctypes.c_void_p(0)
    return denied(
        ("bpf", call("bpf", 0, zero, 0)),
        ("perf_event_open", call("perf_event_open", zero, 0, -1, -1, 0)),
        ("userfaultfd", call("userfaultfd", 1)),
        ("io_uring_setup", call("io_uring_setup", 1, zero)),
        ("keyctl", call("keyctl", 0, -3, 0)),
        (
            "add_key",
            call("add_key", ctypes.c_char_p(b"user"), ctypes.c_char_p(b"x"), ctypes.c_char_p(b"y"), 1, -2),
        ),
        ("kexec_load", call("kexec_load", 0, 0, zero, 0)),
        ("init_module", call("init_module", zero, 0, zero)),
        ("open_by_handle_at", call("open_by_handle_at", -100, zero, 0)),
        ("swapon", call("swapon", zero, 0)),
        ("reboot", call("reboot", 0, 0, 0, zero)),
        ("clock_settime", call("clock_settime", 0, zero)),
    )


def raw_sockets(_: dict[str, Any]) -> list[Any]:
    attempts = []
    kinds = (("packet", 17, 3), ("raw IP", 2, 3), ("vsock", 40, 1), ("netlink audit", 16, 3))
    for name, family, kind in kinds:
        try:
            socket.socket(family, kind, {"raw IP": 1, "netlink audit": 9}.get(name, 0)).close()
        except OSError as error:
            attempts.append((name, error.errno))
        else:
            attempts.append((name, 0))
    return denied(*attempts)


def interfaces(_: dict[str, Any]) -> list[Any]:
    names = [name for _, name in socket.if_nameindex()]
    odd = [name for name in names if name != "lo"]
    return [not odd, "interfaces: " + (", ".join(names) or "none")]


def routes(_: dict[str, Any]) -> list[Any]:
    found = []
    for address in ("169.254.169.254", "192.0.2.1", "10.0.0.1", "1.1.1.1"):
        link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            link.connect((address, 53))  # asks for a route; a datagram socket sends nothing by that
            found.append(address)
        except OSError:
            pass
        finally:
            link.close()
    return [not found, "a route to " + ", ".join(found) if found else "no route to any address"]


def connects(family: int, address: Any) -> list[Any]:
    link = socket.socket(family, socket.SOCK_STREAM)
    link.settimeout(2)
    try:
        link.connect(address)
    except OSError as error:
        return [True, os.strerror(error.errno) if error.errno else "no answer"]
    finally:
        link.close()
    return [False, "connected"]


def host_loopback(canary: dict[str, Any]) -> list[Any]:
    return connects(socket.AF_INET, ("127.0.0.1", canary["port"]))


def host_sockets(canary: dict[str, Any]) -> list[Any]:
    for address in ("\0" + canary["abstract"], canary["socket"]):
        blocked, _ = connects(socket.AF_UNIX, address)
        if not blocked:
            return [False, "connected to " + address.replace("\0", "@")]
    return [True, "neither the abstract nor the named one answers"]


def host_name(canary: dict[str, Any]) -> list[Any]:
    new, old = b"ringfence-probe", os.uname().nodename.encode()
    refused = call("sethostname", ctypes.c_char_p(new), len(new))
    name = os.uname().nodename
    if not refused:  # where nothing is in the way it is the host's own
        call("sethostname", ctypes.c_char_p(old), len(old))
    blocked = name != canary["hostname"]
    return [blocked and refused != 0, f"{name}; sethostname: {errno.errorcode.get(refused, 'allowed')}"]


def setuid(_: dict[str, Any]) -> list[Any]:
    suid = []
    for path in ("/", "/usr", "/tmp", "/workspace", "/home/agent", "/opt"):
        try:
            flags = os.statvfs(path).f_flag
        except OSError:
            continue
        if not flags & os.ST_NOSUID:
            suid.append(path)
    before = os.geteuid()
    text = ("setuid honoured on " + ", ".join(suid)) if suid else "every file system is nosuid"
    value = no_new_privs()
    return [value == "1" or not suid, f"uid {before}; {text}; no_new_privs {value}"]


def cgroups(_: dict[str, Any]) -> list[Any]:
    found = []
    for base, folders, names in os.walk("/sys/fs/cgroup"):
        if base.count("/") > 6:
            folders.clear()
        for name in names:
            if name in ("release_agent", "cgroup.procs", "notify_on_release", "memory.max", "tasks"):
                path = os.path.join(base, name)
                if opened(path, os.O_WRONLY) == 0:
                    found.append(path)
    with open("/proc/self/cgroup") as file:
        places = sorted({line.strip().split(":", 2)[2] for line in file})
    return [
        not found,
        "writable: " + found[0] if found else "none writable; own place shown as " + " ".join(places[:3]),
    ]


def terminals(_: dict[str, Any]) -> list[Any]:
    # A terminal of our own stands in for the caller's: the ioctl is what matters.
    master, slave = os.openpty()
    try:
        import fcntl
        import termios

        try:
            fcntl.ioctl(slave, termios.TIOCSTI, b"x")
        except OSError as error:
            return [True, "TIOCSTI: " + errno.errorcode.get(error.errno or 0, "?")]
        return [False, "TIOCSTI works"]
    finally:
        os.close(master)
        os.close(slave)


def identity(canary: dict[str, Any]) -> list[Any]:
    with open("/proc/self/uid_map") as file:
        lines = [" ".join(line.split()) for line in file]
    wanted = 0 if canary["root"] else None
    ok = os.getuid() != 0 or wanted == 0
    return [ok, f"uid {os.getuid()}, uid_map {'; '.join(lines)}"]


ATTEMPTS = {
    "host-files": host_files,
    "host-secrets": host_secrets,
    "environment": environment,
    "descriptors": descriptors,
    "host-processes": host_processes,
    "signal-host": signal_host,
    "trace": trace_others,
    "mount": mounts,
    "namespaces": namespaces,
    "kernel-settings": kernel_settings,
    "kernel-memory": kernel_memory,
    "devices": devices,
    "capabilities": capabilities,
    "no-new-privileges": no_new_privileges,
    "seccomp": seccomp,
    "system-calls": forbidden_calls,
    "raw-sockets": raw_sockets,
    "interfaces": interfaces,
    "routes": routes,
    "host-loopback": host_loopback,
    "host-sockets": host_sockets,
    "host-name": host_name,
    "setuid": setuid,
    "cgroups": cgroups,
    "terminal-injection": terminals,
    "identity": identity,
}


def attempts(canary: dict[str, Any]) -> dict[str, list[Any]]:
    """Every attempt's outcome; one that fails in a way nobody thought of is not blocked, it is unknown."""
    found = {}
    for name, attempt in ATTEMPTS.items():
        try:
            found[name] = attempt(canary)
        except Exception as error:  # told to the host, which counts it as not measured
            found[name] = [None, f"{type(error).__name__}: {error}"]
    return found


if __name__ == "__main__":
    print(json.dumps(attempts(json.load(sys.stdin))))
