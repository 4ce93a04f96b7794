"""Two API processes on one PostgreSQL: a stream of input whose API is killed goes on at the other one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Iterator

import pytest

from ringfence import AsyncSandbox, AsyncService
from support.apis import another
from support.cutting import relay
from support.postgres import PostgresServer, postgres
from support.sdk_halves import SMALL
from support.serving import Serving, needs_root_or_users, serving

__all__ = ["postgres"]
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def pair(postgres: PostgresServer) -> Iterator[tuple[Serving, Serving]]:
    needs_root_or_users()
    store = postgres.fresh()
    with serving("--no-egress", store=store) as first, another(first, "--no-egress") as second:
        yield first, second


def address(service: Serving) -> tuple[str, int]:
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    return host, int(port)


async def test_input_goes_on_at_the_other_api(pair: tuple[Serving, Serving]) -> None:
    data = os.urandom(12 * MIB)
    async with relay(pair[0].url) as between, AsyncService(between.url, pair[0].key) as through:
        box = await AsyncSandbox.create(**SMALL, service=through)
        process = await box.start(["sha256sum"], stdin=True)
        at = 0
        for turn in range(2):
            end = (turn + 1) * 6 * MIB
            # Killed while input is on its way, not between two writes.
            writing = asyncio.ensure_future(process.write(data[at:end]))
            while process._given < at + 2 * MIB:
                await asyncio.sleep(0)
                if writing.done():
                    break
            killed, other = pair if turn % 2 == 0 else pair[::-1]
            (pid,) = killed.children()["api"]
            between._target = address(other)
            os.kill(pid, signal.SIGKILL)
            await writing
            at = end
            async with asyncio.timeout(90):  # there is one to be killed again
                while not killed.children()["api"] or pid in killed.children()["api"]:
                    await asyncio.sleep(0.05)
        await process.close_stdin()
        result = await process.wait()
        assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()
        await box.kill()


async def taken(box: AsyncSandbox, id: str) -> int:
    """Bytes of input that the guest has for a command, as one who attaches is told."""
    socket = await box._transport.connect(f"/v1/sandboxes/{box.id}/execute")
    try:
        await socket.send(json.dumps({"type": "execute", "command_id": id}))
        return int(json.loads(await socket.recv())["stdin_offset"])
    finally:
        await socket.close()


async def test_input_of_one_who_follows_is_counted_from_where_he_came(pair: tuple[Serving, Serving]) -> None:
    first, second, rest = os.urandom(MIB), os.urandom(3 * MIB), os.urandom(MIB)
    async with relay(pair[1].url) as between, AsyncService(between.url, pair[0].key) as through:
        box = await AsyncSandbox.create(**SMALL, service=through)
        begun = await box.start(["sha256sum"], stdin=True)
        await begun.write(first)
        # All of it is the guest's before the next one comes.
        async with asyncio.timeout(60):
            while begun._given < len(first) or await taken(box, begun.id) < len(first):
                await asyncio.sleep(0.05)
        await begun.close()
        follower = await box.attach(begun.id)
        for piece in range(0, len(second), 300_000):
            await follower.write(second[piece : piece + 300_000])
            assert between.cut() > 0
        await follower.write(rest)
        await follower.close_stdin()
        wanted = hashlib.sha256(first + second + rest).hexdigest()
        assert (await follower.wait()).stdout.split()[0] == wanted
        await box.kill()


async def test_a_living_api_that_has_not_noticed_the_break_delivers_nothing_more(
    pair: tuple[Serving, Serving],
) -> None:
    """A client is cut off, and sends again through another API what the first has in hand: it comes once."""
    from websockets.exceptions import ConnectionClosed

    here, there = (AsyncService(each.url, pair[0].key) for each in pair)
    async with here, there:
        box = await AsyncSandbox.create(**SMALL, service=here)
        path = f"/v1/sandboxes/{box.id}/execute"
        first = {"type": "execute", "command_id": "one", "argv": ["cat"], "keep_stdin": True, "binary": True}
        old = await box._transport.connect(path)
        try:
            await old.send(json.dumps(first))
            assert json.loads(await old.recv())["fresh"]
            await old.send(b"one ")
            assert (await old.recv())[9:] == b"one "
            new = await (await AsyncSandbox.connect(box.id, service=there))._transport.connect(path)
            try:
                await new.send(json.dumps(first | {"take_input": True, "stdout_offset": 4}))
                started = json.loads(await new.recv())
                assert (started["fresh"], started["stdin_offset"]) == (False, 4)
                closed = asyncio.ensure_future(old.wait_closed())
                with contextlib.suppress(ConnectionClosed):
                    for _ in range(50):  # what the first API still has: it may be told at any moment
                        await old.send(b"twice ")
                await new.send(b"twice ")
                await new.send(json.dumps({"type": "eof"}))
                said = b""
                while isinstance(piece := await new.recv(), bytes):
                    said += piece[9:]
                assert said == b"twice " and json.loads(piece)["exit_code"] == 0
                await closed
                assert old.close_code == 1001
            finally:
                await new.close()
        finally:
            await old.close()
        await box.kill()
