"""Links: several at once, broken ones, hostile hosts, binding, and the agent's own word about itself."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time

import pytest

from ringfence.conformance.harness import Kit, RuntimeSuite, python, run
from ringfence.conformance.plugin import needs
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused, RingfenceError
from ringfence.model.sandbox import SandboxRequest

HELLO = b"RINGFENCE-LINK-1"


class LinkSuite(RuntimeSuite):
    """connect, and what the protocol says about links."""

    async def test_links_are_independent(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        links = [await kit.link(sandbox) for _ in range(8)]
        assert len({link.instance for link in links}) == 1
        assert {link.epoch for link in links} == {1}
        results = await asyncio.gather(*(run(link, "echo", str(n)) for n, link in enumerate(links)))
        assert [done.text for done in results] == [str(n) for n in range(8)]
        await links[0].close()
        assert (await run(links[1], "echo", "still")).text == "still"

    async def test_a_process_started_on_one_is_known_on_all(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        one, two = await kit.link(sandbox), await kit.link(sandbox)
        await one.start(ProcessSpec(("sleep", "60"), id="shared"))
        assert [p.id for p in await two.processes()] == ["shared"]

    @pytest.mark.parametrize(
        "noise",
        [b"", b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70000, os.urandom(3000), HELLO * 100],
        ids=["nothing", "zeros", "http", "ones", "random", "almost"],
    )
    async def test_a_host_that_speaks_nonsense_loses_its_link_only(self, kit: Kit, noise: bytes) -> None:
        sandbox = await kit.sandbox()
        good = await kit.link(sandbox)
        raw = await kit.runtime.connect(sandbox.handle)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(raw, noise)
            raw.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(raw, 65536):  # the agent closes
                pass
        except (ConnectionError, BrokenPipeError):
            pass
        finally:
            raw.close()
        assert (await run(good, "echo", "fine")).text == "fine"
        assert (await run(await kit.link(sandbox), "echo", "fine")).text == "fine"

    async def test_a_frame_cut_in_the_middle_costs_one_link(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        good = await kit.link(sandbox)
        writing = await kit.link(sandbox)
        process = await writing.start(ProcessSpec(("cat",), id="cat", stdin=True))
        await process.write(b"x" * 1000)
        # As kill -9 does: the descriptor goes away with unsent bytes.
        assert writing._wire._transport is not None
        writing._wire._transport.abort()
        assert (await run(good, "echo", "fine")).text == "fine"
        again = await good.attach("cat", stdout=0)
        await again.close_stdin()

    async def test_more_links_than_there_may_be(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        opened: list[GuestLink] = []
        for _ in range(70):
            try:
                opened.append(await kit.link(sandbox))
            except RingfenceError:
                break
        assert 32 <= len(opened) <= 64
        assert (await run(opened[0], "echo", "fine")).text == "fine"
        for link in opened[1:]:
            await link.close()
        end = time.monotonic() + 60
        while True:
            try:
                assert (await run(await kit.link(sandbox), "echo", "again")).text == "again"
            except RingfenceError:  # the agent has not seen all of them close yet
                assert time.monotonic() < end, "no new link after the others were closed"
                await asyncio.sleep(0.01)
                continue
            return

    @needs("programs")
    async def test_binding(self, kit: Kit) -> None:
        link = await kit.started()
        await link.bind(env={"TOKEN": "late", "PATH": "/usr/bin:/bin"}, secrets={"key": b"s3cret\0\xff"})
        assert (await run(link, "/bin/sh", "-c", "echo $TOKEN")).text == "late"
        done = await run(link, "cat", "/run/secrets/key")
        assert done.stdout == b"s3cret\0\xff", done.stderr
        info = await link.files.stat("/run/secrets/key")
        assert info.mode == 0o400

    async def test_a_secret_with_a_hostile_name(self, kit: Kit) -> None:
        link = await kit.started()
        for name in ("../../tmp/forged", "/tmp/forged", ".", "a/b", ""):
            with pytest.raises((GuestRefused, RingfenceError)):
                await link.bind(secrets={name: b"x"})
        with pytest.raises(GuestRefused) as caught:
            await link.files.stat("/tmp/forged")
        assert caught.value.errno == errno.ENOENT

    async def test_stats_are_reported(self, kit: Kit) -> None:
        link = await kit.started()
        await link.start(ProcessSpec(("sleep", "60")))
        stats = await link.stats()
        assert stats.processes >= 1
        assert stats.links >= 1
        assert stats.uptime > 0

    @needs("programs")
    async def test_the_agent_answers_under_a_fork_storm(self, kit: Kit) -> None:
        link = await kit.started(max_processes=64)
        storm = "import os\nwhile True:\n try:\n  if os.fork()==0: pass\n except OSError: pass"
        process = await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", storm), id="storm"))
        for _ in range(50):
            await link.ping(60)
        assert process.exit is None or process.exit.signal
        await link.signal_all(9)

    async def test_a_request_is_what_it_says(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        assert isinstance(sandbox.request, SandboxRequest)
        assert sandbox.handle.runtime == kit.name
        assert (await python(await kit.link(sandbox), "print(6*7)")).text == "42"
