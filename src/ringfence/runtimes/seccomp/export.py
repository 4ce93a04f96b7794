"""The same table in the forms that other programs take: OCI runtimes (JSON) and nsjail (Kafel).

Both say "this call, if these arguments, gets this answer". A decision is cut into disjoint branches,
so the order of rules, which programs treat differently, never matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringfence.runtimes.seccomp import bpf, table
from ringfence.runtimes.seccomp.decisions import ALLOW, KILL_PROCESS, Decision, Switch

Condition = tuple[int, int, int, int]  # argument, mask, first, last: first <= argument & mask <= last

_OCI_ARCH = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}


def branches(decision: Decision) -> Iterator[tuple[tuple[Condition, ...], int]]:
    """Every way through a decision: conditions that all hold, and the answer. Disjoint and complete."""
    if isinstance(decision, int):
        yield (), decision
        return
    parts: list[tuple[int, int, int, Decision]]
    if isinstance(decision, Switch):
        starts = bpf.ranges(decision.cases, decision.default)
        ends = [first - 1 for first, _ in starts[1:]] + [0xFFFFFFFF]
        mask = decision.mask & 0xFFFFFFFF
        parts = [(mask, first, last, answer) for (first, answer), last in zip(starts, ends, strict=True)]
    else:
        mask, value = decision.mask, decision.value
        parts = [(mask, value, value, decision.then)]
        if value > 0:
            parts.append((mask, 0, value - 1, decision.other))
        if value < mask:
            parts.append((mask, value + 1, mask, decision.other))
    for mask, first, last, answer in parts:
        if first > mask:
            continue
        for rest, final in branches(answer):
            yield ((decision.arg, mask, first, min(last, mask)), *rest), final


def prefixes(mask: int, first: int, last: int) -> list[tuple[int, int]]:
    """``(m, v)`` pairs such that ``first <= x & mask <= last`` if and only if ``x & m == v`` for one of them.

    Comparing under a mask is all that libseccomp can do to the lower half of an argument.
    """
    bits = [bit for bit in range(63, -1, -1) if mask >> bit & 1]
    found: list[tuple[int, int]] = []

    def walk(position: int, fixed: int, value: int) -> None:
        highest = value | (mask & ~fixed)
        if highest < first or value > last:
            return
        if first <= value and highest <= last:
            found.append((fixed, value))
            return
        bit = 1 << bits[position]
        walk(position + 1, fixed | bit, value)
        walk(position + 1, fixed | bit, value | bit)

    walk(0, 0, 0)
    return found


def _plain(arch: str) -> tuple[dict[int, list[str]], list[tuple[str, Decision]]]:
    """Names by unconditional answer, and the calls whose arguments decide."""
    rules = table.rules(arch)
    plain: dict[int, list[str]] = {}
    guarded: list[tuple[str, Decision]] = []
    for name, number in sorted(table.numbers(arch).items()):
        decision = rules.get(number, table.DEFAULT)
        if isinstance(decision, int):
            plain.setdefault(decision, []).append(name)
        else:
            guarded.append((name, decision))
    return plain, guarded


def _oci_action(answer: int) -> dict[str, Any]:
    if answer == ALLOW:
        return {"action": "SCMP_ACT_ALLOW"}
    if answer == KILL_PROCESS:
        return {"action": "SCMP_ACT_KILL_PROCESS"}
    return {"action": "SCMP_ACT_ERRNO", "errnoRet": answer & 0xFFFF}


def to_oci(arch: str) -> dict[str, Any]:
    """``linux.seccomp`` of an OCI runtime's ``config.json``: the same answers for the same calls.

    Rules that would repeat the default are left out, because libseccomp refuses them. Every condition
    is a masked comparison, each on another argument, because runc reads several on one as "or".

    Raises:
        KeyError: there is no table for this architecture.
    """
    plain, guarded = _plain(arch)
    entries: list[dict[str, Any]] = [
        {"names": names, **_oci_action(answer)}
        for answer, names in sorted(plain.items(), reverse=True)
        if answer != table.DEFAULT
    ]
    for name, decision in guarded:
        for conditions, answer in branches(decision):
            if answer == table.DEFAULT:
                continue
            combinations: list[list[dict[str, Any]]] = [[]]
            for arg, mask, first, last in conditions:
                combinations = [
                    [*before, {"index": arg, "value": m, "valueTwo": v, "op": "SCMP_CMP_MASKED_EQ"}]
                    for before in combinations
                    for m, v in prefixes(mask, first, last)
                ]
            entries += [{"names": [name], **_oci_action(answer), "args": args} for args in combinations]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": table.DEFAULT & 0xFFFF,
        "architectures": [_OCI_ARCH[arch]],
        "syscalls": entries,
    }


def _kafel_condition(condition: Condition) -> str:
    arg, mask, first, last = condition
    value = f"(a{arg} & {mask:#x})"
    if first == last:
        return f"{value} == {first:#x}"
    if first == 0:
        return f"{value} <= {last:#x}"
    if last == mask:
        return f"{value} >= {first:#x}"
    return f"{value} >= {first:#x} && {value} <= {last:#x}"


def to_kafel(arch: str) -> str:
    """The table as a Kafel policy for nsjail's ``--seccomp_string``.

    Calls are written by number, since Kafel's names depend on its version and are partly its own
    (``newstat``); the usual name stands beside each as a comment.

    Raises:
        KeyError: there is no table for this architecture.
    """
    numbers = table.numbers(arch)
    plain, guarded = _plain(arch)
    filters: dict[int, list[str]] = {
        answer: [f"SYSCALL[{numbers[name]}] /* {name} */" for name in names]
        for answer, names in plain.items()
        if answer != table.DEFAULT
    }
    for name, decision in guarded:
        by_answer: dict[int, list[str]] = {}
        for conditions, answer in branches(decision):
            by_answer.setdefault(answer, []).append(" && ".join(map(_kafel_condition, conditions)))
        # The first rule that fits counts, and these come in this order: what is left needs no test.
        last = 0 if table.DEFAULT in by_answer else min(by_answer)
        for answer, tests in by_answer.items():
            text = f"SYSCALL[{numbers[name]}]"
            if answer == last:
                text += f" /* {name} */"
            else:
                text += f"(a0, a1, a2, a3, a4, a5) /* {name} */ {{\n"
                text += " ||\n".join(f"      ({test})" for test in tests) + "\n    }"
            if answer != table.DEFAULT:
                filters.setdefault(answer, []).append(text)
    blocks = []
    for answer, lines in sorted(filters.items(), reverse=True):
        action = "ALLOW" if answer == ALLOW else f"ERRNO({answer & 0xFFFF})"
        blocks.append(f"  {action} {{\n    " + ",\n    ".join(lines) + "\n  }")
    return (
        "POLICY ringfence {\n"
        + ",\n".join(blocks)
        + f"\n}}\nUSE ringfence DEFAULT ERRNO({table.DEFAULT & 0xFFFF})\n"
    )
