"""nsjail's configuration from a start specification."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.runtimes import nsjail
from ringfence.runtimes.contract import AGENT_UID, CgroupPlace, Disk, Identity, IdMap, RootFs, StartSpec
from ringfence.runtimes.seccomp import export


def text(**changes: object) -> str:
    identity = Identity(1000, 1000, (IdMap(0, 1_900_000_000, 65536),), AGENT_UID)
    files = RootFs(
        ("/lower",), (), Disk("tmpfs", 1 << 20, 256), readonly=bool(changes.pop("readonly", False))
    )
    values = {"id": "sb", "folder": "/x", "hostname": 'a"b\n', "root": files, "identity": identity,
              "cgroup": CgroupPlace(), "max_processes": 9, "max_open_files": 9}  # fmt: skip
    return nsjail.configuration(StartSpec(**(values | changes)), 5, [4])  # type: ignore[arg-type]


def test_what_nsjail_is_told() -> None:
    lines = text().splitlines()
    for line in ("mode: EXECVE", "clone_newns: true", "clone_newnet: true", "clone_newuser: false",
                 "time_limit: 0", "pass_fd: 3", "pass_fd: 4", "pass_fd: 5", 'cap: "CAP_SETUID"'):  # fmt: skip
        assert line in lines, line
    assert 'hostname: "a\\042b\\012"' in lines
    assert not any("keep_caps" in line or "disable_no_new_privs" in line for line in lines)
    assert not any("SYS_ADMIN" in line for line in lines)
    # It would look for a user or group of that *name* on the host first.
    assert not any("inside_id" in line for line in lines)


def test_the_filter_is_ours_as_kafel() -> None:
    (line,) = (line for line in text().splitlines() if line.startswith("seccomp_string: "))
    body = line.removeprefix('seccomp_string: "').removesuffix('"').replace("\\012", "\n")
    assert body == export.to_kafel(os.uname().machine)


def test_a_read_only_root_is_mounted_so() -> None:
    assert "rw: true" in text()
    assert "rw: false" in text(readonly=True)


@pytest.mark.parametrize("given", ["plain", 'quote"', "back\\slash", "line\nbreak", "é", "\udcff"])
def test_quoting_is_byte_by_byte(given: str) -> None:
    quoted = nsjail._quoted(given)
    assert quoted.isascii()
    body = quoted[1:-1].encode().decode("unicode_escape").encode("latin-1")
    assert body == given.encode("utf-8", "surrogateescape")


def test_a_script_is_not_the_program(tmp_path: Path) -> None:
    script = tmp_path / "nsjail"
    script.write_text("#!/bin/sh\n")
    assert not nsjail.is_program(str(script))
    assert nsjail.is_program("/bin/true")
