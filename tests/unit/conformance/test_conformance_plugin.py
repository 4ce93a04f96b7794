"""The kit must fail where it should: a skip that no table lists, a capability that was dropped."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import ringfence
from ringfence.conformance import suites
from ringfence.conformance.tables.capabilities import RUNTIMES, UNVERIFIED, expected
from ringfence.conformance.tables.selected import SECONDS, SELECTED, runs

HEAD = """
import pytest
from ringfence.conformance.plugin import needs, only
"""


def session(folder: Path, code: str, *args: str) -> str:
    """The output of a session of its own with these tests."""
    (folder / "test_it.py").write_text(HEAD + code)
    plugin = [] if any(e.name == "ringfence" for e in entry_points(group="pytest11")) else ["-p", PLUGIN]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *args, "test_it.py"],
        cwd=folder,
        env={"PYTHONPATH": str(Path(ringfence.__file__).parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


PLUGIN = "ringfence.conformance.plugin"


def test_a_skip_that_no_table_lists_fails(tmp_path: Path) -> None:
    code = "def test_quiet(ringfence_runtime):\n    pytest.skip('just so')\n"
    output = session(tmp_path, code, "--ringfence-runtime=jail")
    assert "1 failed" in output
    assert "a skip that no committed table lists" in output


def test_a_listed_skip_is_one(tmp_path: Path) -> None:
    code = "@needs('gpu')\ndef test_gpu(ringfence_runtime):\n    assert False\n"
    output = session(tmp_path, code, "--ringfence-runtime=jail")
    assert "1 skipped" in output
    assert "failed" not in output


def test_other_tests_may_skip(tmp_path: Path) -> None:
    assert "1 skipped" in session(tmp_path, "def test_mine():\n    pytest.skip('just so')\n")


def test_every_runtime_of_the_table_is_tested_and_counted(tmp_path: Path) -> None:
    code = "def test_name(ringfence_runtime):\n    assert ringfence_runtime != 'fake'\n"
    output = session(tmp_path, code)
    usual = [name for name in RUNTIMES if runs(name, "test_name") and name not in UNVERIFIED]
    assert f"{len(usual) - 1} passed" in output
    assert "1 failed" in output
    line = next(line for line in output.splitlines() if line.startswith("ringfence conformance: "))
    assert line.count("1 passed") == len(usual) - 1
    assert "0 passed 1 failed" in line


def test_slow_runtimes_run_what_is_listed_for_them_and_everything_when_asked_for(tmp_path: Path) -> None:
    code = "def test_{}(ringfence_runtime):\n    assert ringfence_runtime\n"
    for runtime, names in SELECTED.items():
        listed, other = min(names), "test_of_no_list"
        assert runs(runtime, listed)
        assert not runs(runtime, other)
        assert f"{runtime} (" in session(tmp_path, code.format(listed.removeprefix("test_")))
        assert f"{runtime} (" not in session(tmp_path, code.format(other.removeprefix("test_")))
        assert f"{runtime} (" in session(
            tmp_path, code.format(other.removeprefix("test_")), f"--ringfence-runtime={runtime}"
        )


def test_machines_that_boot_for_seconds_have_more_time(tmp_path: Path) -> None:
    code = (
        "def test_it(ringfence_runtime, request):\n"
        "    mark = request.node.get_closest_marker('timeout')\n"
        "    assert (mark.args[0] if mark else 0) == {}\n"
    )
    for name, seconds in (("jail", 0), ("qemu-microvm", SECONDS["qemu-microvm"]), ("qemu", SECONDS["qemu"])):
        assert "1 passed" in session(tmp_path, code.format(seconds), f"--ringfence-runtime={name}")


def test_every_listed_test_exists() -> None:
    known = {name for suite in vars(suites).values() if isinstance(suite, type) for name in dir(suite)}
    for names in SELECTED.values():
        assert names <= known, names - known


def test_a_test_about_one_runtime_only(tmp_path: Path) -> None:
    code = "@only('fake')\ndef test_fake(ringfence_runtime):\n    pass\n"
    assert "1 passed" in session(tmp_path, code)
    assert "1 deselected" in session(tmp_path, code, "--ringfence-runtime=jail")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("who", ["root", "user"])
def test_a_dropped_capability_shows(runtime: str, who: str) -> None:
    row = expected(runtime, who)
    assert row is not None
    for name, value in row.items():
        if value is True:
            dropped = replace(RUNTIMES[runtime][who], **{name: False})
            assert asdict(dropped) != row
    assert expected("somebody-elses", who) is None
