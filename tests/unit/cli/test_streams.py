"""Standard streams that never block the loop."""

from __future__ import annotations

import asyncio
import os
import pty
import socket

import pytest

from ringfence.cli.streams import Sink, Source

BIG = os.urandom(1 << 20)


def read_all(descriptor):
    data = bytearray()
    while piece := os.read(descriptor, 65536):
        data += piece
    return bytes(data)


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    open_ones = {reader, writer}

    def close(descriptor):
        if descriptor in open_ones:
            open_ones.discard(descriptor)
            os.close(descriptor)

    yield reader, writer, close
    for descriptor in list(open_ones):
        close(descriptor)


async def test_a_slow_reader_of_a_pipe_gets_everything_and_nobody_is_blocked(pipe):
    reader, writer, close = pipe
    sink = Sink(writer)
    writing = asyncio.ensure_future(sink.write(BIG))
    await asyncio.sleep(0)  # with nobody reading the loop still turns
    assert not writing.done()
    reading = asyncio.to_thread(read_all, reader)
    task = asyncio.ensure_future(reading)
    await writing
    sink.close()
    close(writer)
    assert await task == BIG
    assert sink.written == len(BIG)


async def test_the_inherited_description_stays_blocking(pipe):
    _, writer, _ = pipe
    sink = Sink(writer)
    await sink.write(b"x")
    assert os.get_blocking(writer)
    sink.close()


async def test_a_reader_that_goes_away_is_no_error(pipe):
    reader, writer, close = pipe
    sink = Sink(writer)
    close(reader)
    await sink.write(b"x")
    assert sink.broken
    await sink.write(BIG)
    sink.close()


async def test_a_reader_that_goes_away_while_we_wait(pipe):
    reader, writer, close = pipe
    sink = Sink(writer)
    writing = asyncio.ensure_future(sink.write(BIG))
    await asyncio.sleep(0)
    close(reader)
    await writing
    assert sink.broken
    sink.close()


async def test_what_waits_can_be_abandoned(pipe):
    _, writer, _ = pipe
    sink = Sink(writer)
    writing = asyncio.ensure_future(sink.write(BIG))
    await asyncio.sleep(0)
    sink.abandon()
    await writing
    assert sink.broken
    sink.close()


async def test_a_shared_description_is_written_without_blocking(pipe, monkeypatch):
    reader, writer, close = pipe
    real = os.open
    monkeypatch.setattr("os.open", lambda path, *rest: _refuse(path) or real(path, *rest))
    sink = Sink(writer)
    monkeypatch.undo()
    assert sink._kind == "shared"
    task = asyncio.ensure_future(asyncio.to_thread(read_all, reader))
    await sink.write(BIG)
    sink.close()
    close(writer)
    assert await task == BIG


def _refuse(path):
    if str(path).startswith("/proc/self/fd/"):
        raise PermissionError(13, "not ours")


async def test_files_keep_their_offset(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before ")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    sink = Sink(descriptor)
    await sink.write(b"after")
    sink.close()
    os.close(descriptor)
    assert path.read_bytes() == b"before after"


async def test_sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sink = Sink(ours.fileno())
        task = asyncio.ensure_future(asyncio.to_thread(_receive, theirs, len(BIG)))
        await sink.write(BIG)
        assert await task == BIG
        theirs.close()
        await sink.write(b"x")
        assert sink.broken
        sink.close()


def _receive(peer, count):
    data = bytearray()
    while len(data) < count:
        data += peer.recv(65536)
    return bytes(data)


async def test_a_closed_stream_is_a_broken_one():
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    sink = Sink(writer)
    await sink.write(b"x")
    assert sink.broken


async def test_a_full_disk_is_an_error():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    sink = Sink(descriptor)
    with pytest.raises(OSError, match="No space left"):
        await sink.write(b"x")
    sink.close()
    os.close(descriptor)


async def test_input_from_a_pipe(pipe):
    reader, writer, close = pipe
    source = Source(reader)
    got = []

    async def collect():
        async for data in source:
            got.append(data)

    task = asyncio.ensure_future(collect())
    os.write(writer, b"one")
    while not got:
        await asyncio.sleep(0.001)
    assert got == [b"one"]
    close(writer)
    await task
    source.close()


async def test_input_from_a_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(BIG)
    descriptor = os.open(path, os.O_RDONLY)
    os.lseek(descriptor, 10, os.SEEK_SET)
    source = Source(descriptor)
    assert b"".join([data async for data in source]) == BIG[10:]
    os.close(descriptor)


async def test_no_input():
    descriptor = os.open("/dev/null", os.O_RDONLY)
    source = Source(descriptor)
    assert [data async for data in source] == []
    source.close()
    os.close(descriptor)


async def test_input_that_was_closed():
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    assert [data async for data in Source(reader)] == []


async def test_a_terminal_that_hangs_up_is_the_end_of_input():
    master, slave = pty.openpty()
    source = Source(slave)
    assert source.terminal
    task = asyncio.ensure_future(anext(aiter(source), b""))
    await asyncio.sleep(0)
    os.write(master, b"line\n")
    assert await task == b"line\n"
    os.close(master)
    assert [data async for data in source] == []
    source.close()
    os.close(slave)
