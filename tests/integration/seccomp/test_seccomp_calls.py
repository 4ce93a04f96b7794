"""The filter on the real kernel: every denied call is tried with it and, as the control, without it."""

# ruff: noqa: E501 (tables of names)

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": f"{HERE.parents[2] / 'src'}:{HERE}"}


def _probe(mode: str, folder: Path) -> dict[str, str]:
    found = subprocess.run(
        [sys.executable, str(HERE / "seccomp_probes.py"), mode, str(folder)],
        capture_output=True, text=True, check=True, env=ENV, timeout=100,
    )  # fmt: skip
    answers: dict[str, str] = json.loads(found.stdout)
    return answers


@pytest.fixture(scope="module")
def with_filter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _probe("on", tmp_path_factory.mktemp("on"))


@pytest.fixture(scope="module")
def without_filter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _probe("off", tmp_path_factory.mktemp("off"))


_CAPABILITIES = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
PRIVILEGED = _CAPABILITIES >> 21 & 1 and _CAPABILITIES >> 13 & 1  # CAP_SYS_ADMIN and CAP_NET_RAW

ABSENT = {"clone3", "memfd_secret", "statmount", "read of number 600", "getpid by x32"}
OTHERS = {
    "prctl set_mm": "EINVAL",
    "socket netlink audit": "EPROTONOSUPPORT",
}  # as kernels without them answer
SAME = {
    "socket unix", "socket tcp", "socket udp6", "socket netlink route", "memfd_create", "landlock_create_ruleset",
    "seccomp available", "pidfd_open", "personality query", "prctl name", "ioctl window size", "mknodat fifo", "getrandom",
}  # fmt: skip
# What the kernel itself answers EPERM to here (no capability, not built, switched off) proves nothing about the
# filter; at least these must be open without it, or the whole test would be empty.
OPEN_TO_ROOT = {
    "unshare newuts", "setns", "chroot", "ptrace", "keyctl", "add_key", "io_uring_setup", "socket packet",
    "socket packet with bit 32", "socket raw ipv4", "socket raw ipv4 with bit 32", "clone with bit 26",
    "clone with bit 29", "mknodat whiteout", "personality read implies exec", "personality with bit 32",
    "ioctl TIOCSTI", "ioctl TIOCSTI with bit 32",
}  # fmt: skip
OPEN_TO_ALL = {
    "ptrace",
    "keyctl",
    "personality read implies exec",
    "personality with bit 32",
    "mknodat whiteout",
}


def test_denied_calls_answer_eperm(with_filter: dict[str, str]) -> None:
    wrong = {
        name: answer
        for name, answer in with_filter.items()
        if name not in ABSENT | SAME | OTHERS.keys() and answer != "EPERM"
    }
    assert wrong == {}
    assert len(with_filter) > 80
    assert {name: with_filter[name] for name in OTHERS} == OTHERS


def test_the_control_without_the_filter(with_filter: dict[str, str], without_filter: dict[str, str]) -> None:
    wanted = OPEN_TO_ROOT if PRIVILEGED else OPEN_TO_ALL
    assert {name: without_filter[name] for name in wanted} == dict.fromkeys(wanted, "ok")
    proved = {
        name for name, answer in without_filter.items() if answer != "EPERM" and with_filter[name] == "EPERM"
    }
    # Most others fail without the filter too, but for a reason of their own (EFAULT, ENOENT, EBADF): the kernel looked.
    print(
        f"{len(proved)} denials proved, not told apart here:",
        sorted(set(with_filter) - proved - ABSENT - SAME),
    )
    assert len(proved) >= (65 if PRIVILEGED else 25)


def test_absent_calls_answer_enosys(with_filter: dict[str, str]) -> None:
    assert {name: with_filter[name] for name in ABSENT & set(with_filter)} == dict.fromkeys(
        ABSENT & set(with_filter), "ENOSYS"
    )


def test_clone3_exists_without_the_filter(without_filter: dict[str, str]) -> None:
    assert without_filter["clone3"] in ("EFAULT", "EINVAL")


def test_allowed_calls_are_as_without(with_filter: dict[str, str], without_filter: dict[str, str]) -> None:
    assert {name: with_filter[name] for name in SAME} == {name: without_filter[name] for name in SAME}


ENTRY = r"""
#include <stdio.h>
int main(void) { long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20L) : "memory"); printf("%ld\n", r); return r <= 0; }
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="int 0x80 is an entry of x86 only")
def test_the_32_bit_entry_kills(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "entry.c").write_text(ENTRY)
    subprocess.run([compiler, "-o", tmp_path / "entry", tmp_path / "entry.c"], check=True)
    control = subprocess.run([tmp_path / "entry"], capture_output=True)
    if control.returncode != 0:
        pytest.skip("this kernel has no 32-bit entry")
    run = subprocess.run(
        [sys.executable, HERE / "seccomp_filtered.py", tmp_path / "entry"], env=ENV, capture_output=True
    )
    assert run.returncode == -signal.SIGSYS


def test_the_filter_cannot_be_undone_or_left_behind() -> None:
    code = (
        "import os, subprocess\n"
        "status = lambda: open('/proc/self/status').read().split('Seccomp:')[1].split()[0]\n"
        "assert status() == '2'\n"
        "assert subprocess.check_output(['grep', '^Seccomp:', '/proc/self/status']).split()[1] == b'2'\n"
        "assert 'NoNewPrivs:\\t1' in open('/proc/self/status').read()\n"
    )
    subprocess.run(
        [sys.executable, HERE / "seccomp_filtered.py", sys.executable, "-c", code], env=ENV, check=True
    )
    control = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True)
    assert control.returncode != 0
