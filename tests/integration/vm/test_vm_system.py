"""Level 4: a machine that boots the template's own system, and our agent when that is up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, opened, run
from ringfence.model.errors import StartFailed
from ringfence.model.levels import Level


@pytest.fixture
async def systems(vm_state: Path) -> AsyncIterator[Kit]:
    """Sandboxes on qemu; afterwards nothing of them is left."""
    async with opened(vm_state, "qemu") as made:
        yield made


@pytest.mark.timeout(1200)
async def test_a_whole_system_with_an_init_of_its_own(systems: Kit) -> None:
    sandbox = await systems.sandbox(memory=256 << 20, disk=128 << 20)
    link = await systems.link(sandbox)
    # Made by the system's init, which is not ours: its pipe, and the mark that it is up.
    done = await run(
        link, "/bin/sh", "-c", "test -p /run/initctl && test -e /run/ringfence-up && id -u; hostname"
    )
    assert done.text.split() == ["1000", sandbox.id]
    boundary = await sandbox.boundary()
    assert (boundary.level, boundary.runtime) == (Level.L4, "qemu")
    assert boundary.kernel.endswith("-amd64")
    assert (await run(link, "/bin/sh", "-c", "kill -9 -1; echo on")).text in ("on", "")
    assert (await run(link, "echo", "still there")).text == "still there"


async def test_a_template_without_an_init(systems: Kit) -> None:
    spec = await systems.spec(memory=256 << 20, disk=128 << 20)
    thin = replace(spec, root=replace(spec.root, lowers=spec.root.lowers[:1], template="sha256:thin"))
    with pytest.raises(StartFailed, match="no init of its own") as caught:
        await systems.start(thin)
    assert "sysvinit" in caught.value.hint
