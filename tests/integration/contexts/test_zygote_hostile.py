"""What may come between a zygote and its beginning: other contexts, a caller that goes, files of the user."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ringfence.guest.contexts import Contexts
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec

COPIED = "import gc\ngc.get_freeze_count() > 0"


async def _runs(link: GuestLink) -> bool:
    return any(row.id == "zygote.python" and row.state == "running" for row in await link.processes())


@pytest.mark.parametrize("gap", [1, 4, 9])
async def test_a_zygote_that_is_still_being_fed_is_not_asked(
    contexts: Contexts, link: GuestLink, gap: int
) -> None:
    """A request that came between the parts of its program would be read as program: it died of that."""

    async def create(number: int) -> None:
        await asyncio.sleep(number * gap / 1000)
        await contexts.create(id=f"c{number}", env={"NUMBER": str(number)})

    await asyncio.gather(*(create(number) for number in range(8)))
    for number in range(8):
        assert (await contexts.run(f"c{number}", "import os\nos.environ['NUMBER']")).text == f"'{number}'"
    assert await _runs(link)
    await contexts.create(id="later")
    assert (await contexts.run("later", COPIED)).text == "True"


async def test_a_caller_that_goes_leaves_no_zygote_half_fed(contexts: Contexts, link: GuestLink) -> None:
    first = asyncio.ensure_future(contexts.create(id="a"))
    while not await _runs(link):
        assert not first.done()
        await asyncio.sleep(0)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await contexts.create(id="b")
    await contexts.create(id="c")
    assert (await contexts.run("c", COPIED)).text == "True"
    assert (await contexts.run("b", "6 * 7")).text == "42"


async def test_files_of_the_workspace_are_not_the_kernels(contexts: Contexts, link: GuestLink) -> None:
    """A `json.py` where the interpreter starts would run in the zygote, before any context, and end it."""
    for name in ("json", "struct", "ast", "types", "signal", "select", "threading", "traceback", "linecache"):
        await link.files.write(f"{name}.py", b"raise SystemExit('mine')\n")
    await link.files.write("mine.py", b"where = 'here'\n")
    control = await link.start(ProcessSpec(("python3", "-c", "import json")))
    assert (await control.wait()).code == 1
    await control.close()
    await contexts.create(id="a")  # a copy
    await contexts.create(id="b", env={"PYTHONHASHSEED": "1"})  # cold
    for name, copied in (("a", "True"), ("b", "False")):
        assert (await contexts.run(name, COPIED)).text == copied
        assert (await contexts.run(name, "import mine\nmine.where")).text == "'here'"  # its own are there
