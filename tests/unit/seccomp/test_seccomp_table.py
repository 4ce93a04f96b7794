"""The default table: each rule as written here, not as the code under test computes it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import bpf_interpreter as machine
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.runtimes import seccomp
from ringfence.runtimes.seccomp import bpf, document, guards, table
from ringfence.runtimes.seccomp.decisions import ALLOW, EINVAL, ENOSYS, EPERM, EPROTONOSUPPORT, answer

ARCHES = ("x86_64", "aarch64")
PROGRAMS = {arch: machine.check(seccomp.load("default", arch)) for arch in ARCHES}
HIGH = 1 << 32  # a bit of an int argument that the kernel never sees


def ask(arch: str, call: str, *args: int) -> int:
    padded = tuple(value & 2**64 - 1 for value in args) + (0,) * (6 - len(args))
    return machine.run(PROGRAMS[arch], bpf.AUDIT_ARCH[arch], table.numbers(arch)[call], padded)


RULES = [
    # clone: flags as glibc uses them for threads and fork, then each namespace
    ("clone", (0x3D0F00,), ALLOW),
    ("clone", (0x1200011,), ALLOW),
    ("clone", (17,), ALLOW),
    *(("clone", (17 | 1 << bit,), EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)),
    ("clone", (HIGH | 17 | 0x10000000,), EPERM),
    ("clone3", (0, 88), ENOSYS),
    ("unshare", (0,), EPERM),
    ("unshare", (0x10000000,), EPERM),
    ("setns", (3, 0), EPERM),
    # socket(family, type, protocol)
    ("socket", (1, 1, 0), ALLOW),
    ("socket", (1, 2 | 0o2000000, 0), ALLOW),
    ("socket", (1, 5 | 0o4000, 0), ALLOW),
    ("socket", (1, 3, 0), EPERM),
    *(("socket", (family, 1 | 0o2004000, protocol), ALLOW) for family in (2, 10) for protocol in (0, 6)),
    *(("socket", (family, 2, protocol), ALLOW) for family in (2, 10) for protocol in (0, 17)),
    *(("socket", (family, 1, 262), EPROTONOSUPPORT) for family in (2, 10)),
    ("socket", (2, 2, 1), EPROTONOSUPPORT),
    ("socket", (2, 1, 132), EPROTONOSUPPORT),
    *(("socket", (family, kind, 255), EPERM) for family in (2, 10) for kind in (0, 3, 4, 5, 6, 10)),
    ("socket", (2, 3 | 0o2000000, 1), EPERM),
    ("socket", (HIGH | 2, HIGH | 1, HIGH), ALLOW),
    ("socket", (2, HIGH | 3, 1), EPERM),
    ("socket", (16, 3, 0), ALLOW),
    ("socket", (16, 2, 0), ALLOW),
    ("socket", (16, 1, 0), EPERM),
    ("socket", (16, 3, 9), EPROTONOSUPPORT),
    *(("socket", (16, 3, protocol), EPERM) for protocol in (2, 4, 6, 12, 15, 16, 21, HIGH | 15)),
    *(("socket", (family, 1, 0), EPERM) for family in range(46) if family not in (1, 2, 10, 16)),
    ("socket", (HIGH | 17, 3, 768), EPERM),
    ("socket", (-1, 1, 0), EPERM),
    ("socketpair", (1, 1, 0), ALLOW),
    ("socketpair", (30, 1, 0), EPERM),
    # ioctl(fd, request)
    ("ioctl", (0, 0x5401), ALLOW),
    ("ioctl", (0, 0x5413), ALLOW),
    *(("ioctl", (0, request), EPERM) for request in (0x5412, 0x541C, 0x5423)),
    *(("ioctl", (0, HIGH | request), EPERM) for request in (0x5412, 0x541C, 0x5423)),
    ("ioctl", (0, 0xFFFFFFFF00005412), EPERM),
    # prctl(option)
    *(
        ("prctl", (option,), ALLOW)
        for option in (1, 3, 4, 15, 16, 22, 23, 24, 38, 39, 0x53564D41, 0x59616D61)
    ),
    *(("prctl", (option,), EINVAL) for option in (0, 31, 32, 35, 43, 62, 67, 68, 1000, 2**31)),
    ("prctl", (HIGH | 35,), EINVAL),
    # personality(persona)
    *(("personality", (persona,), ALLOW) for persona in (0, 8, 0x40000, 0xFFFFFFFF)),
    *(
        ("personality", (persona,), EPERM)
        for persona in (0x400000, 0x100000, 0x20000, 0x440000, HIGH | 0x400000)
    ),
    # mknodat(folder, path, mode)
    *(("mknodat", (0, 0, mode), ALLOW) for mode in (0o644, 0o010644, 0o100600, 0o140777)),
    *(("mknodat", (0, 0, mode), EPERM) for mode in (0o020666, 0o060600, HIGH | 0o020000, 0o170000)),
]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("call", "args", "expected"), RULES)
def test_rule(arch: str, call: str, args: tuple[int, ...], expected: int) -> None:
    assert hex(ask(arch, call, *args)) == hex(expected)


NEVER = [
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "kcmp",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "add_key",
    "request_key",
    "keyctl",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "move_mount",
    "open_tree",
    "open_tree_attr",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "unshare",
    "setns",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "kexec_file_load",
    "reboot",
    "swapon",
    "swapoff",
    "acct",
    "quotactl",
    "quotactl_fd",
    "syslog",
    "vhangup",
    "sethostname",
    "setdomainname",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
    "name_to_handle_at",
    "open_by_handle_at",
    "fanotify_init",
    "fanotify_mark",
    "migrate_pages",
    "move_pages",
    "iopl",
    "ioperm",
    "modify_ldt",
    "process_madvise",
]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("call", NEVER)
def test_denied_whatever_the_arguments(arch: str, call: str) -> None:
    if call not in table.numbers(arch):
        assert arch == "aarch64"
        assert call in ("iopl", "ioperm", "modify_ldt")
        return
    for value in (0, 1, 2**31, 2**32 - 1, 2**64 - 1):
        assert ask(arch, call, *(value,) * 6) == EPERM


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "call",
    [
        "seccomp",
        "landlock_create_ruleset",
        "landlock_add_rule",
        "landlock_restrict_self",
        "memfd_create",
        "pidfd_open",
        "pidfd_send_signal",
        "rseq",
        "statx",
        "openat2",
        "faccessat2",
        "close_range",
        "execveat",
        "getrandom",
        "futex_waitv",
        "membarrier",
    ],
)
def test_allowed_whatever_the_arguments(arch: str, call: str) -> None:
    for value in (0, 2**64 - 1):
        assert ask(arch, call, *(value,) * 6) == ALLOW


@pytest.mark.parametrize("arch", ARCHES)
def test_unknown_calls_are_absent(arch: str) -> None:
    known = set(table.numbers(arch).values())
    for number in sorted({*range(700), 1023, 0x3FFFFFFF} - known):
        assert machine.run(PROGRAMS[arch], bpf.AUDIT_ARCH[arch], number, (1,) * 6) == ENOSYS


values = st.one_of(
    st.integers(0, 70),
    st.sampled_from([0x5412, 0x541C, 0x5423, 0x53564D41, 0x40000, 0x2000, 0x8000, 0x10000000, 0x7E020000]),
    st.integers(0, 2**64 - 1),
).flatmap(lambda value: st.sampled_from([value, value | HIGH, value ^ 1]))


@pytest.mark.parametrize("arch", ARCHES)
@settings(max_examples=60)
@given(args=st.tuples(*[values] * 6))
def test_compiled_equals_reference(arch: str, args: tuple[int, ...]) -> None:
    rules = table.rules(arch)
    for number, decision in rules.items():
        found = machine.run(PROGRAMS[arch], bpf.AUDIT_ARCH[arch], number, args)
        assert found == answer(decision, args), number


def test_every_known_call_is_in_one_group_with_a_reason() -> None:
    named = Counter[str]()
    for group in [*table.ALLOWED, *table.DENIED, *table.ABSENT]:
        assert len(group.reason) > 20, group.name
        named.update(group.calls.split())
    for guard in guards.GUARDS:
        assert guard.reason
        assert guard.rule
        named[guard.call] += 1
    known = set(table.numbers("x86_64")) | set(table.numbers("aarch64"))
    assert set(named) == known
    assert not [name for name, count in named.items() if count > 1]
    assert all(group.action == ALLOW for group in table.ALLOWED)
    assert all(group.action == EPERM for group in table.DENIED)
    assert all(group.action == ENOSYS for group in table.ABSENT)


def _header_numbers(text: str) -> dict[str, int]:
    return {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", text, re.M)
    }


def test_numbers_of_x86_64_are_the_kernels() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the kernel's headers for x86-64 (linux-libc-dev) are not installed")
    found = _header_numbers(header.read_text())
    ours = table.numbers("x86_64")
    assert len(found) > 300
    assert {name: ours.get(name, number) for name, number in found.items()} == found


def test_numbers_of_aarch64_are_the_kernels() -> None:
    header = Path("/usr/include/asm-generic/unistd.h")
    if not header.exists():
        pytest.skip("the kernel's generic headers (linux-libc-dev) are not installed")
    found = _header_numbers(header.read_text())
    ours = table.numbers("aarch64")
    assert len(found) > 250
    renamed = {"fstatat": "newfstatat"}  # 64-bit kernels know __NR3264_fstatat by this name
    # Numbers of 32-bit kernels only (403 to 423) and names that arm64 doesn't use are not in our table.
    absent = {"syscalls", "arch_specific_syscall", "sync_file_range2"}
    expected = {
        renamed.get(name, name): number
        for name, number in found.items()
        if name not in absent and not 403 <= number <= 423
    }
    assert {name: ours.get(name) for name in expected} == expected


def test_both_architectures_share_the_new_numbers() -> None:
    one, other = table.numbers("x86_64"), table.numbers("aarch64")
    assert {n: v for n, v in one.items() if v >= 424} == {n: v for n, v in other.items() if v >= 424}
    for numbers in (one, other):
        assert len(set(numbers.values())) == len(numbers)


def test_load_is_kept() -> None:
    assert seccomp.load() is seccomp.load()
    assert seccomp.load("default", "aarch64") != seccomp.load("default", "x86_64")


def test_load_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InvalidRequest, match="no seccomp profile 'none'") as error:
        seccomp.load("none")
    assert "default" in error.value.hint
    with pytest.raises(HostLimit, match="riscv64"):
        seccomp.load("default", "riscv64")


def test_importing_is_cheap() -> None:
    code = (
        "import sys; before = set(sys.modules); from ringfence.runtimes import seccomp; "
        "assert 'ringfence.runtimes.seccomp.table' not in sys.modules; seccomp.load(); "
        "print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": "src"},
        cwd=Path(__file__).parents[3],
    )
    modules = set(found.stdout.split())
    assert "ringfence.runtimes.seccomp.numbers_x86_64" in modules or "numbers_aarch64" in found.stdout
    assert not modules & {
        "yaml",
        "msgspec",
        "json",
        "inspect",
        "ctypes",
        "typing_extensions",
        "rich",
        "asyncio",
    }


def test_the_page_is_written_from_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "seccomp.md"
    assert page.read_text() == document.page(), (
        "run python -m ringfence.runtimes.seccomp.document > docs/seccomp.md"
    )
