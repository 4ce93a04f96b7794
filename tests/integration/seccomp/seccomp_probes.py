"""Try system calls for real, each in a process of its own: ``seccomp_probes.py on|off`` prints JSON.

A probe is ``prepare`` (before the filter) and ``call`` (after it); the answer is ``"ok"`` or the name of an
errno. All are harmless without the filter too: they act on the child only, or fail on their arguments.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import pty
import select
import signal
import sys
import termios
from collections.abc import Callable
from fcntl import ioctl

from seccomp_filtered import install

from ringfence.runtimes import seccomp
from ringfence.runtimes.seccomp import table

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = table.numbers(platform.machine())
HIGH = 1 << 32
BAD = 1  # an address that is never mapped
PROBES: dict[str, tuple[Callable[[], object], Callable[[object], object]]] = {}


def call(name: str, *args: int | bytes) -> int:
    """One raw system call; raises OSError."""
    converted = [
        ctypes.c_char_p(arg) if isinstance(arg, bytes) else ctypes.c_ulong(arg & 2**64 - 1) for arg in args
    ]
    result = int(LIBC.syscall(ctypes.c_long(NUMBERS[name]), *converted))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def probe(name: str, run: Callable[..., object], prepare: Callable[[], object] | None = None) -> None:
    if name.split()[0] in NUMBERS:
        PROBES[name] = (prepare or (lambda: None), (lambda made: run(made)) if prepare else (lambda _: run()))


def plain(name: str, *args: int | bytes) -> None:
    probe(name.strip(), lambda: call(name.split()[0], *args))


# -- denied: without the filter these work, or fail for a reason of their own -----------------------

plain("unshare newuser", 0x10000000)
plain("unshare newuts", 0x04000000)
probe("setns", lambda made: call("setns", int(made), 0), lambda: os.open("/proc/self/ns/uts", os.O_RDONLY))
plain("mount", b"none", b"/nonexistent", b"tmpfs", 0, 0)
plain("umount2", b"/nonexistent", 0)
plain("pivot_root", b"/nonexistent", b"/nonexistent")
plain("chroot", b"/")
plain("move_mount", 10**6, b"", 10**6, b"", 0)
plain("open_tree", 10**6, b"x", 0)
plain("fsopen", b"tmpfs", 0)
plain("fsconfig", 10**6, 0, 0, 0, 0)
plain("fsmount", 10**6, 0, 0)
plain("fspick", 10**6, b"x", 0)
plain("mount_setattr", 10**6, b"x", 0, BAD, 32)
plain("ptrace", 0, 0, 0, 0)
plain("process_vm_readv", os.getpid(), 0, 0, 0, 0, 0)
plain("process_vm_writev", os.getpid(), 0, 0, 0, 0, 0)
probe("pidfd_getfd", lambda made: call("pidfd_getfd", int(made), 0, 0), lambda: os.pidfd_open(os.getpid()))
probe("kcmp", lambda: call("kcmp", os.getpid(), os.getpid(), 0, 0, 1))
plain("process_madvise", 10**6, 0, 0, 0, 0)
plain("process_mrelease", 10**6, 0)
plain("bpf", 0, BAD, 8)
plain("perf_event_open", BAD, 0, -1, -1, 0)
plain("userfaultfd", 1)
probe("io_uring_setup", lambda: call("io_uring_setup", 1, ctypes.addressof(ctypes.create_string_buffer(120))))
plain("io_uring_enter", 10**6, 0, 0, 0, 0, 0)
plain("io_uring_register", 10**6, 0, 0, 0)
plain("add_key", b"user", b"probe", b"x", 1, -2)
plain("request_key", b"user", b"no such key", 0, 0)
plain("keyctl", 0, -2, 1)
plain("init_module", BAD, 1, b"")
plain("finit_module", 10**6, b"", 0)
plain("delete_module", b"no_such_module", 0)
plain("kexec_load", 0, 10**6, BAD, 0)
plain("kexec_file_load", 10**6, 10**6, 0, 0, 0)
plain("reboot", 0, 0, 0, 0)
plain("swapon", b"/nonexistent", 0)
plain("swapoff", b"/nonexistent")
plain("acct", b"/nonexistent/x")
plain("quotactl", 0, b"/nonexistent", 0, 0)
plain("quotactl_fd", 10**6, 0, 0, 0)
plain("syslog", 10, 0, 0)
plain("iopl", 0)
plain("ioperm", 0, 1, 0)
plain("sethostname", BAD, 4)
plain("setdomainname", BAD, 4)
plain("settimeofday", BAD, 0)
plain("clock_settime", 0, BAD)
plain("clock_adjtime", 0, BAD)
plain("adjtimex", BAD)
plain("name_to_handle_at", -100, b"/nonexistent", BAD, BAD, 0)
plain("open_by_handle_at", 10**6, BAD, 0)
plain("fanotify_init", 0, 0)
plain("fanotify_mark", 10**6, 1, 0, -100, 0)
plain("migrate_pages", 0, 0, 0, 0)
plain("move_pages", 0, 0, 0, 0, 0, 0)
plain("modify_ldt", 0, 0, 0)
for _flag in (17, 25, 26, 27, 28, 29, 30):

    def _clone(flag: int = _flag) -> None:
        pid = call("clone", signal.SIGCHLD | 1 << flag, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    probe(f"clone with bit {_flag}", _clone)
plain("socket packet", 17, 3, 0)
plain("socket packet with bit 32", HIGH | 17, 3, 0)
plain("socket raw ipv4", 2, 3, 255)
plain("socket raw ipv4 with bit 32", 2, HIGH | 3, 255)
plain("socket raw ipv6", 10, 3, 58)
plain("socket netlink kobject", 16, 3, 15)
plain("socket netlink netfilter", 16, 3, 12)
plain("socket netlink audit", 16, 3, 9)
plain("socket vsock", 40, 1, 0)
plain("socket alg", 38, 5, 0)
plain("socket key", 15, 3, 2)
plain("socketpair tipc", 30, 1, 0, BAD)
plain("personality read implies exec", 0x400000)
plain("personality with bit 32", HIGH | 0x400000)


def _folder() -> str:
    import tempfile

    return tempfile.mkdtemp(dir=sys.argv[2])


probe("mknodat device", lambda made: os.mknod(f"{made}/d", 0o020600, os.makedev(1, 3)), _folder)
probe("mknodat whiteout", lambda made: os.mknod(f"{made}/w", 0o020000, 0), _folder)


def _terminal() -> int:
    """A terminal of our own as the controlling one; returns our end, which receives what is injected."""
    os.setsid()
    _, slave = pty.openpty()
    ioctl(slave, termios.TIOCSCTTY, 0)
    return slave


probe("ioctl TIOCSTI", lambda slave: call("ioctl", int(slave), termios.TIOCSTI, b"x"), _terminal)
probe(
    "ioctl TIOCSTI with bit 32",
    lambda slave: call("ioctl", int(slave), HIGH | termios.TIOCSTI, b"x"),
    _terminal,
)
probe("ioctl TIOCSETD", lambda slave: call("ioctl", int(slave), termios.TIOCSETD, bytes(4)), _terminal)

# -- absent -----------------------------------------------------------------------------------------

plain("clone3", BAD, 88)
plain("memfd_secret", 0)
plain("statmount", BAD, BAD, 0, 0)
probe("read of number 600", lambda: _number(600))
if platform.machine() == "x86_64":
    probe("getpid by x32", lambda: _number(0x40000000 | NUMBERS["getpid"]))


def _number(number: int) -> None:
    if LIBC.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# -- allowed: the same with and without -------------------------------------------------------------

plain("socket unix", 1, 1, 0)
plain("socket tcp", 2, 1 | 0o2000000, 6)
plain("socket udp6", 10, 2, 0)
plain("socket netlink route", 16, 3, 0)
plain("memfd_create", b"x", 0)
plain("landlock_create_ruleset", 0, 0, 1)
plain("seccomp available", 2, 0, BAD)  # SECCOMP_GET_ACTION_AVAIL: EFAULT, so it reached the kernel
probe("pidfd_open", lambda: call("pidfd_open", os.getpid(), 0))
plain("personality query", 0xFFFFFFFF)
plain("prctl name", 15, b"probe")
probe("ioctl window size", lambda slave: call("ioctl", int(slave), termios.TIOCGWINSZ, bytes(8)), _terminal)
probe("mknodat fifo", lambda made: os.mkfifo(f"{made}/f"), _folder)
plain("getrandom", BAD, 0, 0)
plain("prctl set_mm", 35, 1000, 0, 0, 0)


def attempt(name: str, filtered: bool) -> str:
    """The answer to one probe, in a child."""
    prepare, run = PROBES[name]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "died"
        try:
            made = prepare()
            if filtered:
                install(seccomp.load())
            run(made)
            answer = "ok"
        except OSError as error:
            answer = errno.errorcode.get(error.errno or 0, str(error.errno))
        except BaseException as error:
            answer = f"broken: {error!r}"
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], 20)
    answer = os.read(reader, 1000).decode() if ready else "hung"
    os.close(reader)
    if not ready:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return answer or f"killed by {os.WTERMSIG(status)}"


if __name__ == "__main__":
    seccomp.load()
    print(json.dumps({name: attempt(name, sys.argv[1] == "on") for name in PROBES}))
