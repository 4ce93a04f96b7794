"""Classic BPF as a seccomp filter sees it: strict about what the kernel would refuse (a test helper)."""

from __future__ import annotations

import struct

_KNOWN = {0x20, 0x54, 0x05, 0x15, 0x35, 0x06}


def check(code: bytes) -> list[tuple[int, int, int, int]]:
    """The instructions, after the kernel's own checks: known operations, jumps inside, a return last."""
    program = list(struct.iter_unpack("=HBBI", code))
    assert 0 < len(program) <= 4096
    for index, (operation, yes, no, k) in enumerate(program):
        assert operation in _KNOWN, hex(operation)
        if operation == 0x20:
            assert k % 4 == 0
            assert 0 <= k < 64
        elif operation == 0x05:
            assert index + 1 + k < len(program)
        elif operation in (0x15, 0x35):
            assert index + 1 + max(yes, no) < len(program)
    assert program[-1][0] == 0x06
    return program


def run(program: list[tuple[int, int, int, int]], arch: int, number: int, args: tuple[int, ...]) -> int:
    """What the filter answers to one call."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *args)
    accumulator = index = 0
    while True:
        operation, yes, no, k = program[index]
        index += 1
        if operation == 0x20:
            accumulator = int.from_bytes(data[k : k + 4], "little")
        elif operation == 0x54:
            accumulator &= k
        elif operation == 0x05:
            index += k
        elif operation == 0x15:
            index += yes if accumulator == k else no
        elif operation == 0x35:
            index += yes if accumulator >= k else no
        else:
            return k
