"""Python contexts begin as copies of the sandbox's zygote: what that changes, and what it must not."""

from __future__ import annotations

import asyncio
import signal

import pytest

from ringfence.guest.contexts import Contexts
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused, Unsupported

ZYGOTE = "zygote.python"
WHAT = (
    "import os, sys, gc\nos.getppid(), os.getsid(0) == os.getpid() == os.getpgrp(), gc.get_freeze_count() > 0"
)


async def _copied(contexts: Contexts, id: str) -> bool:
    """Whether a context is a copy of the zygote: it has frozen what it had inherited."""
    return (await contexts.run(id, "import gc\ngc.get_freeze_count() > 0")).text == "True"


async def _pid(link: GuestLink, number: str = ZYGOTE) -> int:
    return next((row.pid for row in await link.processes() if row.id == number and row.state == "running"), 0)


async def test_contexts_are_copies_and_commands_of_their_own(contexts: Contexts, link: GuestLink) -> None:
    await contexts.create(id="a")
    zygote = await _pid(link)
    await contexts.create(id="b", cwd="/tmp", env={"WHO": "b"})
    assert zygote and await _pid(link) == zygote  # the same for both
    for name in ("a", "b"):
        assert (await contexts.run(name, WHAT)).text == "(1, True, True)"
        pid = await _pid(link, f"ctx.python.{name}")
        assert (await contexts.run(name, "os.getpid()")).text == str(pid)
    assert (await contexts.run("b", "os.getcwd(), os.environ['WHO']")).text == "('/tmp', 'b')"
    assert (await contexts.run("a", "'WHO' in os.environ")).text == "False"
    assert [context.id for context in await contexts.list()] == ["a", "b"]
    cold = ProcessSpec(("python3", "-c", "import gc; print(gc.get_freeze_count() > 0)"))
    said = b"".join([piece.data async for piece in await link.start(cold)])
    assert said == b"False\n"  # control: what "copied" is told by


async def test_a_copy_holds_no_descriptor_but_its_own(contexts: Contexts) -> None:
    code = (
        "import os\n"
        "sorted(os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{n}'))"
    )
    await contexts.create(id="a", env={"HOME": "/"})  # cold
    await asyncio.gather(*(contexts.create(id=name) for name in "bcd"))
    assert not await _copied(contexts, "a") and await _copied(contexts, "d")
    told = {(await contexts.run(name, code)).text for name in "abcd"}
    assert len(told) == 1 and "socket" not in str(told)


async def test_random_numbers_differ(contexts: Contexts, link: GuestLink) -> None:
    """Even where a start file has brought generators into the zygote that no fork begins anew by itself."""
    asked = await link.start(ProcessSpec(("python3", "-m", "site", "--user-site")))
    folder = b"".join([piece.data async for piece in asked]).decode().strip()
    start = b"import random, sys\nsys.modules['numpy.random'] = random.Random(1)\n"
    await link.files.write(f"{folder}/usercustomize.py", start, parents=True)
    drawn = set()
    for name in ("a", "b", "c"):
        await contexts.create(id=name)
        assert await _copied(contexts, name)
        for code in ("sys.modules['numpy.random'].random()", "random.random()"):
            drawn.add((await contexts.run(name, f"import sys, random\n{code}")).text)
    assert len(drawn) == 6


async def test_another_environment_of_the_interpreter_starts_cold(contexts: Contexts) -> None:
    await contexts.create(id="a", env={"PYTHONPATH": "/tmp/mine"})
    assert (await contexts.run("a", "import sys\n'/tmp/mine' in sys.path")).text == "True"
    assert not await _copied(contexts, "a")
    await contexts.create(id="b", env={"MINE": "1"})
    assert await _copied(contexts, "b")
    with pytest.raises(Unsupported, match="has no python3 or python"):
        await contexts.create(env={"PATH": "/nowhere"})


async def test_without_a_zygote_another_is_made(contexts: Contexts, link: GuestLink) -> None:
    await contexts.create(id="a")
    await contexts.run("a", "kept = 1")
    first = await _pid(link)
    await contexts.run("a", f"import os\nos.kill({first}, 9)")
    while await _pid(link):
        await asyncio.sleep(0.01)
    assert (await contexts.run("a", "kept")).text == "1"  # its copies live on
    await contexts.create(id="b")
    assert await _copied(contexts, "b") and await _pid(link) not in (0, first)


async def test_a_zygote_that_is_stopped_costs_one_start(contexts: Contexts, link: GuestLink) -> None:
    await contexts.create(id="a")
    zygote = await _pid(link)
    await link.signal(ZYGOTE, signal.SIGSTOP)
    await contexts.create(id="b")  # after its patience
    assert not await _copied(contexts, "b")
    assert (await contexts.run("b", "1 + 1")).text == "2"
    await contexts.create(id="c")
    assert await _copied(contexts, "c") and await _pid(link) not in (0, zygote)


@pytest.mark.parametrize(
    "code",
    [
        "import os, sys\nsys.exit(0)",
        "import os, time\nos.dup2(os.open('/dev/null', os.O_RDONLY), 0)\nwhile True: time.sleep(60)",
        "import socket, array\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, 0)\n"
        "while True:\n"
        "    data, fds, _, _ = socket.recv_fds(s, 1 << 18, 8)\n"
        "    if not fds: break\n"
        "    import os, struct\n"
        "    os.write(fds[3], struct.pack('=II', 1, 0))\n"
        "    [os.close(f) for f in fds]",
    ],
    ids=["ended", "deaf", "liar"],
)
async def test_somebody_else_in_the_zygotes_place(contexts: Contexts, link: GuestLink, code: str) -> None:
    """The workload can start what it likes under the zygote's id; it gets cold contexts for it."""
    process = await link.start(ProcessSpec(("python3", "-c", code), id=ZYGOTE, stdin=True, zygote=True))
    await contexts.create(id="a")
    assert (await contexts.run("a", "6 * 7")).text == "42"
    await process.close()


async def test_a_command_that_is_no_zygote_is_not_asked(link: GuestLink) -> None:
    await link.start(ProcessSpec(("cat",), id="plain", stdin=True))
    with pytest.raises(GuestRefused):
        await link.start(ProcessSpec(("true",), id="copy", stdin=True, copy_of="plain"))
    assert "copy" not in [row.id for row in await link.processes()]


async def test_the_end_of_one_copy_harms_no_other(contexts: Contexts, link: GuestLink) -> None:
    for name in ("a", "b"):
        await contexts.create(id=name)
    await contexts.run("b", "kept = 1")
    ran = await contexts.run("a", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert ran.status == "ended" and ran.error is not None and "139" in ran.error.value
    ran = await contexts.run("b", "kept")
    assert ran.text == "1" and await _pid(link)
    await contexts.close("b")
    assert await contexts.list() == []


async def test_what_is_registered_for_the_end_runs_as_ever(contexts: Contexts, link: GuestLink) -> None:
    await contexts.create(id="a")
    assert await _copied(contexts, "a")
    await contexts.run("a", "import atexit\natexit.register(lambda: open('/tmp/over', 'w').close());")
    process = await link.attach("ctx.python.a")
    await process.close_stdin()
    assert (await process.wait()).code == 0
    assert (await link.files.stat("/tmp/over")).type == "file"
