"""Files, archives, ports and the rest on the real agent."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import signal
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.guest.archives import extract_tar
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused, LinkLost
from support.agents import BareAgent


async def pieces(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def errno_of(awaitable: object) -> int:
    with pytest.raises(GuestRefused) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value.errno


async def test_a_file_survives_the_round_trip(agent: BareAgent, link: GuestLink) -> None:
    data = os.urandom(3_000_000)
    assert await link.files.write("a/b/data", pieces(data), 0o640, parents=True) == len(data)
    assert (agent.folder / "a/b/data").read_bytes() == data
    assert (agent.folder / "a/b/data").stat().st_mode & 0o7777 == 0o640
    assert await link.files.read_bytes("a/b/data") == data
    part = b"".join([piece async for piece in link.files.read("a/b/data", 1_000_000, 500_000)])
    assert part == data[1_000_000:1_500_000]
    info = await link.files.stat("a/b/data")
    assert (info.type, info.size, info.mode, info.uid) == ("file", len(data), 0o640, os.geteuid())
    assert [path.name for path in (agent.folder / "a/b").iterdir()] == ["data"]  # no temporary file


async def test_a_write_that_ends_early_leaves_the_old_file(agent: BareAgent, link: GuestLink) -> None:
    await link.files.write("x", b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield b"new" * 30_000
        raise RuntimeError("the source")

    with pytest.raises(RuntimeError):
        await link.files.write("x", broken())
    await link.ping()
    other = await agent.link()
    task = asyncio.ensure_future(other.files.write("x", pieces(bytes(50_000_000))))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await other.close()
    assert await link.files.read_bytes("x") == b"old"
    await link.files.write("x", b"+", append=True)
    assert await link.files.read_bytes("x") == b"old+"
    assert await errno_of(link.files.write("x", b"", exclusive=True)) == 17


async def test_errors_are_those_of_the_call(link: GuestLink) -> None:
    files = link.files
    assert await errno_of(files.read_bytes("none")) == 2
    assert await errno_of(files.read_bytes("/")) == 21
    assert await errno_of(files.stat("none")) == 2
    assert await errno_of(files.list("none")) == 2
    assert await errno_of(files.remove("none")) == 2
    assert await errno_of(files.move("none", "x")) == 2
    assert await errno_of(files.mkdir("/")) == 17
    assert await errno_of(files.write("none/x", b"x")) == 2
    await files.remove("none", missing_ok=True)


async def test_folders_are_listed_whatever_the_names(agent: BareAgent, link: GuestLink) -> None:
    names = [b"plain", b"new\nline", b"\xff\xfe", b"x" * 255, b"\x1b[2J", b"-rf"]
    for name in names:
        (agent.folder / os.fsdecode(name)).write_bytes(b"12345")
    await link.files.mkdir("deep/er", parents=True)
    await link.files.write("deep/er/file", b"1")
    os.symlink("/etc", agent.folder / "link")
    found = {os.fsencode(info.path): info for info in await link.files.list()}
    assert set(found) == {*names, b"deep", b"link"}
    assert (found[b"link"].type, found[b"link"].target) == ("symlink", "/etc")
    assert found[b"plain"].size == 5
    deep = {info.path for info in await link.files.list("deep", depth=9)}
    assert deep == {"er", "er/file"}
    await link.files.move("deep/er/file", "moved")
    await link.files.remove("deep", recursive=True)
    assert not (agent.folder / "deep").exists()
    assert await link.files.read_bytes("moved") == b"1"


async def test_many_files_are_listed(agent: BareAgent, link: GuestLink) -> None:
    for number in range(1500):
        (agent.folder / f"file-{number:05d}").touch()
    found = await link.files.list()
    assert sorted(info.path for info in found) == [f"file-{number:05d}" for number in range(1500)]


async def test_changes_are_watched(agent: BareAgent, link: GuestLink) -> None:
    async with await link.files.watch() as watch:
        (agent.folder / "new").write_text("x")
        async with asyncio.timeout(60):
            event = await anext(watch)
            while event.path != "new":
                event = await anext(watch)
        assert event.kind in ("created", "modified")
        (agent.folder / "new").unlink()
        async with asyncio.timeout(60):
            while event.kind != "deleted":
                event = await anext(watch)
        assert event.path == "new"


async def test_a_folder_goes_out_and_comes_in(agent: BareAgent, link: GuestLink, tmp_path: Path) -> None:
    source = agent.folder / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "data").write_bytes(os.urandom(700_000))
    (source / "sub" / os.fsdecode(b"\xff\xfe")).write_text("odd")
    (source / ("n" * 200)).write_text("long")
    (source / "left-out").mkdir()
    (source / "left-out" / "x").write_text("x")
    os.symlink("sub/data", source / "link")
    os.symlink("/etc/passwd", source / "evil")
    got = await extract_tar(link.files.tar_out("source", exclude=("left-out",)), tmp_path / "out")
    out = tmp_path / "out"
    root = out / "source" if (out / "source").exists() else out
    assert (root / "sub/data").read_bytes() == (source / "sub/data").read_bytes()
    assert (root / "link").read_bytes() == (source / "sub/data").read_bytes()
    assert (root / "sub" / os.fsdecode(b"\xff\xfe")).read_text() == "odd"
    assert (root / ("n" * 200)).read_text() == "long"
    assert not (root / "left-out").exists()
    assert [reason for _, reason in got.skipped] == ["a symlink that leaves the folder"]
    archive = b"".join([piece async for piece in link.files.tar_out("source")])
    assert await link.files.tar_in("copy", pieces(archive)) > 0
    copies = list((agent.folder / "copy").rglob("data"))
    assert copies[0].read_bytes() == (source / "sub/data").read_bytes()


@pytest.mark.parametrize("name", ["/absolute", "../climbs", "link/x"])
async def test_hostile_archives_are_refused_inside_too(agent: BareAgent, link: GuestLink, name: str) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        symlink = tarfile.TarInfo("link")
        symlink.type, symlink.linkname = tarfile.SYMTYPE, "/tmp"
        tar.addfile(symlink)
        tar.addfile(tarfile.TarInfo(name))
    assert await errno_of(link.files.tar_in("in", out.getvalue())) == 22


SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    conn, _ = server.accept()
    while data := conn.recv(65536):
        conn.sendall(data)
    conn.close()
"""


