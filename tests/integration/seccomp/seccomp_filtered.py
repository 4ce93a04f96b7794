"""Install a filter on this process, then become the given program: ``filtered.py CMD…`` (a test helper)."""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(code: bytes) -> None:
    """Put the filter on the calling thread for ever."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    from ringfence.runtimes import seccomp

    install(seccomp.load())
    os.execvp(sys.argv[1], sys.argv[1:])
