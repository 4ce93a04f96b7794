"""What the death of a link costs, with the real agent: that link alone. And back-pressure, end to end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.conformance.harness import eventually
from ringfence.guest import frames
from ringfence.guest.fields import encode
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestError, LinkLost
from support.agents import BareAgent

# Deterministic bytes that a lost, doubled or swapped piece would show in.
NUMBERS = "i=0; while [ $i -lt {count} ]; do printf '%015d\\n' $i; i=$((i+1)); done"


def numbers(count: int) -> bytes:
    return b"".join(b"%015d\n" % number for number in range(count))


async def test_output_is_resumed_by_offset_without_losing_a_byte(agent: BareAgent) -> None:
    count = 60_000
    link = await agent.link()
    script = f"for i in range({count}): print('%015d' % i)"
    process = await link.start(ProcessSpec(("/usr/bin/python3", "-c", script), id="numbers", ring=65536))
    got = bytearray()
    dice = random.Random(7)
    links = 1
    while True:
        try:
            async for _, offset, data in process:
                assert offset == len(got)
                got += data
                if dice.random() < 0.2:
                    link._wire.abort()  # as if the host process had died right here
                    raise LinkLost("cut")
            break
        except LinkLost:
            await link.close()
            link = await agent.link()
            links += 1
            process = await link.attach("numbers", stdout=len(got), stderr=0)
    assert links > 5
    assert bytes(got) == numbers(count)
    assert (await process.wait()).code == 0
    await link.close()


HOST = """
import asyncio, os, socket, sys
from ringfence.guest import frames
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec

async def main():
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    link = await GuestLink.open(sock)
    process = await link.start(ProcessSpec(("cat",), id=sys.argv[2], stdin=True))
    await process.write(b"before")
    async for piece in process:
        print(piece.data.decode(), flush=True)
        break
    # The first half of a frame, then silence: the kill comes in the middle of it.
    half = frames.data_frame(1, 0, 6, bytes(50_000))[: int(sys.argv[3])]
    link._wire._transport.write(half)
    while link._wire._transport.get_write_buffer_size():
        await asyncio.sleep(0)
    print("half", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [1, 11, 12, 13, 21, 40_000])
async def test_a_host_process_killed_in_the_middle_of_a_frame_costs_one_link(
    agent: BareAgent, link: GuestLink, sent: int
) -> None:
    bystander = await link.start(ProcessSpec(("cat",), stdin=True))
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(agent.socket_path), "victim", str(sent)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert host.stdout is not None
    assert await asyncio.to_thread(host.stdout.readline) == b"before\n"
    assert await asyncio.to_thread(host.stdout.readline) == b"half\n"
    host.send_signal(signal.SIGKILL)
    host.wait()
    host.stdout.close()
    # The other link goes on, and so does the command of the dead one; a new process continues by offset.
    await bystander.write(b"alive")
    assert (await anext(bystander)).data == b"alive"
    again = await link.attach("victim", stdout=6)
    assert again.stdin_offset == 6  # nothing of the half frame was taken
    await again.write(b"after")
    assert await anext(again) == (1, 6, b"after")
    await again.close_stdin()
    assert (await again.wait()).code == 0


async def test_a_link_cut_at_every_byte_of_a_session_hurts_nobody(agent: BareAgent, link: GuestLink) -> None:
    hello = frames.frame(0, frames.HELLO, encode([(1, frames.MAGIC), (2, 1), (3, bytes(16)), (4, "control")]))
    session = hello + b"".join(
        (
            frames.open_frame(1, 1, encode([(1, "cut"), (2, "cat"), (5, 2)])),
            frames.data_frame(1, 0, 0, b"hello"),
            frames.credit_frame(1, 1, 100),
            frames.eof_frame(1, 0, 5),
            frames.close_frame(1),
            frames.frame(0, frames.PING, b"ping"),
        )
    )
    for at in range(len(session)):
        sock = agent.dial()
        sock.setblocking(True)
        sock.sendall(session[:at])
        sock.close()
    # The control: the same bytes, uncut and read to the end, are a session.
    sock, parser, seen = agent.dial(), frames.FrameParser(), []
    await asyncio.get_running_loop().sock_sendall(sock, session.replace(b"cut", b"all"))
    while (0, frames.PONG) not in seen:
        data = await asyncio.get_running_loop().sock_recv(sock, 65536)
        assert data
        seen += [(number, kind) for number, kind, _ in parser.feed(data)]
    sock.close()
    assert "all" in {row.id for row in await link.processes()}
    process = await link.start(ProcessSpec(("echo", "fine")))
    assert (await anext(process)).data == b"fine\n"