async def test_ports_are_dialled(link: GuestLink) -> None:
    server = await link.start(ProcessSpec(("/usr/bin/python3", "-S", "-c", SERVER)))
    port = int((await anext(server)).data)
    for size in (1, 1_000_000):
        data = os.urandom(size)
        async with await link.dial(port) as stream:

            async def write() -> None:
                await stream.write(data)  # noqa: B023
                await stream.eof()

            writing = asyncio.ensure_future(write())
            got = bytearray()
            while piece := await stream.read():
                got += piece
            await writing
            assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()
    await server.signal(signal.SIGKILL)
    await server.wait()
    assert await errno_of(link.dial(port)) == 111
    assert await errno_of(link.dial(80, "192.0.2.1")) == 13


CLIENT = """
import socket, sys
conn = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
conn.sendall(b"request")
print(conn.recv(100).decode())
"""


async def test_connections_from_inside_are_handed_out(link: GuestLink) -> None:
    async with await link.listen() as listener:
        client = await link.start(ProcessSpec(("/usr/bin/python3", "-S", "-c", CLIENT, str(listener.port))))
        stream = await listener.accept()
        assert await stream.read() == b"request"
        await stream.write(b"answer")
        assert b"".join([piece.data async for piece in client]) == b"answer\n"
        assert await stream.read() == b""
        await stream.close()
        port = listener.port
    assert await errno_of(link.dial(port)) == 111


async def test_the_environment_is_bound_late(link: GuestLink) -> None:
    await link.bind(env={"TOKEN": "late", "PATH": "/usr/bin:/bin"})
    process = await link.start(ProcessSpec(("sh", "-c", "echo $TOKEN")))
    assert b"".join([piece.data async for piece in process]) == b"late\n"


async def test_stats_are_reported(link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("sleep", "600")))
    stats = await link.stats()
    assert stats.processes >= 1
    assert stats.links == 1
    assert stats.uptime > 0
    await process.signal(signal.SIGKILL)


async def test_ids_and_offsets_survive_a_quiesce(agent: BareAgent, link: GuestLink) -> None:
    process = await link.start(ProcessSpec(("cat",), id="cat", stdin=True))
    await process.write(b"before")
    assert await anext(process) == (1, 0, b"before")
    instance = link.instance
    assert await link.quiesce(60.0) == 1  # it flushes the host's disk
    with pytest.raises(LinkLost):
        await process.wait()
    os.kill(agent.pid, signal.SIGUSR1)
    async with await agent.link(timeout=30) as woken:
        assert woken.epoch == 2
        assert woken.instance != instance
        again = await woken.attach("cat", stdout=6)
        await again.write(b"after")
        assert await anext(again) == (1, 6, b"after")


async def test_shutdown_ends_everything(agent: BareAgent, link: GuestLink) -> None:
    await link.start(ProcessSpec(("sh", "-c", "trap '' TERM; sleep 600")))
    with contextlib.suppress(LinkLost):  # it may close the link before its answer is read
        await link.shutdown(0.1)
    await asyncio.to_thread(agent.process.wait, 60)
    with pytest.raises(LinkLost):
        await link.ping()
