"""What a hostile, broken or killed host can do: it costs the link it came on, and nothing else."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wall import (
    CLOSE,
    CREDIT,
    DATA,
    EOF,
    ERROR,
    EVENT,
    HEADER,
    HELLO,
    MAGIC,
    NONCE,
    OPEN,
    PING,
    PONG,
    REPLY,
    AgentError,
    Client,
    Wall,
    argv,
    fields,
    follow,
    number,
    numbers,
    parse,
    run,
    wall,
)

GREETING = fields((1, MAGIC), (2, 1), (3, NONCE), (4, "control"))


def frame(
    kind: int, channel: int, payload: bytes = b"", size: int | None = None, flags: int = 0, rest: int = 0
) -> bytes:
    """Any frame, right or wrong."""
    return HEADER.pack(len(payload) if size is None else size, channel, kind, flags, rest) + payload


def opening(operation: int, *items: object) -> bytes:
    """An OPEN's payload."""
    return struct.pack("<H", operation) + fields(*items)  # type: ignore[arg-type]


STDIN = opening(1, (1, "v"), *argv("cat"), (5, 2))

VIOLATIONS: dict[str, bytes] = {
    "too large": frame(DATA, 1, size=65_525),
    "huge": frame(DATA, 1, size=2**32 - 1),
    "unknown type": frame(12, 1),
    "type 0": frame(0, 0),
    "flags": frame(PING, 0, flags=1),
    "reserved": frame(PING, 0, rest=1),
    "second HELLO": frame(HELLO, 0, GREETING),
    "PING on a channel": frame(PING, 1),
    "PING too long": frame(PING, 0, b"x" * 65),
    "OPEN on channel 0": frame(OPEN, 0, opening(4)),
    "OPEN of an even id": frame(OPEN, 2, opening(4)),
    "OPEN twice": frame(OPEN, 1, STDIN) * 2,
    "OPEN without operation": frame(OPEN, 1, b"\1"),
    "field past the end": frame(OPEN, 1, struct.pack("<HBI", 4, 1, 100) + b"x"),
    "field of 4 GiB": frame(OPEN, 1, struct.pack("<HBI", 4, 1, 2**32 - 1) + b"x"),
    "half a field": frame(OPEN, 1, struct.pack("<H", 4) + b"\1\0"),
    "never opened": frame(CLOSE, 77),
    "even id never opened": frame(REPLY, 2),
    "empty DATA": frame(OPEN, 1, STDIN) + frame(DATA, 1, bytes(9)),
    "DATA on stream 1": frame(OPEN, 1, STDIN) + frame(DATA, 1, struct.pack("<BQ", 1, 0) + b"x"),
    "DATA with a gap": frame(OPEN, 1, STDIN) + frame(DATA, 1, struct.pack("<BQ", 0, 1) + b"x"),
    "DATA beyond credit": (
        frame(OPEN, 1, opening(1, (1, "v"), *argv("sleep", "1000"), (5, 2)))
        + b"".join(
            frame(DATA, 1, struct.pack("<BQ", 0, at) + b"x" * 10_000) for at in range(0, 150_000, 10_000)
        )
    ),
    "EOF at the wrong place": frame(OPEN, 1, STDIN) + frame(EOF, 1, struct.pack("<BQ", 0, 5)),
    "EOF twice": frame(OPEN, 1, STDIN) + frame(EOF, 1, struct.pack("<BQ", 0, 0)) * 2,
    "DATA after EOF": frame(OPEN, 1, STDIN)
    + frame(EOF, 1, struct.pack("<BQ", 0, 0))
    + frame(DATA, 1, struct.pack("<BQ", 0, 0) + b"x"),
    "CREDIT for stream 9": frame(OPEN, 1, STDIN) + frame(CREDIT, 1, struct.pack("<BI", 9, 1)),
    "short CREDIT": frame(OPEN, 1, STDIN) + frame(CREDIT, 1, b"\1"),
    "EVENT": frame(OPEN, 1, STDIN) + frame(EVENT, 1, b"\1\0"),
    "REPLY": frame(OPEN, 1, STDIN) + frame(REPLY, 1),
    "CLOSE with a payload": frame(OPEN, 1, STDIN) + frame(CLOSE, 1, b"x"),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_costs_its_own_link(walled: Wall, client: Client, what: str) -> None:
    hostile = walled.client()
    hostile.sock.sendall(VIOLATIONS[what])
    with pytest.raises(EOFError):
        hostile.until_closed()
    client.ping()
    assert run(client, "after", "echo", "fine").out[1] == b"fine\n"


HELLOS: dict[str, bytes] = {
    "anything before": frame(PING, 0),
    "OPEN before": frame(OPEN, 1, opening(4)),
    "other magic": frame(HELLO, 0, fields((1, b"RINGFENCE-LINK-2"), (2, 1), (3, NONCE))),
    "no magic": frame(HELLO, 0, fields((2, 1), (3, NONCE))),
    "no nonce": frame(HELLO, 0, fields((1, MAGIC), (2, 1))),
    "short nonce": frame(HELLO, 0, fields((1, MAGIC), (2, 1), (3, b"x"))),
    "version 0": frame(HELLO, 0, fields((1, MAGIC), (2, 0), (3, NONCE))),
    "torn fields": frame(HELLO, 0, GREETING[:-1]),
    "on a channel": frame(HELLO, 1, GREETING),
    "text": b"GET / HTTP/1.1\r\nHost: sandbox\r\n\r\n",
}


@pytest.mark.parametrize("what", HELLOS)
def test_a_wrong_hello_ends_the_link(walled: Wall, client: Client, what: str) -> None:
    hostile = walled.client(hello=False)
    hostile.sock.sendall(HELLOS[what])
    with pytest.raises(EOFError):
        hostile.receive()
    client.ping()


def test_hello(walled: Wall) -> None:
    link = walled.client(hello=False)
    link.send(HELLO, 0, GREETING + fields((200, b"unknown")))
    hello = dict(parse(link.receive().payload))
    assert hello[1] == MAGIC
    assert number(hello[2]) == 1
    assert hello[3] == NONCE
    assert number(hello[5]) == 1
    assert len(hello[6]) == 16
    assert number(hello[8]) == 1024
    other = walled.client()
    assert other.hello[6] == hello[6]


def test_frames_in_the_smallest_pieces(walled: Wall) -> None:
    link = walled.client(hello=False)
    data = (
        frame(HELLO, 0, GREETING)
        + frame(PING, 0, b"x")
        + frame(OPEN, 1, opening(1, (1, "a"), *argv("echo", "hi")))
    )
    for byte in data:
        link.sock.send(bytes([byte]))
    assert [link.receive().type for _ in range(3)] == [HELLO, PONG, REPLY]
    assert follow(link, 1).out[1] == b"hi\n"


def test_late_frames_are_dropped(client: Client) -> None:
    with pytest.raises(AgentError):
        client.call(2, (1, "nobody"))
    client.data(1, b"late")
    client.credit(1, 1, 5)
    client.send(CLOSE, 1)
    client.ping()


def test_at_most_64_links(walled: Wall) -> None:
    links = [walled.client() for _ in range(64)]
    one_more = walled.client(hello=False)
    with pytest.raises(EOFError):
        one_more.receive()
    links[0].close()
    for link in links[1:]:
        link.ping()
    while True:
        try:
            walled.client().ping()
            return
        except (EOFError, ConnectionError):
            continue


def test_at_most_1024_channels(client: Client) -> None:
    run(client, "cat", "true")
    held = client.open(1, (1, "long"), *argv("sleep", "1000"))
    client.reply(held)
    for _ in range(1023):
        client.reply(client.open(2, (1, "long"), (4, 1)))
    with pytest.raises(AgentError) as caught:
        client.call(4)
    assert caught.value.errno == errno.EMFILE
    client.send(CLOSE, held)
    assert client.frame(held).type == CLOSE
    client.call(4)


def test_descriptors_are_refused(walled: Wall, client: Client) -> None:
    read, write = os.pipe()
    link = walled.client()
    socket.send_fds(link.sock, [frame(PING, 0, b"x")], [write])
    assert link.receive().type == PONG
    os.close(write)
    assert os.read(read, 1) == b"", "nobody else holds the pipe"
    os.close(read)


def test_a_host_that_never_reads(walled: Wall, client: Client) -> None:
    """It is not served any further, and the others are."""
    deaf = walled.client()
    deaf.sock.settimeout(2)
    with pytest.raises(TimeoutError):
        deaf.sock.sendall(frame(PING, 0, b"x" * 64) * 500_000)
    client.ping()
    if "RINGFENCE_AGENT" not in os.environ:  # a sanitizer has memory of its own
        assert rss(walled) < 2_000_000


def rss(walled: Wall) -> int:
    """Private bytes of the agent."""
    with open(f"/proc/{walled.pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


def test_noise(walled: Wall, client: Client) -> None:
    """Random bytes and randomly damaged frames, many links at once."""
    chance = random.Random(7)
    good = frame(HELLO, 0, GREETING) + b"".join(
        frame(OPEN, 1 + 2 * i, opening(operation, (1, f"n{i}"), (2, "true"), (3, 5), (5, 3)))
        for i, operation in enumerate((1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 21, 23, 24, 25, 32, 33, 49, 99))
    )
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        link = walled.connect()
        link.sendall(bytes(data[: chance.randrange(len(data))]))
        link.close()
    client.ping()
    assert run(client, "after", "echo", "fine").out[1] == b"fine\n"


def test_output_flood_keeps_other_links_answering(walled: Wall, client: Client) -> None:
    flood = walled.client()
    channel = flood.open(1, (1, "flood"), *argv("sh", "-c", "cat /dev/zero & cat /dev/zero >&2"), (8, 2**31))
    flood.reply(channel)
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            if not flood.sock.recv(1 << 20):
                return

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        for i in range(20):
            client.ping()
            assert run(client, f"p{i}", "echo", "x").out[1] == b"x\n"
        client.call(3, (2, 9), (3, 2))
    finally:
        stop.set()
        flood.sock.shutdown(socket.SHUT_RDWR)
        reader.join(30)
    assert not reader.is_alive()


def test_fork_storm_keeps_the_agent_answering() -> None:
    """A bounded bomb: the limit is an rlimit of its own user, as in a jail without a delegated cgroup."""
    script = (
        "import os, resource, time\nresource.setrlimit(resource.RLIMIT_NPROC, (60, 60))\n"
        "end = time.time() + 200\n"
        "while time.time() < end:\n try: os.fork()\n except OSError: pass"
    )
    uid = 61234 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() != 0:
        pytest.skip("a bomb under the tester's own user would count its other processes")
    with wall(f"uid={uid}", f"gid={uid}") as walled:
        os.chown(walled.work, uid, uid)
        client = walled.client()
        bomb = client.open(1, (1, "bomb"), *argv("python3", "-c", script))
        client.reply(bomb)
        other = walled.client()
        while numbers(other.call(49))[1] < 55:  # the storm is at its limit
            pass
        for i in range(5):
            other.ping()
            assert number(dict(parse(other.call(19, (1, "."))))[2]) == 2
            assert run(other, f"p{i}", "true").exit
        other.call(3, (2, 9), (3, 2))
        follow(client, bomb)
        while numbers(other.call(49))[1] > 2:
            pass


@pytest.mark.skipif("RINGFENCE_AGENT" in os.environ, reason="a sanitizer takes more memory than this leaves")
def test_memory_failure_costs_the_operation_only() -> None:
    """With hardly any memory for itself the agent refuses, and goes on."""
    with wall(prefix=("prlimit", "--data=560000:560000")) as walled:
        client = walled.client()
        refused = 0
        for i in range(300):
            channel = client.open(1, (1, f"{i}" + "x" * 40), *argv("sleep", "1000" + "0" * 20_000), (5, 2))
            kind = client.frame(channel).type
            assert kind in (REPLY, ERROR)
            refused += kind == ERROR
        assert refused
        client.ping()
        client.close()  # what it held is free again
        while True:
            try:
                walled.client().call(3, (2, 9), (3, 2))
                return
            except (AgentError, EOFError, ConnectionError):
                assert walled.alive()


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup of 48 MiB without swap, for a bomb to go off in."""
    top = Path("/sys/fs/cgroup/memory")
    if not os.access(top / "cgroup.procs", os.W_OK):
        pytest.skip("no memory cgroup of version 1 can be made here")
    group = top / f"ringfence-agent-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(48 << 20))
        yield group
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.01)
        group.rmdir()


def test_memory_pressure_kills_the_command_and_not_the_agent(memory_cgroup: Path) -> None:
    joined = os.open(memory_cgroup / "cgroup.procs", os.O_WRONLY)
    try:
        with wall(f"cgroup={joined}") as walled:
            client, other = walled.client(), walled.client()
            for i in range(3):
                channel = client.open(1, (1, f"bomb{i}"), *argv("python3", "-c", "x = bytearray(200 << 20)"))
                client.reply(channel)
                other.ping()
                assert number(dict(parse(other.call(19, (1, "."))))[2]) == 2
                assert follow(client, channel).exit[2] == 9
            assert run(client, "after", "echo", "fine").out[1] == b"fine\n"
    finally:
        os.close(joined)


def test_frames_right_behind_the_hello_are_answered_after_it() -> None:
    with wall() as walled:
        client = walled.client(hello=False)
        start = opening(1, (1, "behind"), *argv("echo", "hi"))
        client.sock.sendall(frame(HELLO, 0, GREETING) + frame(OPEN, 1, start))
        assert client.receive().type == HELLO
        client.reply(1)
        ended = follow(client, 1)
        assert (ended.code, bytes(ended.out[1])) == (0, b"hi\n")


@pytest.mark.skipif("RINGFENCE_AGENT" in os.environ, reason="AddressSanitizer does not live without memory")
def test_who_dials_while_there_is_no_memory_waits_for_it(walled: Wall) -> None:
    client = walled.client()
    before = resource.prlimit(walled.pid, resource.RLIMIT_AS)
    resource.prlimit(walled.pid, resource.RLIMIT_AS, (1, before[1]))
    waiting = [walled.connect() for _ in range(63)]
    try:
        for _ in range(16):  # each a turn of its loop, in which it accepts up to 8
            client.ping()
        # Control: it was out of memory before it had accepted all.
        assert len(os.listdir(f"/proc/{walled.pid}/fd")) < 63
        assert not select.select(waiting, [], [], 0)[0], "it was closed"
    finally:
        resource.prlimit(walled.pid, resource.RLIMIT_AS, before)
    for sock in waiting:
        Client(sock).close()
