"""Code contexts and their zygote in a wall of gVisor that is saved and started again."""

from __future__ import annotations

from ringfence.conformance.harness import Kit
from ringfence.guest.contexts import Contexts
from ringfence.guest.link import GuestLink

COPIED = "import gc\ngc.get_freeze_count() > 0"


async def test_contexts_and_their_zygote_go_on_in_every_copy(kit: Kit) -> None:
    source = await kit.start(await kit.spec())
    async with await GuestLink.open(await kit.runtime.connect(source)) as link:
        contexts = Contexts(link)
        await contexts.create(id="before")
        await contexts.run("before", "kept = 42")
    folder = str(kit.state / "snapshot")
    data = await kit.runtime.snapshot(source, folder, memory=True)  # type: ignore[attr-defined]
    walls = [source]
    for _ in range(2):
        handle = await kit.runtime.restore(await kit.spec(), folder, data)  # type: ignore[attr-defined]
        kit.handles.append(handle)
        walls.append(handle)
    drawn = set()
    for handle in walls:
        async with await GuestLink.open(await kit.runtime.connect(handle)) as link:
            contexts = Contexts(link)
            assert (await contexts.run("before", "kept")).text == "42"
            await contexts.create(id="after")
            assert (await contexts.run("after", COPIED)).text == "True"
            drawn.add((await contexts.run("after", "import random\nrandom.random()")).text)
            assert [each.id for each in await contexts.list()] == ["after", "before"]
    assert len(drawn) == 3
