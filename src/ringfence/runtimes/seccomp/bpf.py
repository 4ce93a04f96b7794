"""Compile a table of decisions to classic BPF, the language of seccomp filters.

The program is built from its last instruction to its first: jumps in BPF go forward only, so every
target is known when the jump to it is written, and a target too far for the 8-bit offset of a
conditional jump gets an unconditional one in between. Calls are found by a balanced search over
ranges of numbers, so a program answers in about nine comparisons, whatever the call.
"""

from __future__ import annotations

import struct

from ringfence.runtimes.seccomp.decisions import KILL_PROCESS, Decision, Masked, Switch

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # <linux/audit.h>, little-endian 64-bit
MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS: the kernel refuses longer programs

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP = 0x05  # BPF_JMP | BPF_JA
JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K

_NUMBER, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data
_X32_BIT = 0x40000000  # __X32_SYSCALL_BIT: numbers from here up are of the x32 ABI (or -1)

_Ranges = list[tuple[int, Decision]]  # (first value, decision), sorted; each reaches to the next


def ranges(cases: list[tuple[int, int, Decision]], default: Decision) -> _Ranges:
    """Cover all 32-bit values: disjoint sorted ``(first, last, decision)``, ``default`` between them.

    Neighbours with the same decision are merged.
    """
    result: _Ranges = []
    following = 0
    for first, last, decision in cases:
        if first > following and (not result or result[-1][1] != default):
            result.append((following, default))
        if not result or result[-1][1] != decision:
            result.append((first, decision))
        following = last + 1
    if following <= 0xFFFFFFFF and (not result or result[-1][1] != default):
        result.append((following, default))
    return result


class _Assembler:
    """Instructions in reverse. A label is the index of its instruction in ``code``."""

    def __init__(self) -> None:
        self.code: list[tuple[int, int, int, int]] = []
        self._returns: dict[int, int] = {}

    def emit(self, operation: int, k: int, yes: int = 0, no: int = 0) -> int:
        self.code.append((operation, yes, no, k))
        return len(self.code) - 1

    def ret(self, value: int) -> int:
        label = self._returns.get(value)
        # A near return is shared; a far one would cost a jump, as much as a new return.
        if label is None or len(self.code) - label > 200:
            label = self._returns[value] = self.emit(RETURN, value)
        return label

    def branch(self, operation: int, k: int, yes: int, no: int) -> int:
        """A conditional jump to two labels."""
        if len(self.code) - yes > 254:  # 254, not 255: the second jump below may push it on by one
            yes = self.emit(JUMP, len(self.code) - yes - 1)
        if len(self.code) - no > 255:
            no = self.emit(JUMP, len(self.code) - no - 1)
        here = len(self.code)
        return self.emit(operation, k, here - yes - 1, here - no - 1)

    def search(self, parts: _Ranges, low: int, high: int) -> int:
        """Find the accumulator's range among ``parts[low:high]`` by halving."""
        if high - low == 1:
            return self.decide(parts[low][1])
        if (
            high - low == 3
            and parts[low][1] == parts[low + 2][1]
            and parts[low + 2][0] == parts[low + 1][0] + 1
        ):
            # One odd value among others: equality needs one comparison, not two.
            around = self.decide(parts[low][1])
            return self.branch(JUMP_EQ, parts[low + 1][0], self.decide(parts[low + 1][1]), around)
        middle = (low + high) // 2
        right = self.search(parts, middle, high)
        left = self.search(parts, low, middle)
        return self.branch(JUMP_GE, parts[middle][0], right, left)

    def decide(self, decision: Decision) -> int:
        """Code that gives the decision's answer; loses the accumulator."""
        if isinstance(decision, int):
            return self.ret(decision)
        word = _ARGS + 8 * decision.arg  # both architectures are little-endian: low half first
        if isinstance(decision, Switch):
            parts = ranges(decision.cases, decision.default)
            return self.load(self.search(parts, 0, len(parts)), word, decision.mask)
        return self._masked(decision, word)

    def _masked(self, test: Masked, word: int) -> int:
        other, then = self.decide(test.other), self.decide(test.then)
        low_mask, high_mask = test.mask & 0xFFFFFFFF, test.mask >> 32
        label = self.branch(JUMP_EQ, test.value & 0xFFFFFFFF, then, other)
        label = self.load(label, word, low_mask)
        if high_mask or test.value >> 32:
            label = self.branch(JUMP_EQ, test.value >> 32, label, other)
            label = self.load(label, word + 4, high_mask)
        return label

    def load(self, following: int, offset: int, mask: int = 0xFFFFFFFF) -> int:
        """Load a word of ``struct seccomp_data`` and go on at ``following``."""
        if following != len(self.code) - 1:
            self.emit(JUMP, len(self.code) - following - 1)
        if mask != 0xFFFFFFFF:
            self.emit(AND, mask)
        return self.emit(LOAD, offset)


def compile(rules: dict[int, Decision], arch: str, default: int) -> bytes:
    """An array of ``struct sock_filter`` (8 bytes each, native byte order) for ``prctl`` or ``seccomp``.

    ``rules`` maps numbers of ``arch`` to decisions; all other numbers get ``default``. A call made
    through another architecture's entry (i386 on x86-64, arm on aarch64) kills the process: its numbers
    mean other calls. x32 numbers get ``default``, as on a kernel without x32.

    Raises:
        KeyError: an architecture that there is no table for.
        ValueError: the program is longer than the kernel takes.
    """
    assembler = _Assembler()
    kill = assembler.ret(KILL_PROCESS)
    cases = [(number, number, rules[number]) for number in sorted(rules)]
    if cases and cases[-1][0] >= _X32_BIT:
        raise ValueError(f"{cases[-1][0]:#x} is not a system call number")
    parts = ranges(cases, default)
    start = assembler.load(assembler.search(parts, 0, len(parts)), _NUMBER)
    assembler.load(assembler.branch(JUMP_EQ, AUDIT_ARCH[arch], start, kill), _ARCH)
    code = assembler.code
    if len(code) > MAX_INSTRUCTIONS:
        raise ValueError(f"the filter has {len(code)} instructions, the kernel takes {MAX_INSTRUCTIONS}")
    code.reverse()
    pack = struct.Struct("=HBBI").pack
    return b"".join([pack(*instruction) for instruction in code])
