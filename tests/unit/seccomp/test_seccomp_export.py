"""OCI and Kafel say the same as the BPF program: each is read back by an evaluator of its own."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.runtimes.seccomp import export, table
from ringfence.runtimes.seccomp.decisions import ALLOW, Masked, answer

ARCHES = ("x86_64", "aarch64")
OCI = {arch: export.to_oci(arch) for arch in ARCHES}
KAFEL = {arch: export.to_kafel(arch) for arch in ARCHES}
HIGH = 1 << 32

values = st.one_of(
    st.integers(0, 70),
    st.sampled_from([0x5412, 0x541C, 0x5423, 0x53564D41, 0x40000, 0x2000, 0x8000, 0x10000000, 0x7E020000]),
    st.integers(0, 2**64 - 1),
).flatmap(lambda value: st.sampled_from([value, value | HIGH, value ^ 1]))


def _oci_answers(profile: dict[str, Any], call: str, args: tuple[int, ...]) -> list[int]:
    found = []
    for rule in profile["syscalls"]:
        if call in rule["names"] and all(
            args[test["index"]] & test["value"] == test["valueTwo"] for test in rule.get("args", [])
        ):
            found.append(ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else 0x50000 | rule["errnoRet"])
    return found


@pytest.mark.parametrize("arch", ARCHES)
@settings(max_examples=40)
@given(args=st.tuples(*[values] * 6))
def test_oci_gives_the_same_answers(arch: str, args: tuple[int, ...]) -> None:
    numbers, rules, profile = table.numbers(arch), table.rules(arch), OCI[arch]
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    default = 0x50000 | profile["defaultErrnoRet"]
    for call in (
        "clone",
        "socket",
        "socketpair",
        "ioctl",
        "prctl",
        "personality",
        "mknodat",
        "read",
        "mount",
    ):
        found = _oci_answers(profile, call, args)
        assert len(found) <= 1, "rules must not overlap: libseccomp decides between them by its own order"
        assert (found or [default]) == [answer(rules[numbers[call]], args)]


@pytest.mark.parametrize("arch", ARCHES)
def test_oci_is_what_runc_reads(arch: str) -> None:
    profile = json.loads(json.dumps(OCI[arch]))
    assert profile["architectures"] == ["SCMP_ARCH_" + arch.upper()]
    for rule in profile["syscalls"]:
        indexes = [test["index"] for test in rule.get("args", [])]
        assert len(set(indexes)) == len(indexes), "runc reads two tests of one argument as 'or'"
        assert {test["op"] for test in rule.get("args", [])} <= {"SCMP_CMP_MASKED_EQ"}
        same_as_default = (
            rule["action"] == "SCMP_ACT_ERRNO" and rule["errnoRet"] == profile["defaultErrnoRet"]
        )
        assert not same_as_default, "libseccomp refuses rules that repeat the default"


def _kafel_answer(text: str, number: int, args: tuple[int, ...]) -> int:
    """Answer of the first block with a matching filter. Knows only the forms that the export writes."""
    text = re.sub(r"/\*.*?\*/", "", text)
    default = 0x50000 | int(re.search(r"DEFAULT ERRNO\((\d+)\)", text)[1])  # type: ignore[index]
    for action, body in re.findall(r"^  (ALLOW|ERRNO\(\d+\)) \{\n(.*?)^  \}", text, re.S | re.M):
        result = ALLOW if action == "ALLOW" else 0x50000 | int(action[6:-1])
        for found, _, condition in re.findall(
            r"SYSCALL\[(\d+)\](\(a0[^)]*\))?\s*(?:\{\n(.*?)\n    \})?", body, re.S
        ):
            if int(found) != number:
                continue
            if not condition:
                return result
            assert re.fullmatch(r"[\s()a-f0-9x&|=<>]+", condition)
            code = condition.replace("&&", " and ").replace("||", " or ").replace("\n", " ").strip()
            if eval(code, {"__builtins__": {}}, {f"a{i}": value for i, value in enumerate(args)}):
                return result
    return default


@pytest.mark.parametrize("arch", ARCHES)
@settings(max_examples=25)
@given(args=st.tuples(*[values] * 6))
def test_kafel_gives_the_same_answers(arch: str, args: tuple[int, ...]) -> None:
    numbers, rules = table.numbers(arch), table.rules(arch)
    for call in (
        "clone",
        "socket",
        "socketpair",
        "ioctl",
        "prctl",
        "personality",
        "mknodat",
        "read",
        "bpf",
        "clone3",
    ):
        assert _kafel_answer(KAFEL[arch], numbers[call], args) == answer(rules[numbers[call]], args), call


@given(st.integers(0, 2**12 - 1), st.integers(0, 2**12), st.integers(0, 2**12))
def test_prefixes_cover_exactly_the_range(mask: int, first: int, last: int) -> None:
    pairs = export.prefixes(mask, first, last)
    for value in {first, last, first - 1, last + 1, 0, mask, *range(0, 2**12, 37)}:
        if value < 0:
            continue
        hits = sum(value & m == v for m, v in pairs)
        assert hits == (first <= value & mask <= last)


def test_branches_of_a_wide_test() -> None:
    test = Masked(0, 0x7E020000, 0, ALLOW, 0x50001)
    assert list(export.branches(test)) == [
        (((0, 0x7E020000, 0, 0),), ALLOW),
        (((0, 0x7E020000, 1, 0x7E020000),), 0x50001),
    ]
