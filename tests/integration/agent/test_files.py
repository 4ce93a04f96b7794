"""File operations, through the real agent and its workers."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import signal
import struct
import tarfile
import time
from pathlib import Path

import pytest
from wall import (
    CLOSE,
    CREDIT,
    DATA,
    EOF,
    ERROR,
    EVENT,
    REPLY,
    USER,
    AgentError,
    Client,
    Value,
    Wall,
    argv,
    number,
    numbers,
    parse,
)

READ, WRITE, LIST, STAT, MOVE, REMOVE, MKDIR, WATCH = range(16, 24)
PACK = 25


def write(client: Client, path: str, data: bytes, *items: tuple[int, Value]) -> int:
    """Write a file; the size that the agent answers."""
    channel = client.open(WRITE, (1, path), *items)
    offset, credit = 0, 65536
    while offset < len(data):
        piece = data[offset : offset + min(credit, 60000)]
        offset = client.data(channel, piece, offset)
        credit -= len(piece)
        while credit < 1 and offset < len(data):
            frame = client.frame(channel)
            if frame.type == ERROR:
                raise AgentError(frame)
            credit += struct.unpack("<BI", frame.payload)[1]
    client.eof(channel, offset)
    while True:
        frame = client.frame(channel)
        if frame.type == ERROR:
            raise AgentError(frame)
        if frame.type == REPLY:
            assert client.frame(channel).type == CLOSE
            client.send(CLOSE, channel)
            return numbers(frame.payload)[1]


def stream(client: Client, channel: int) -> bytes:
    """What a reading operation sends after its REPLY, to its end."""
    got = bytearray()
    client.reply(channel)
    while True:
        frame = client.frame(channel)
        if frame.type == DATA:
            assert struct.unpack_from("<BQ", frame.payload) == (1, len(got))
            got += frame.payload[9:]
        elif frame.type == EOF:
            assert struct.unpack("<BQ", frame.payload) == (1, len(got))
        elif frame.type == CLOSE:
            client.send(CLOSE, channel)
            return bytes(got)
        elif frame.type == ERROR:
            raise AgentError(frame)


def read(client: Client, path: str, *items: tuple[int, Value]) -> bytes:
    """Read a file."""
    return stream(client, client.open(READ, (1, path), *items))


def listing(client: Client, path: str, *items: tuple[int, Value]) -> dict[bytes, dict[int, bytes]]:
    """List a folder: fields by name."""
    data = stream(client, client.open(LIST, (1, path), *items))
    found, at = {}, 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        entry = dict(parse(data[at + 4 : at + 4 + size]))
        found[entry[1]] = entry
        at += 4 + size
    return found


def refused(error: int, client: Client, *call: object) -> None:
    """The operation answers this errno."""
    with pytest.raises(AgentError) as caught:
        client.call(*call)  # type: ignore[arg-type]
    assert caught.value.errno == error


def test_write_and_read_big(walled: Wall, client: Client) -> None:
    data = os.urandom(1_000_000)
    assert write(client, "a/b/big", data, (2, 0o640), (3, 1)) == len(data)
    path = walled.work / "a/b/big"
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o7777 == 0o640
    assert path.stat().st_uid == USER or os.geteuid() != 0
    assert read(client, "a/b/big") == data
    assert read(client, "a/b/big", (2, 999_990)) == data[-10:]
    assert read(client, "a/b/big", (2, 5), (3, 7)) == data[5:12]
    assert read(client, "a/b/big", (2, 10**7)) == b""
    assert os.listdir(path.parent) == ["big"], "no temporary file is left"


def test_write_flags(walled: Wall, client: Client) -> None:
    assert write(client, "f", b"one") == 3
    assert write(client, "f", b"two", (3, 2)) == 6
    assert (walled.work / "f").read_bytes() == b"onetwo"
    with pytest.raises(AgentError) as caught:
        write(client, "f", b"x", (3, 8))
    assert caught.value.errno == errno.EEXIST
    inode = (walled.work / "f").stat().st_ino
    write(client, "f", b"direct", (3, 4))
    assert (walled.work / "f").stat().st_ino == inode
    write(client, "f", b"atomic")
    assert (walled.work / "f").stat().st_ino != inode
    assert write(client, "empty", b"") == 0
    os.symlink("f", walled.work / "link")
    write(client, "link", b"through")
    assert (walled.work / "link").is_symlink()
    assert (walled.work / "f").read_bytes() == b"through"


def test_a_large_write_may_have_more_on_its_way(walled: Wall, client: Client) -> None:
    """Who sends little is told nothing; who sends more than that gets a wider window."""
    channel = client.open(WRITE, (1, "f"))
    data = os.urandom(400_000)
    offset = client.data(channel, data[:65_000])
    credit = client.frame(channel)
    assert credit.type == CREDIT
    allowed = 65_536 + struct.unpack("<BI", credit.payload)[1]
    assert allowed == 262_144
    while offset < allowed:  # nothing else is needed to send all of it
        offset = client.data(channel, data[offset : min(offset + 60_000, allowed)], offset)
    while offset < len(data):
        frame = client.frame(channel)
        assert frame.type == CREDIT
        allowed += struct.unpack("<BI", frame.payload)[1]
        while offset < min(allowed, len(data)):
            offset = client.data(channel, data[offset : min(offset + 60_000, allowed)], offset)
    client.eof(channel, offset)
    while (frame := client.frame(channel)).type == CREDIT:
        pass
    assert numbers(frame.payload) == {1: len(data)}
    assert (walled.work / "f").read_bytes() == data


def test_the_wider_window_is_a_bound_too(walled: Wall, client: Client) -> None:
    """A worker that takes nothing: the agent holds a window and what a socket holds, and hangs up on more."""
    other = walled.client()
    channel = other.open(WRITE, (1, "f"))
    offset, allowed = other.data(channel, bytes(65_000)), 65_536
    allowed += struct.unpack("<BI", other.frame(channel).payload)[1]
    (worker,) = Path(f"/proc/{walled.pid}/task/{walled.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGSTOP)
    while offset < allowed:
        while offset < allowed:
            offset = other.data(channel, bytes(min(60_000, allowed - offset)), offset)
        other.ping()
        for frame in other.pending:
            allowed += struct.unpack("<BI", frame.payload)[1]
        other.pending.clear()
        assert allowed < 2_000_000
    other.data(channel, b"x", offset)
    with pytest.raises(EOFError):
        other.until_closed()
    with contextlib.suppress(ProcessLookupError):  # an abandoned worker is killed after a while
        os.kill(int(worker), signal.SIGCONT)
    client.ping()


def test_an_agent_that_waits_for_credit_sleeps(walled: Wall, client: Client) -> None:
    """What a worker sent ahead is held; that there is more of it to read must not keep the agent running."""
    (walled.work / "f").write_bytes(bytes(500_000))
    client.auto_credit = False
    channel = client.open(READ, (1, "f"), (8, 1000))
    client.reply(channel)
    assert len(client.frame(channel).payload) == 1009
    end = time.monotonic() + 60
    while Path(f"/proc/{walled.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < end, "the agent turns and turns"
    client.credit(channel, 1, 2**31)
    got = 1000
    while (frame := client.frame(channel)).type == DATA:
        got += len(frame.payload) - 9
    assert (frame.type, got) == (EOF, 500_000)


def test_a_write_that_ends_early_changes_nothing(walled: Wall, client: Client) -> None:
    write(client, "f", b"old")
    other = walled.client()
    channel = other.open(WRITE, (1, "f"))
    other.data(channel, b"new" * 1000)
    other.close()
    channel = client.open(WRITE, (1, "f"))
    client.data(channel, b"new" * 1000)
    client.send(CLOSE, channel)
    assert client.frame(channel).type == CLOSE
    while os.listdir(walled.work) != ["f"]:  # both workers clean up by themselves
        client.ping()
    assert read(client, "f") == b"old"


def test_errors_have_their_errno(walled: Wall, client: Client) -> None:
    (walled.work / "dir").mkdir()
    os.mkfifo(walled.work / "pipe")
    for path, error in (
        ("nope", errno.ENOENT),
        ("dir", errno.EISDIR),
        ("pipe", errno.EINVAL),
        ("f/x", errno.ENOENT),
    ):
        refused(error, client, READ, (1, path))
    refused(errno.EINVAL, client, READ, (1, b"a\0b"))
    refused(errno.EINVAL, client, READ)
    refused(errno.EINVAL, client, READ, (1, "f"), (2, b"short"))
    refused(errno.ENOTDIR, client, LIST, (1, "pipe"))
    for path in ("dir", "pipe"):
        with pytest.raises(AgentError):
            write(client, path, b"x")
    if os.geteuid() == 0:
        refused(errno.EACCES, client, READ, (1, "/etc/shadow"))
        with pytest.raises(AgentError) as caught:
            write(client, "/etc/ringfence-test", b"x")
        assert caught.value.errno == errno.EACCES
        assert not Path("/etc/ringfence-test").exists()


def test_list_stat_move_remove_mkdir(walled: Wall, client: Client) -> None:
    client.call(MKDIR, (1, "d/e/f"), (3, 1))
    client.call(MKDIR, (1, "d/e/f"), (3, 1))
    refused(errno.EEXIST, client, MKDIR, (1, "d"))
    client.call(MKDIR, (1, "secret"), (2, 0o700))
    assert (walled.work / "secret").stat().st_mode & 0o777 == 0o700
    write(client, "d/x", b"12345")
    os.symlink("nowhere", walled.work / "d/l")
    hostile = b"\xff\n" + b"n" * 253
    (Path(os.fsdecode(os.fsencode(walled.work / "d") + b"/" + hostile))).write_bytes(b"")
    found = listing(client, "d")
    assert set(found) == {b"e", b"x", b"l", hostile}
    assert number(found[b"x"][3]) == 5
    assert number(found[b"x"][2]) == 1
    assert number(found[b"l"][2]) == 3
    assert found[b"l"][8] == b"nowhere"
    assert set(listing(client, "d", (2, 5))) == {b"e", b"x", b"l", hostile, b"e/f"}
    assert len(listing(client, "d", (2, 5), (3, 2))) == 2
    assert numbers(client.call(STAT, (1, "d/l")))[2] == 3
    refused(errno.ENOENT, client, STAT, (1, "d/l"), (2, 1))
    client.call(MOVE, (1, "d/x"), (2, "y"))
    assert (walled.work / "y").read_bytes() == b"12345"
    write(client, "z", b"z")
    refused(errno.EEXIST, client, MOVE, (1, "y"), (2, "z"), (3, 1))
    refused(errno.ENOTEMPTY, client, REMOVE, (1, "d"))
    client.call(REMOVE, (1, "d"), (2, 1))
    assert not (walled.work / "d").exists()
    refused(errno.ENOENT, client, REMOVE, (1, "d"), (2, 1))
    client.call(REMOVE, (1, "d"), (2, 3))
    client.call(REMOVE, (1, "y"))


def test_remove_goes_deeper_than_any_path(walled: Wall, client: Client) -> None:
    script = "import os\nfor i in range(3000):\n os.mkdir('d'*8); os.chdir('d'*8)\n"
    channel = client.open(1, (1, "deep"), *argv("python3", "-c", script))
    client.reply(channel)
    while client.frame(channel).type != EVENT:
        pass
    assert listing(client, ".", (2, 10**6)), "listing ends at the longest path there can be"
    client.call(REMOVE, (1, "dddddddd"), (2, 1))
    assert os.listdir(walled.work) == []


def test_many_operations_at_once(walled: Wall, client: Client) -> None:
    write(client, "f", b"content")
    channels = [client.open(STAT, (1, "f")) for _ in range(200)]
    assert all(numbers(client.reply(channel))[3] == 7 for channel in channels)
    held = [client.open(READ, (1, "f"), (8, 0)) for _ in range(30)]  # nobody takes these: places stay taken
    for channel in held:
        client.send(CLOSE, channel)
    assert read(client, "f") == b"content"


def test_read_is_slowed_by_credit(walled: Wall, client: Client) -> None:
    (walled.work / "f").write_bytes(b"x" * 100_000)
    client.auto_credit = False
    channel = client.open(READ, (1, "f"), (8, 1000))
    client.reply(channel)
    frame = client.frame(channel)
    assert len(frame.payload) - 9 == 1000
    client.ping()
    assert not client.pending, "not a byte beyond the credit"
    client.credit(channel, 1, 99_000)
    got = 1000
    while got < 100_000:
        got += len(client.frame(channel).payload) - 9
    assert client.frame(channel).type == EOF


@pytest.mark.parametrize("operation", [READ, PACK])
@pytest.mark.parametrize("credit", [7_001, 61_440, 122_881, 400_000])
def test_what_waits_for_credit_is_kept_to_the_byte(
    walled: Wall, client: Client, operation: int, credit: int
) -> None:
    """The worker is ahead of what was sent, and its memory is used in turn."""
    content = random.Random(credit).randbytes(1_234_567)
    (walled.work / "f").write_bytes(content)
    client.auto_credit = False
    channels = [client.open(operation, (1, "f"), (8, credit)) for _ in range(3)]
    left, taken = list(channels), {channel: bytearray() for channel in channels}
    granted = dict.fromkeys(channels, 262_144 if operation == PACK else credit)
    for channel in channels:
        client.reply(channel)
    while left:
        for channel in list(left):
            while len(taken[channel]) < granted[channel] and channel in left:
                frame = client.frame(channel)
                taken[channel] += frame.payload[9:] if frame.type == DATA else b""
                if frame.type == EOF:
                    left.remove(channel)
            if channel in left:
                client.credit(channel, 1, credit)
                granted[channel] += credit
    for got in taken.values():
        if operation == PACK:
            with tarfile.open(fileobj=io.BytesIO(got)) as archive:
                assert archive.extractfile("f").read() == content  # type: ignore[union-attr]
        else:
            assert got == content


def test_watch(walled: Wall, client: Client) -> None:
    (walled.work / "sub").mkdir(mode=0o777)
    channel = client.open(WATCH, (1, "."), (2, 1))
    client.reply(channel)
    seen: set[tuple[bytes, int, int]] = set()

    def wait_for(*wanted: tuple[bytes, int, int]) -> None:
        while not set(wanted) <= seen:
            frame = client.frame(channel)
            assert frame.type == EVENT
            assert frame.payload[:2] == b"\x02\x00"
            event = dict(parse(frame.payload[2:]))
            seen.add((event[1], number(event[2]), number(event[3])))

    (walled.work / "f").write_bytes(b"x")
    wait_for((b"f", 1, 0), (b"f", 2, 0))
    (walled.work / "sub/g").write_bytes(b"x")
    wait_for((b"sub/g", 1, 0))
    (walled.work / "new").mkdir()
    (walled.work / "new").chmod(0o755)
    wait_for((b"new", 1, 1))
    client.ping()
    (walled.work / "new/h").write_bytes(b"x")
    wait_for((b"new/h", 1, 0))
    (walled.work / "f").rename(walled.work / "f2")
    wait_for((b"f", 5, 0), (b"f2", 5, 0))
    write(client, "w", b"atomically")
    wait_for((b"w", 2, 0))
    assert not any(path.startswith(b".rf-") for path, _, _ in seen), "the temporary file is not shown"
    (walled.work / "f2").unlink()
    wait_for((b"f2", 3, 0))
    client.send(CLOSE, channel)
    while client.frame(channel).type != CLOSE:
        pass
    refused(errno.ENOENT, client, WATCH, (1, "nope"))
    refused(errno.ENOTDIR, client, WATCH, (1, "sub/g"))
