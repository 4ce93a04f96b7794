"""The tests of the walls once more, as a normal user: all that root can do for itself is gone."""

from __future__ import annotations

import os
import re
import shutil

import pytest
from tests.support.rootless import FIRST_SUBORDINATE, UID, normal_user

HERE = "tests/integration/launching"


@pytest.mark.skipif(os.geteuid() != 0, reason="the whole run is a normal user's already")
def test_the_walls_hold_for_a_normal_user() -> None:
    with normal_user(ids=False) as user:
        result = user.python(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={user.home}/t",
            f"{HERE}/test_launched_walls.py",
        )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    found = re.search(r"(\d+) passed, (\d+) skipped", result.stdout)
    assert found is not None, result.stdout[-500:]
    assert int(found[1]) >= 40
    assert int(found[2]) == 5, "what only root can do: a disk image, cgroups, children made ahead"


SCENARIO = f"""
import asyncio, os, sys
sys.path.insert(0, {HERE!r})
from dataclasses import replace
from wall_bench import bench
from ringfence.runtimes.contract import AGENT_UID, Identity, IdMap

async def main():
    first = {FIRST_SUBORDINATE}
    maps = (IdMap(0, first, 1000), IdMap(1000, os.getuid(), 1), IdMap(1001, first + 1000, 64535))
    async with bench("jail") as made:
        spec = replace(made.spec(), identity=Identity(1000, 1000, maps, AGENT_UID, helper=True))
        handle = await made.start(spec)
        print((await made.run(handle, "id -u; wc -l < /proc/self/uid_map; kill -9 1 || echo spared"))[1])
        status = open(f"/proc/{{handle.pid}}/status").read()
        print("agent", [line.split()[1] for line in status.splitlines() if line.startswith("Uid:")][0])

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a user subordinate ids")
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs uidmap")
def test_subordinate_ids_give_the_agent_a_user_of_its_own() -> None:
    with normal_user(ids=True) as user:
        result = user.python("-c", SCENARIO, timeout=60)
    assert result.returncode == 0, result.stderr[-3000:]
    words = result.stdout.split()
    assert words[:2] == ["1000", "3"]
    assert "spared" in words
    assert int(words[-1]) == FIRST_SUBORDINATE + 64999 - 1 != UID
