"""Identity and life of the sandbox: bind, stats, quiesce and wake, shutdown, and links over one stream."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
from pathlib import Path

import pytest
from wall import (
    DATA,
    HEADER,
    HELLO,
    MAGIC,
    OPEN,
    PING,
    PONG,
    REPLY,
    USER,
    AgentError,
    Client,
    Wall,
    agent_path,
    argv,
    fields,
    follow,
    number,
    numbers,
    parse,
    run,
    wall,
)

BIND, STATS, QUIESCE, SHUTDOWN = range(48, 52)
STDIN, DETACHED = 2, 32


def test_bind(client: Client) -> None:
    client.call(BIND, (1, "TOKEN=abc"), (3, "named"), (4, b"seed" * 8))
    assert run(client, "a", "sh", "-c", "echo $TOKEN; uname -n").out[1] == b"abc\nnamed\n"
    for items, what in (
        (((1, "novalue"),), "env"),
        (((1, "=x"),), "env"),
        (((5, 10**9),), "time"),
        (((3, "x" * 65),), "hostname"),
        (((1, "TOKEN=changed"), (2, fields((1, "../evil"), (2, b"x")))), "secret"),
        (((1, "TOKEN=changed"), (2, fields((1, ""), (2, b"x")))), "secret"),
    ):
        with pytest.raises(AgentError) as caught:
            client.call(BIND, *items)
        assert caught.value.text.startswith(what)
    assert run(client, "b", "sh", "-c", "echo $TOKEN").out[1] == b"abc\n", (
        "a bind that failed changed nothing"
    )


def test_secrets() -> None:
    """In memory, readable by the workload alone; a second bind replaces them."""
    if os.geteuid() != 0:
        pytest.skip("/run of the host is not this user's")
    hide = (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        'mount -t tmpfs none /run && exec "$@"',
        "-",
    )
    with wall(prefix=hide) as walled:
        client = walled.client()
        for value in (b"one\0\xff", b"two"):
            client.call(BIND, (2, fields((1, "key.pem"), (2, value))), (2, fields((1, "other"), (2, b""))))
            script = "cd /run/secrets; cat key.pem; stat -c ' %a %u' key.pem; stat -f -c %T .; stat -c %a ."
            ended = run(client, value.hex(), "sh", "-c", script)
            assert bytes(ended.out[1]) == value + b" 400 %d\ntmpfs\n700\n" % USER


def test_stats(walled: Wall, client: Client) -> None:
    walled.client()
    channel = client.open(1, (1, "a"), *argv("sleep", "1000"))
    client.reply(channel)
    stats = numbers(client.call(STATS))
    assert stats[1] == 2
    assert stats[2] > 100_000
    assert stats[4] > 0
    assert stats[5] == 2
    assert stats[6] == 2


def wake(walled: Wall) -> None:
    """From outside, as a driver does."""
    os.kill(walled.pid, signal.SIGUSR1)


def again(walled: Wall) -> Client:
    """Dial until the agent answers."""
    while True:
        try:
            return walled.client()
        except (EOFError, ConnectionError):
            continue


def test_quiesce_and_wake(walled: Wall, client: Client) -> None:
    channel = client.open(1, (1, "cat"), *argv("cat"), (5, STDIN))
    client.reply(channel)
    client.data(channel, b"before ")
    assert client.frame(channel).payload[9:] == b"before "
    first = client.hello
    other = walled.client()
    assert numbers(other.call(QUIESCE, (1, 25_000)))[1] == 1
    for link in (client, other):
        with pytest.raises(EOFError):
            link.until_closed()
    waiting = walled.connect()  # stays in the backlog: nobody answers during the sleep
    waiting.settimeout(0.2)
    waiting.sendall(HEADER.pack(0, 0, PING, 0, 0))
    with pytest.raises(TimeoutError):
        waiting.recv(1)
    waiting.close()
    wake(walled)
    client = again(walled)
    assert number(client.hello[5]) == 2
    assert client.hello[6] != first[6]
    channel = client.open(2, (1, "cat"), (2, 7))
    reply = numbers(client.reply(channel))
    assert (reply[2], reply[4]) == (7, 7), "ids and offsets hold"
    end = client.data(channel, b"after", 7)
    client.eof(channel, end)
    assert follow(client, channel).out[1] == b"after"


def test_a_wake_that_comes_while_it_still_falls_asleep(walled: Wall) -> None:
    for turn in range(30):
        client = again(walled)
        assert number(client.hello[5]) == 1 + turn
        client.call(QUIESCE, (1, 25_000))
        wake(walled)  # the links are not closed yet, or are: both happen
        with pytest.raises(EOFError):
            client.until_closed()
    assert number(again(walled).hello[5]) == 31


def test_a_signal_from_inside_does_not_wake_or_end(walled: Wall, client: Client) -> None:
    run(client, "a", "sh", "-c", "for s in 1 2 3 10 12 13 14 15 17 18 20; do kill -$s 1; done; exit 0")
    client.ping()
    assert number(walled.client().hello[5]) == 1


def test_wake_by_descriptor() -> None:
    read, write = os.pipe()
    with wall(f"wake={read}") as walled:
        os.close(read)
        client = walled.client()
        client.call(QUIESCE, (1, 25_000))
        with pytest.raises(EOFError):
            client.receive()
        os.close(write)
        assert number(again(walled).hello[5]) == 2


def test_shutdown(walled: Wall) -> None:
    """SIGTERM first, so that who listens may end well; SIGKILL for the others; then the agent exits 0."""
    # Who listens has more time than any machine stands still; who does not is waited for in vain.
    for trap, grace in (("trap 'echo bye; exit 5' TERM", 25_000), ("trap '' TERM", 2000)):
        with wall() as other:
            client = other.client()
            script = f"{trap}; echo up; while :; do sleep 0.05; done"
            channel = client.open(1, (1, "a"), *argv("sh", "-c", script))
            client.reply(channel)
            assert client.frame(channel).payload[9:] == b"up\n"
            client.call(SHUTDOWN, (1, grace))
            ended = follow(client, channel)
            if "bye" in trap:
                assert bytes(ended.out[1]) == b"bye\n"
                assert ended.code == 5
            else:
                assert ended.exit[2] == 9
            assert other.process.wait(120) == 0
    assert walled.alive()


def test_sigterm_from_outside_shuts_down() -> None:
    with wall() as walled:
        client = walled.client()
        channel = client.open(1, (1, "a"), *argv("sleep", "1000"))
        client.reply(channel)
        os.kill(walled.pid, signal.SIGTERM)
        assert walled.process.wait(120) == 0


def test_it_must_be_process_1_and_well_called() -> None:
    for arguments in (
        ["listen=/tmp/x", "uid=1", "gid=1"],
        ["listen=3"],
        [],
        ["bogus"],
        ["uid=x", "gid=1", "listen=3"],
    ):
        ended = subprocess.run([agent_path(), *arguments], capture_output=True, timeout=120, check=False)
        assert ended.returncode == 125
        assert ended.stderr.startswith(b"ringfence-agent: ")


def test_it_can_bind_its_socket_itself(tmp_path: Path) -> None:
    """As behind walls that can't inherit descriptors; the socket is gone during a sleep."""
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.is_relative_to("/tmp/rf-agent-base") or str(folder).startswith("/tmp/pytest"):
            folder.chmod(0o755)
    path = tmp_path / "guest.sock"
    with wall(f"listen={path}") as walled:
        walled.path = str(path)
        while not path.exists():
            assert walled.alive()
        client = again(walled)
        client.call(QUIESCE, (1, 25_000))
        with pytest.raises(EOFError):
            client.receive()
        while path.exists():
            pass
        wake(walled)
        while not path.exists():
            pass
        assert number(again(walled).hello[5]) == 2


