"""The compiler: whatever the rules, the program answers as the rules say."""

from __future__ import annotations

import bpf_interpreter as machine
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.runtimes.seccomp import bpf
from ringfence.runtimes.seccomp.decisions import (
    ALLOW,
    ENOSYS,
    EPERM,
    KILL_PROCESS,
    Decision,
    Masked,
    Switch,
    answer,
    fail,
    only,
)

X86, ARM = bpf.AUDIT_ARCH["x86_64"], bpf.AUDIT_ARCH["aarch64"]
NO_ARGS = (0, 0, 0, 0, 0, 0)

words = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1), st.sampled_from([0x80000000, 0xFFFFFFFF]))
longs = st.one_of(words, st.integers(0, 2**64 - 1), words.map(lambda low: low | 1 << 32))
answers = st.sampled_from([ALLOW, EPERM, ENOSYS, fail(22), fail(93), KILL_PROCESS])


@st.composite
def switches(draw: st.DrawFn, inner: st.SearchStrategy[Decision]) -> Switch:
    points = sorted(draw(st.sets(words, max_size=8)))
    cases = []
    following = 0
    for point in points:
        if point >= following:
            last = min(point + draw(st.sampled_from([0, 0, 1, 5])), 0xFFFFFFFF)
            cases.append((point, last, draw(inner)))
            following = last + 1
    mask = draw(st.sampled_from([0xFFFFFFFF, 0xF, 0xF000, 0x80000001]))
    return Switch(draw(st.integers(0, 5)), cases, draw(inner), mask)


def masked(inner: st.SearchStrategy[Decision]) -> st.SearchStrategy[Masked]:
    return st.builds(
        lambda arg, mask, value, then, other: Masked(arg, mask, value & mask, then, other),
        st.integers(0, 5),
        longs,
        longs,
        inner,
        inner,
    )


decisions: st.SearchStrategy[Decision] = st.recursive(
    answers, lambda inner: st.one_of(switches(inner), masked(inner)), max_leaves=6
)
tables = st.dictionaries(st.one_of(st.integers(0, 60), st.integers(0, 0x3FFFFFFF)), decisions, max_size=25)


def interesting(decision: Decision) -> list[int]:
    """Argument values at and beside every edge of a decision."""
    if isinstance(decision, int):
        return []
    if isinstance(decision, Switch):
        edges = [edge for first, last, _ in decision.cases for edge in (first - 1, first, last, last + 1)]
        inner = [case[2] for case in decision.cases] + [decision.default]
    else:
        edges = [decision.value, decision.value ^ 1, decision.value ^ 1 << 40, decision.mask]
        inner = [decision.then, decision.other]
    return [edge & 2**64 - 1 for edge in edges] + [value for part in inner for value in interesting(part)]


@settings(max_examples=50)
@given(tables, st.data())
def test_any_table_answers_as_its_rules_say(rules: dict[int, Decision], data: st.DataObject) -> None:
    program = machine.check(bpf.compile(rules, "x86_64", ENOSYS))
    random = data.draw(st.lists(st.tuples(*[longs] * 6), min_size=2, max_size=2))
    for number, decision in rules.items():
        edges = interesting(decision)
        tries = [*random, *((edge,) * 6 for edge in edges), *zip(*[iter(edges)] * 6, strict=False)]
        for args in tries:
            assert machine.run(program, X86, number, args) == answer(decision, args)
    for number in {n + d for n in rules for d in (-1, 1)} - set(rules):
        assert machine.run(program, X86, number, NO_ARGS) == ENOSYS


def test_far_targets_are_reached() -> None:
    # 500 calls, all different: jumps over more than 255 instructions, which need a bridge.
    rules: dict[int, Decision] = {n: only(n % 6, (n, 2 * n + 1), fail(n % 97 + 1), ALLOW) for n in range(500)}
    program = machine.check(bpf.compile(rules, "aarch64", EPERM))
    for number, decision in rules.items():
        for value in (0, number, 2 * number + 1, number | 1 << 32):
            args = (value,) * 6
            assert machine.run(program, ARM, number, args) == answer(decision, args)
    assert machine.run(program, ARM, 500, NO_ARGS) == EPERM


def test_a_masked_test_sees_all_64_bits() -> None:
    rules: dict[int, Decision] = {1: Masked(2, 0xFF000000_000000FF, 0x12000000_00000034, ALLOW, EPERM)}
    program = machine.check(bpf.compile(rules, "x86_64", ENOSYS))

    def ask(value: int) -> int:
        return machine.run(program, X86, 1, (0, 0, value, 0, 0, 0))

    assert ask(0x12000000_00000034) == ALLOW
    assert ask(0x12345678_9ABCDE34) == ALLOW
    assert ask(0x00000000_00000034) == EPERM
    assert ask(0x12000000_00000035) == EPERM


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_another_architecture_kills(arch: str) -> None:
    program = machine.check(bpf.compile({0: ALLOW}, arch, ENOSYS))
    own = bpf.AUDIT_ARCH[arch]
    assert machine.run(program, own, 0, NO_ARGS) == ALLOW
    for other in (0x40000003, 0x40000028, *(set(bpf.AUDIT_ARCH.values()) - {own}), 0, 0xFFFFFFFF):
        assert machine.run(program, other, 0, NO_ARGS) == KILL_PROCESS


def test_numbers_of_x32_get_the_default() -> None:
    program = machine.check(bpf.compile(dict.fromkeys(range(500), ALLOW), "x86_64", ENOSYS))
    for number in (0x40000000, 0x40000001, 0x400001FF, 0x7FFFFFFF, 0xFFFFFFFF):
        assert machine.run(program, X86, number, NO_ARGS) == ENOSYS


def test_an_empty_table_is_a_program() -> None:
    assert machine.run(machine.check(bpf.compile({}, "x86_64", EPERM)), X86, 5, NO_ARGS) == EPERM


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel takes 4096"):
        bpf.compile({n: only(0, (n, n + 2, n + 4), ALLOW, EPERM) for n in range(2000)}, "x86_64", ENOSYS)
    with pytest.raises(ValueError, match="not a system call number"):
        bpf.compile({0x40000000: ALLOW}, "x86_64", ENOSYS)
    with pytest.raises(KeyError):
        bpf.compile({0: ALLOW}, "vax", ENOSYS)


def test_neighbours_with_one_answer_are_one_range() -> None:
    assert bpf.ranges([(0, 0, ALLOW), (1, 4, ALLOW), (6, 6, EPERM)], EPERM) == [(0, ALLOW), (5, EPERM)]
    few = len(bpf.compile(dict.fromkeys(range(300), ALLOW), "x86_64", ENOSYS))
    assert few == len(bpf.compile(dict.fromkeys(range(3), ALLOW), "x86_64", ENOSYS))