async def test_garbage_costs_the_link_it_came_on(agent: BareAgent, link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("cat",), stdin=True))
    dice = random.Random(3)
    loop = asyncio.get_running_loop()
    for _ in range(60):
        sock = agent.dial()
        hello = frames.frame(0, frames.HELLO, encode([(1, frames.MAGIC), (2, 1), (3, bytes(16))]))
        data = (hello if dice.random() < 0.7 else b"") + dice.randbytes(dice.randrange(12, 300))
        await loop.sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)
        while True:  # the agent closes it
            try:
                if not await loop.sock_recv(sock, 65536):
                    break
            except ConnectionError:
                break
        sock.close()
    await process.write(b"fine")
    assert (await anext(process)).data == b"fine"


async def test_sixty_links_at_once(agent: BareAgent) -> None:
    links = await asyncio.gather(*(agent.link() for _ in range(60)))
    assert len({link.instance for link in links}) == 1

    async def use(number: int, link: GuestLink) -> bytes:
        process = await link.start(ProcessSpec(("sh", "-c", f"echo {number}; cat"), stdin=True))
        data = str(number).encode() * 5000
        await process.write(data)
        await process.close_stdin()
        return b"".join([piece.data async for piece in process]).removeprefix(b"%d\n" % number)

    results = await asyncio.gather(*(use(number, link) for number, link in enumerate(links)))
    assert results == [str(number).encode() * 5000 for number in range(60)]
    # Four more fit, and what is over the limit is closed, without harm to the others.
    more = await asyncio.gather(*(agent.link() for _ in range(4)))
    with pytest.raises(GuestError):
        await agent.link()
    await links[0].ping()
    for link in (*links, *more):
        await link.close()
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        try:
            fresh = await agent.link()
            break
        except LinkLost:
            assert asyncio.get_running_loop().time() < deadline
    await fresh.ping()
    await fresh.close()


async def test_a_slow_reader_is_waited_for_and_nobody_else_waits(agent: BareAgent, link: GuestLink) -> None:
    window, ring = 65536, 65536
    writer = "import os\nn = 0\nwhile True:\n n += os.write(1, bytes(4096)); open('count', 'w').write(str(n))"
    slow = await agent.link()
    process = await slow.start(ProcessSpec(("/usr/bin/python3", "-c", writer), window=window, ring=ring))
    counter = agent.folder / "count"

    def written() -> int:
        while not counter.exists() or not (text := counter.read_text()):  # caught between truncate and write
            pass
        return int(text)

    # It comes to a halt: nobody reads. The pipe holds 64 KiB more, and one write may be under way.
    before = -1
    while (now := written()) != before:
        before = now
        await asyncio.sleep(0.2)
    assert now <= window + ring + 65536 + 4096
    # Meanwhile another link works, on other commands and on the same one.
    for _ in range(20):
        quick = await link.start(ProcessSpec(("echo", "quick")))
        assert b"".join([piece.data async for piece in quick]) == b"quick\n"
    channel = process._channel
    assert channel is not None
    assert sum(len(piece.data) for piece in channel._pieces) <= window
    # As soon as somebody reads, it goes on.
    total = 0
    async for piece in process:
        total += len(piece.data)
        if total > 10 * (window + ring):
            break
    assert written() > now
    await process.signal(signal.SIGKILL)
    await process.wait()
    await slow.close()


async def test_a_flood_costs_the_host_no_memory(agent: BareAgent, link: GuestLink) -> None:
    flood = await link.start(ProcessSpec(("cat", "/dev/zero")))
    unread = await link.start(ProcessSpec(("cat", "/dev/zero")))
    async for piece in flood:
        if piece.offset > 5_000_000:
            break
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    digest = hashlib.sha256()
    async for piece in flood:
        digest.update(piece.data)
        if piece.offset > 200_000_000:
            break
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 8 * 1024, f"{grown} KiB"
    channel = unread._channel
    assert channel is not None
    assert sum(len(kept.data) for kept in channel._pieces) <= 262_144
    await link.signal_all(signal.SIGKILL)
    assert (await flood.wait()).signal == 9
    assert (await unread.wait()).signal == 9


async def test_the_agents_memory_does_not_grow_with_links(agent: BareAgent, link: GuestLink) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1]) * 4096

    async def churn(times: int) -> None:
        for _ in range(times):
            async with await agent.link() as other:
                process = await other.start(ProcessSpec(("true",), id="same"))
                await process.wait()
                await other.remove("same")

    await churn(30)
    before = resident()
    await churn(150)
    assert resident() - before < 256 * 1024


async def test_the_client_leaves_no_descriptor(agent: BareAgent) -> None:
    async with await agent.link() as link:
        await link.ping()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        async with await agent.link() as link:
            await link.ping()
        broken = await agent.link()
        broken._wire.abort()
        await broken.close()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors stay")


async def test_the_end_of_the_sandbox_reaches_every_waiter(agent: BareAgent, link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sleep", "600")))
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.sleep(0)
    os.kill(agent.pid, signal.SIGKILL)
    with pytest.raises(LinkLost):
        await waiting
    with pytest.raises(LinkLost):
        await link.stats()
