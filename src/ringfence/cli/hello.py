"""The static command of the benches: a program of 160 bytes that writes ``ok`` and ends.

Made here rather than compiled, so that a bench needs no C compiler and starts the same bytes everywhere. It
has no interpreter and no libraries: what is measured is the wall and not the dynamic linker.
"""

from __future__ import annotations

import os
import struct

TEXT = b"ok\n"
BASE = 0x400000
HEADERS = 64 + 56  # an ELF header and one program header

_X86_64 = bytes.fromhex(
    "bf01000000"  # mov edi, 1
    "488d3515000000"  # lea rsi, [rip + 21]: the text, right behind the code
    "ba03000000"  # mov edx, 3
    "b801000000"  # mov eax, 1 (write)
    "0f05"  # syscall
    "31ff"  # xor edi, edi
    "b83c000000"  # mov eax, 60 (exit)
    "0f05"  # syscall
)
_ARM64 = struct.pack(
    "<8I",
    0xD2800020,  # mov x0, 1
    0x100000E1,  # adr x1, 28 bytes on: the text
    0xD2800062,  # mov x2, 3
    0xD2800808,  # mov x8, 64 (write)
    0xD4000001,  # svc 0
    0xD2800000,  # mov x0, 0
    0xD2800BA8,  # mov x8, 93 (exit)
    0xD4000001,  # svc 0
)
_MACHINES = {"x86_64": (62, _X86_64), "aarch64": (183, _ARM64)}


def program(machine: str) -> bytes:
    """The program for ``os.uname().machine``.

    Raises:
        KeyError: there is none for this machine.
    """
    number, code = _MACHINES[machine]
    size = HEADERS + len(code) + len(TEXT)
    identity = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8)
    header = identity + struct.pack(
        "<HHIQQQIHHHHHH", 2, number, 1, BASE + HEADERS, 64, 0, 0, 64, 56, 1, 64, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, BASE, BASE, size, size, 0x1000)
    return header + segment + code + TEXT


def write(folder: str) -> str:
    """Write the program into a folder; returns its path.

    Raises:
        KeyError: there is none for this machine.
    """
    path = os.path.join(folder, "hello")
    with open(path, "wb") as file:
        file.write(program(os.uname().machine))
    os.chmod(path, 0o755)  # noqa: S103 - everybody may run it, the workload's user too
    return path
