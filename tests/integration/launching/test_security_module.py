"""The step that enters an AppArmor profile: it must be the wall's own process that writes, before its exec.

What is written to on a kernel without AppArmor is another file of the process's own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import wall_bench

from ringfence.model.errors import StartFailed
from ringfence.runtimes.lsm import apparmor
from ringfence.runtimes.lsm.applying import Confining
from ringfence.runtimes.measuring import _label

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root loads profiles")


async def test_it_is_the_walls_own_process_that_writes() -> None:
    async with wall_bench.bench("jail") as made:
        step = ("WRITE", "/proc/self/oom_score_adj", "321")
        made.context.security_steps = lambda spec: [step]  # type: ignore[method-assign]
        handle = await made.start()
        assert Path(f"/proc/{handle.pid}/oom_score_adj").read_text() == "321\n"
        assert Path("/proc/self/oom_score_adj").read_text() != "321\n"


@pytest.mark.skipif(os.path.isdir("/sys/kernel/security/apparmor"), reason="AppArmor is here")
async def test_a_profile_that_can_not_be_entered_is_no_wall() -> None:
    async with wall_bench.bench("jail") as made:
        step = ("WRITE", apparmor.ATTRIBUTE, "exec ringfence-0")
        made.context.security_steps = lambda spec: [step]  # type: ignore[method-assign]
        with pytest.raises(StartFailed, match="attr/apparmor/exec"):
            await made.start()


async def test_what_the_host_has_is_what_is_measured() -> None:
    async with wall_bench.bench("jail") as made:
        handle = await made.start()
        expected = Confining().profile(made.spec())
        measured = (await made.runtime.measure(handle)).lsm
        assert measured == _label(handle.pid)
        assert measured.startswith(expected) if expected else not measured.startswith("ringfence-")
