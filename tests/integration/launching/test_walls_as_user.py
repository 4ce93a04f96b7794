"""The tests of the walls once more, as a normal user: all that root can do for itself is gone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
USER = 23_456  # in no /etc/passwd, so that nothing depends on being known


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are for one user."""
    folder = Path(tempfile.mkdtemp(prefix="ringfence-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="the whole run is a normal user's already")
def test_the_walls_hold_for_a_normal_user(public: Path) -> None:
    copy = public
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(__file__).parent, copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "home").mkdir()
    os.chown(copy / "home", USER, USER)
    result = subprocess.run(
        ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs",
         sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={copy}/home/t",
         "tests/test_launched_walls.py"],
        cwd=copy,
        env={"PATH": os.environ["PATH"], "HOME": str(copy / "home"), "PYTHONPATH": str(copy / "src"),
             "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(copy / "home")},
        capture_output=True,
        text=True,
        timeout=100,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    found = re.search(r"(\d+) passed, (\d+) skipped", result.stdout)
    assert found is not None, result.stdout[-500:]
    assert int(found[1]) >= 40
    assert int(found[2]) == 5, "what only root can do: a disk image, cgroups, children made ahead"


SCENARIO = """
import asyncio
from dataclasses import replace
from wall_bench import bench
from ringfence.runtimes.contract import AGENT_UID, Identity, IdMap

async def main():
    maps = (IdMap(0, 300000, 1000), IdMap(1000, 23456, 1), IdMap(1001, 301000, 64535))
    async with bench("jail") as made:
        spec = replace(made.spec(), identity=Identity(1000, 1000, maps, AGENT_UID, helper=True))
        handle = await made.start(spec)
        print((await made.run(handle, "id -u; wc -l < /proc/self/uid_map; kill -9 1 || echo spared"))[1])
        status = open(f"/proc/{handle.pid}/status").read()
        print("agent", [line.split()[1] for line in status.splitlines() if line.startswith("Uid:")][0])

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a user subordinate ids")
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs uidmap")
def test_subordinate_ids_give_the_agent_a_user_of_its_own(public: Path) -> None:
    """In a mount namespace of its own the test's user gets lines in /etc/subuid and /etc/passwd."""
    shutil.copytree(ROOT / "src", public / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).parent / "wall_bench.py", public)
    lines = {"subuid": f"{USER}:300000:65536", "subgid": f"{USER}:300000:65536"}
    lines["passwd"] = f"tester:x:{USER}:{USER}::/tmp:/bin/sh"
    binds = "mount --make-rprivate /"
    for name, line in lines.items():
        (public / name).write_text(line + "\n" + Path("/etc", name).read_text())
        binds += f" && mount --bind {public}/{name} /etc/{name}"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c",
         f'{binds} && exec setpriv --reuid={USER} --regid={USER} --clear-groups "$@"',
         "sh", sys.executable, "-c", SCENARIO],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{public}/src:{public}"},
        cwd=public,
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    words = result.stdout.split()
    assert words[:2] == ["1000", "3"]
    assert "spared" in words
    assert int(words[-1]) == 301000 + 64999 - 1001
