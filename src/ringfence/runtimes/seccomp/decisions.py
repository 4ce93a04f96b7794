"""What the filter answers to one system call: an action, or a look at its arguments.

The same values are compiled to BPF, written out for other programs, documented, and evaluated by the
tests, so their meaning is fixed here:

* an ``int`` is a final answer, a ``SECCOMP_RET_*`` value;
* :class:`Switch` looks at an argument that the kernel declares as a 32-bit ``int``;
* :class:`Masked` looks at an argument that the kernel declares as 64-bit ``long``.
"""

from __future__ import annotations

import errno

ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
KILL_PROCESS = 0x80000000  # SECCOMP_RET_KILL_PROCESS


def fail(number: int) -> int:
    """``SECCOMP_RET_ERRNO``: the call does nothing and returns this errno."""
    return 0x00050000 | number


EPERM = fail(errno.EPERM)
ENOSYS = fail(errno.ENOSYS)
EINVAL = fail(errno.EINVAL)
EPROTONOSUPPORT = fail(errno.EPROTONOSUPPORT)


class Switch:
    """Choose by the low 32 bits of argument ``arg`` after ``& mask``.

    The kernel drops the upper half of an ``int`` argument, so the filter must not look at it: a rule
    that compared all 64 bits could be passed by setting bit 32 (as TIOCSTI filters once were).
    ``cases`` are disjoint, sorted ``(first, last, answer)`` ranges; ``default`` is for the rest.
    """

    __slots__ = ("arg", "cases", "default", "mask")

    def __init__(
        self, arg: int, cases: list[tuple[int, int, Decision]], default: Decision, mask: int = 0xFFFFFFFF
    ) -> None:
        self.arg = arg
        self.cases = cases
        self.default = default
        self.mask = mask

    def choose(self, args: tuple[int, ...]) -> Decision:
        """The answer for these six 64-bit arguments."""
        value = args[self.arg] & 0xFFFFFFFF & self.mask
        for first, last, answer in self.cases:
            if first <= value <= last:
                return answer
        return self.default


class Masked:
    """``then`` if all 64 bits of argument ``arg``, after ``& mask``, equal ``value``; else ``other``."""

    __slots__ = ("arg", "mask", "other", "then", "value")

    def __init__(self, arg: int, mask: int, value: int, then: Decision, other: Decision) -> None:
        self.arg = arg
        self.mask = mask
        self.value = value
        self.then = then
        self.other = other

    def choose(self, args: tuple[int, ...]) -> Decision:
        """The answer for these six 64-bit arguments."""
        return self.then if args[self.arg] & self.mask == self.value else self.other


Decision = int | Switch | Masked


def answer(decision: Decision, args: tuple[int, ...]) -> int:
    """Follow a decision to its final ``SECCOMP_RET_*`` value: the reference that tests compare with."""
    while not isinstance(decision, int):
        decision = decision.choose(args)
    return decision


def only(
    arg: int, values: tuple[int, ...], then: Decision, other: Decision, mask: int = 0xFFFFFFFF
) -> Switch:
    """A :class:`Switch` that gives ``then`` for exactly these values."""
    return Switch(arg, [(value, value, then) for value in sorted(values)], other, mask)
