"""The client of the API against a server that says anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.model.errors import LinkLost
from ringfence.runtimes.firecracker import api, links
from ringfence.runtimes.firecracker.api import Api, Refused


@contextlib.asynccontextmanager
async def server(folder: Path, answer: bytes | None, name: str = "api.sock") -> AsyncIterator[list[bytes]]:
    """Answers every connection's first request with these bytes (``None``: never) and ends it."""
    heard: list[bytes] = []
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65536))
        if answer is None:
            await hold.wait()
        else:
            writer.write(answer)
        writer.close()

    listening = await asyncio.start_unix_server(serve, str(folder / name))
    try:
        yield heard
    finally:
        hold.set()
        listening.close()
        await listening.wait_closed()


OK = b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"


def refusal(content: bytes, status: int = 400) -> bytes:
    return b"HTTP/1.1 %d \r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content


async def test_a_request_is_http(tmp_path: Path) -> None:
    async with server(tmp_path, OK) as heard:
        await Api(str(tmp_path), "api.sock").put("/entropy", {"a": 1})
    head, _, body = heard[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "PUT /entropy HTTP/1.1"
    assert f"Content-Length: {len(body)}" in lines
    assert "Accept: application/json" in lines
    assert json.loads(body) == {"a": 1}


async def test_an_answer_is_read(tmp_path: Path) -> None:
    async with server(tmp_path, refusal(b'{"firecracker_version": "1.15.1"}', 200)):
        found = await Api(str(tmp_path), "api.sock").get("/version")
    assert found == {"firecracker_version": "1.15.1"}


async def test_a_fault_is_told_in_its_own_words(tmp_path: Path) -> None:
    async with server(tmp_path, refusal(b'{"fault_message": "Invalid request method and/or path"}')):
        with pytest.raises(Refused, match=r"PATCH /vm: Invalid request method and/or path") as caught:
            await Api(str(tmp_path), "api.sock").patch("/vm", {})
    assert caught.value.details == {"status": 400, "call": "/vm"}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "no reason given"),
        (b"[" * 100_000, "[" * 300),
        (b'{"fault_message": {"a": 1}}', '{"fault_message": {"a": 1}}'),
        (b'{"fault_message": "\\u001b[31mred\\n"}', "[31mred"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'"' + b"x" * 5000 + b'"', "x" * 300),
    ],
    ids=range(6),
)
def test_hostile_faults_are_printable_and_short(content: bytes, shown: str) -> None:
    assert api.fault(content) == shown


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00" * 100,
        b"HTTP/1.1 banana\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 \r\nContent-Length: 999999999\r\n\r\n",
        b"HTTP/1.1 200 \r\n" + b"X: y\r\n" * 10_000,
        b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 \r\nContent-Length: 1\r\n\r\n{",
        b"HTTP/1.1 200 \r\n\r\n",
    ],
    ids=range(10),
)
async def test_what_is_no_answer(tmp_path: Path, answer: bytes) -> None:
    async with server(tmp_path, answer):
        with pytest.raises(LinkLost):
            await Api(str(tmp_path), "api.sock").get("/version")


async def test_one_that_hangs(tmp_path: Path) -> None:
    async with server(tmp_path, None):
        with pytest.raises(LinkLost, match=r"does not answer GET /version within 0\.2 s"):
            await Api(str(tmp_path), "api.sock").get("/version", within=0.2)


async def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(LinkLost):
        await Api(str(tmp_path), "api.sock").get("/version")


async def test_no_link_is_followed_out_of_the_jail(tmp_path: Path) -> None:
    jail = tmp_path / "jail"
    jail.mkdir()
    (jail / "api.sock").symlink_to(tmp_path / "other.sock")
    async with server(tmp_path, OK, "other.sock") as heard:
        with pytest.raises(LinkLost):
            await Api(str(jail), "api.sock").put("/entropy", {})
        assert heard == []
        await Api(str(tmp_path), "other.sock").put("/entropy", {})  # the same server without the link
        assert len(heard) == 1


class TestStreams:
    """The handshake of vsock."""

    async def test_what_follows_the_line_is_the_guests(self, tmp_path: Path) -> None:
        async with server(tmp_path, b"OK 1073741824\nhello", links.NAME) as heard:
            sock = await links.connect(str(tmp_path), 1024)
            try:
                assert await asyncio.get_running_loop().sock_recv(sock, 100) == b"hello"
            finally:
                sock.close()
        assert heard == [b"CONNECT 1024\n"]

    @pytest.mark.parametrize("answer", [b"", b"OK", b"NO\n", b"OK x\n", b"O" * 1000, b"OK 1\r\n"])
    async def test_anything_else_is_refused(self, tmp_path: Path, answer: bytes) -> None:
        async with server(tmp_path, answer, links.NAME):
            with pytest.raises(ConnectionError):
                await links.connect(str(tmp_path), 1024)

    async def test_waiting_ends_with_the_machine(self, tmp_path: Path) -> None:
        with pytest.raises(ConnectionResetError, match="has ended"):
            await links.appear(str(tmp_path), 1024, lambda: True, 30)

    async def test_waiting_ends_in_time(self, tmp_path: Path) -> None:
        with pytest.raises(TimeoutError):
            await links.appear(str(tmp_path), 1024, lambda: False, 0.2)

    async def test_a_call_without_an_answer(self, tmp_path: Path) -> None:
        async with server(tmp_path, b"OK 1\n", links.NAME):
            with pytest.raises(LinkLost, match="does not answer kills"):
                await links.call(str(tmp_path), "kills")
