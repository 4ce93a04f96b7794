"""Compiles one module, in a process of its own: ``python -I -S -c … CONFIG``. Reads WebAssembly on standard
input, writes machine code to standard output.

A module is hostile input to the compiler. So before it reads one, the process gives up what it does not
need: root, the network, every file, new privileges, and system calls as in a sandbox; memory and time are
bounded. A compiler that was taken over can spoil the cache entry of its own module only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

from ringfence.runtimes.wasm.engine import Engine, EngineError

_NOBODY = 65534
_CLONE_NEWIPC, _CLONE_NEWUTS, _CLONE_NEWNET = 0x08000000, 0x04000000, 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _FILTER = 38, 4, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_FILES = (1 << 13) - 1  # of the first version; a kernel without Landlock has the other layers


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def lock_down(memory: int, seconds: int) -> None:
    """Keep the right to compute, and the open streams.

    Raises:
        OSError: a layer that must be there could not be put up.
    """
    from ringfence.runtimes import seccomp

    libc = ctypes.CDLL(None, use_errno=True)
    program = seccomp.load("default")
    for number, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),  # a pipe is no file
    ):
        resource.setrlimit(number, (value, value))
    if os.geteuid() == 0:
        libc.unshare(
            _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
        )  # without the right there is no root either
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    rules = libc.syscall(_LANDLOCK_CREATE, struct.pack("<Q", _LANDLOCK_FILES), ctypes.c_size_t(8), 0)
    if rules >= 0 and libc.syscall(_LANDLOCK_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock")
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(program) // 8, program)), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def main() -> None:
    """Entry of the compiling process."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    engine = Engine(config["library"], fuel=config["fuel"], interruptible=config["interruptible"])
    engine.compile(b"\0asm\1\0\0\0")  # what is loaded or read on first use is, before it can't be any more
    lock_down(config["memory"], config["seconds"])
    code = sys.stdin.buffer.read()
    try:
        made = engine.serialize(engine.compile(code))
    except EngineError as error:
        sys.stderr.write(str(error)[:4000])
        raise SystemExit(1) from None
    sys.stdout.buffer.write(made)