def resync(sock: socket.socket, nonce: bytes) -> Client:
    """What a new host does on a stream that it can't know the state of."""
    sock.sendall(bytes(65_536))
    body = fields((1, MAGIC), (2, 1), (3, nonce), (4, "stream"))
    sock.sendall(HEADER.pack(len(body), 0, HELLO, 0, 0) + body)
    pattern = struct.pack("<BI", 1, 16) + MAGIC
    got = b""
    while True:
        got += sock.recv(1 << 16)
        at = got.find(pattern)
        while at >= 0:
            size = struct.unpack_from("<I", got, at - 12)[0]
            if len(got) < at + size:
                break
            hello = dict(parse(got[at : at + size]))
            if hello[3] == nonce:
                client = Client(sock, hello=False)
                client.buffer = got[at + size :]
                client.hello = hello
                return client
            at = got.find(pattern, at + 1)


def test_a_single_stream_is_resynchronised() -> None:
    ours, theirs = socket.socketpair()
    with wall(f"stream={theirs.fileno()}") as walled:
        theirs.close()
        ours.settimeout(120)
        client = resync(ours, b"A" * 16)
        channel = client.open(1, (1, "cat"), *argv("cat"), (5, STDIN))
        client.reply(channel)
        client.data(channel, b"first")
        assert client.frame(channel).payload[9:] == b"first"
        full = struct.pack("<BQ", 0, 5) + b"z" * 65_515
        for cut in (1, 11, 12, 13, 40, 65_000):  # a host that dies anywhere in a frame
            ours.sendall((HEADER.pack(len(full), channel, DATA, 0, 0) + full)[:cut])
            client = resync(ours, bytes([cut % 256]) * 16)
            client.ping()
        for noise in (os.urandom(5000), HEADER.pack(0, 9, 99, 0, 0), b"RINGFENCE-LINK-1" * 3):
            ours.sendall(noise)
            client = resync(ours, os.urandom(16))
            client.ping()
        channel = client.open(2, (1, "cat"), (2, 0))
        taken = numbers(client.reply(channel))[4]
        client.eof(channel, taken)
        assert bytes(follow(client, channel).out[1])[:5] == b"first"
        assert walled.alive()
    ours.close()


def test_a_stream_and_a_listener_at_once() -> None:
    ours, theirs = socket.socketpair()
    with wall(f"stream={theirs.fileno()}") as walled:
        theirs.close()
        ours.settimeout(120)
        stream = resync(ours, b"B" * 16)
        client = walled.client()
        stream.send(OPEN, 1, struct.pack("<H", 1) + fields((1, "a"), *argv("true"), (5, DETACHED)))
        assert stream.receive().type == REPLY
        client.reply(client.open(2, (1, "a")))
        stream.send(PING, 0, b"x")
        assert stream.receive().type == PONG
        ours.close()
        client.ping()
        assert walled.alive()
