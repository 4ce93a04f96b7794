"""As ``inside``, for a Python that is itself WebAssembly: no ctypes, no processes, only what WASI gives it.

Runs inside the sandbox of the runtime ``wasm``; standard library only. Where a promise rests on a system
call, the attempt is to find any way to make one: a function of ``os`` or ``socket``, or a foreign interface.
"""

# ruff: noqa: D103, S108 - each attempt's name says what it is; /tmp is the sandbox's own
from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

# What would be harmless if it worked: each stops at the proof.
_CALLS: dict[str, tuple[Any, ...]] = {
    "chroot": ("/tmp",),
    "fork": (),
    "forkpty": (),
    "getppid": (),
    "kill": (1, 0),
    "mkfifo": ("/tmp/ringfence-probe-pipe",),
    "mknod": ("/tmp/ringfence-probe-device", 0o020600, 0x101),
    "openpty": (),
    "pidfd_open": (1,),
    "posix_spawn": ("/bin/true", ["true"], {}),
    "ptsname": (0,),
    "sched_setaffinity": (0, [0]),
    "setgid": (0,),
    "setns": (0, 0),
    "setpriority": (0, 0, 0),
    "setuid": (0,),
    "system": ("true",),
    "unshare": (0x10000000,),
}


def refused(*names: str) -> list[Any]:
    """Blocked if none of these functions of ``os`` is there and works, and no other way to the kernel is."""
    through = []
    for name in names:
        function: Callable[..., Any] | None = getattr(os, name, None)
        if function is None:
            continue
        try:
            if function(*_CALLS[name]) in (0, (0, -1)) and "fork" in name:
                os._exit(0)  # a child, which there should not be
        except OSError:
            continue
        through.append(name)
    for module in ("ctypes", "_ctypes", "cffi", "_posixsubprocess", "_multiprocessing", "mmap"):
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        if module in ("ctypes", "_ctypes", "cffi"):
            through.append(found.__name__)
    if through:
        return [False, "not refused: " + ", ".join(through)]
    return [True, ", ".join((*names, "ctypes")) + ": not there"]


def contains(path: str, token: str) -> bool:
    try:
        with open(path, errors="replace") as file:
            return token in file.read(1 << 20)
    except OSError:
        return False


def unreadable(*paths: str) -> list[Any]:
    found = []
    for path in paths:
        try:
            if os.path.isdir(path):
                found += [path] if os.listdir(path) else []
            else:
                with open(path, "rb") as file:
                    found += [path] if file.read(1) else []
        except OSError:
            continue
    return [not found, "readable: " + ", ".join(found) if found else f"none of {len(paths)} is there"]


def host_files(canary: dict[str, Any]) -> list[Any]:
    ways = []
    for path in canary["files"]:
        for before in (
            "",
            "/proc/1/root",
            "/proc/self/root",
            "/.." * 12,
            "/workspace" + "/.." * 12,
            "../" * 12,
        ):
            ways.append(before + path)
    found = [way for way in ways if contains(way, canary["token"])]
    if not found:
        for number, target in enumerate((canary["files"][0], "../" * 12 + canary["files"][0].lstrip("/"))):
            link = f"/tmp/ringfence-probe-link{number}"
            try:
                os.symlink(target, link)
            except OSError:
                continue
            if contains(link, canary["token"]):
                found.append("a symlink")
            os.unlink(link)
    return [not found, "read " + found[0] if found else f"{len(ways) + 2} ways tried"]


def host_secrets(canary: dict[str, Any]) -> list[Any]:
    return unreadable("/etc/shadow", "/root/.ssh", "/root/.bash_history", *canary["secrets"])


def environment(canary: dict[str, Any]) -> list[Any]:
    leaks = [name for name, value in os.environ.items() if canary["token"] in value]
    if contains("/proc/1/environ", canary["token"]):
        leaks.append("/proc/1/environ")
    return [
        not leaks,
        "leaked: " + ", ".join(leaks) if leaks else f"{len(os.environ)} variables, none of the host",
    ]


def descriptors(_: dict[str, Any]) -> list[Any]:
    odd = []
    for number in range(3, 256):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        if mode & 0o170000 != 0o040000:  # the folders that the policy opens are descriptors here
            odd.append(str(number))
    return [not odd, "open: " + ", ".join(odd) if odd else "only the streams and the opened folders"]


def host_processes(_: dict[str, Any]) -> list[Any]:
    return unreadable("/proc", "/proc/1/cmdline", "/proc/self/status")


def sockets(*families: int) -> list[Any]:
    try:
        import socket
    except ImportError:
        return [True, "no sockets"]
    made = []
    for family in families:
        for kind in (1, 2, 3):
            try:
                socket.socket(family, kind).close()
            except (OSError, AttributeError):
                continue
            made.append(f"{family}/{kind}")
    return [not made, "sockets of family/kind " + ", ".join(made) if made else "no socket can be made"]


def host_name(canary: dict[str, Any]) -> list[Any]:
    name = os.uname().nodename
    return [name != canary["hostname"], f"{name!r}"]


def on_the_host(_: dict[str, Any]) -> list[Any]:
    """Nothing inside could say; the host reads it of the worker's process."""
    return [True, "read on the host"]


ATTEMPTS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "host-files": host_files,
    "host-secrets": host_secrets,
    "environment": environment,
    "descriptors": descriptors,
    "host-processes": host_processes,
    "signal-host": lambda _: refused("kill", "pidfd_open", "getppid"),
    "trace": lambda _: refused("pidfd_open"),
    "mount": lambda _: refused("chroot"),
    "namespaces": lambda _: refused("unshare", "setns"),
    "kernel-settings": lambda _: unreadable("/proc/sys", "/sys/kernel", "/proc/sysrq-trigger"),
    "kernel-memory": lambda _: unreadable("/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmem", "/dev/port"),
    "devices": lambda _: [
        a and b for a, b in zip(refused("mknod"), unreadable("/dev", "/dev/null"), strict=True)
    ],
    "capabilities": on_the_host,
    "no-new-privileges": on_the_host,
    "seccomp": on_the_host,
    "system-calls": lambda _: refused(*_CALLS),
    "raw-sockets": lambda _: sockets(2, 10, 16, 17, 40),
    "interfaces": on_the_host,
    "routes": lambda _: sockets(2, 10),
    "host-loopback": lambda _: sockets(2, 10),
    "host-sockets": lambda _: sockets(1),
    "host-name": host_name,
    "setuid": lambda _: refused("setuid", "setgid", "posix_spawn", "system"),
    "cgroups": lambda _: unreadable("/sys/fs/cgroup", "/proc/self/cgroup"),
    "terminal-injection": lambda _: refused("openpty", "forkpty", "ptsname"),
    "identity": on_the_host,
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
