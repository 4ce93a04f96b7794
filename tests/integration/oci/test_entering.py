"""The launcher's steps ENTER and LEAVE: another root for a while, and back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.model.errors import StartFailed
from ringfence.runtimes.launching.launcher import Launcher
from ringfence.runtimes.launching.plan import BIND_MAKE, CLONE_NEWNS, MS_PRIVATE, MS_REC, NOBODY, Plan

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs a capability")


def shell(plan: Plan, script: str) -> Plan:
    for word in ("sh", "-c", script):
        plan.add("ARG", word)
    plan.add("ENV", "PATH=/usr/bin:/bin")
    plan.add("EXEC", "/bin/sh")
    return plan


async def test_paths_are_the_folder_s_between_the_two_and_sources_the_host_s(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "away").symlink_to("/etc")  # of the folder's own /etc, not the host's
    shown = tmp_path / "shown"
    shown.write_text("shown")
    plan = Plan()
    plan.add("CLONE", CLONE_NEWNS)
    plan.add("MOUNT", "none", "/", "none", MS_REC | MS_PRIVATE, "")
    plan.add("ENTER", str(root))
    plan.add("MKDIR", "/etc", 0o755, NOBODY, NOBODY)
    plan.add("BIND", str(shown), "/away/rf-entered", BIND_MAKE)
    plan.add("LEAVE")
    shell(
        plan, f"test $(cat {root}/etc/rf-entered) = shown && ! test -e /etc/rf-entered && test -d /proc/self"
    )
    launcher = await Launcher.start()
    try:
        child = await launcher.spawn(plan)
        assert await child.exited == 0
        child.close()
    finally:
        await launcher.close()
    assert (root / "etc/rf-entered").read_text() == ""  # the mount point; the mount went with its namespace
    assert not Path("/etc/rf-entered").exists()


@pytest.mark.parametrize(("steps", "step", "errno"), [
    ([("LEAVE",)], "leave", "EBADF"),
    ([("ENTER", "/nowhere")], "enter", "ENOENT"),
    ([("ENTER", "/dev/null")], "enter", "ENOTDIR"),
])  # fmt: skip
async def test_what_can_not_be_entered_or_left(steps: list[tuple[str, ...]], step: str, errno: str) -> None:
    plan = Plan()
    for each in steps:
        plan.add(*each)
    launcher = await Launcher.start()
    try:
        with pytest.raises(StartFailed) as caught:
            await launcher.spawn(shell(plan, "true"))
    finally:
        await launcher.close()
    assert (caught.value.details["step"], caught.value.details["errno"]) == (step, errno)
