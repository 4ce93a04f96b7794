"""Dialling ports of the sandbox, and listening on its loopback."""

from __future__ import annotations

import errno
import os
import struct
import subprocess

import pytest
from wall import (
    CLOSE,
    CREDIT,
    DATA,
    EOF,
    ERROR,
    OPEN,
    REPLY,
    AgentError,
    Client,
    Frame,
    Wall,
    argv,
    follow,
    number,
    parse,
    run,
)

DIAL, LISTEN, ACCEPTED = 32, 33, 34


@pytest.fixture
def network(walled: Wall, client: Client) -> None:
    """Loopback of the wall's own network namespace, up."""
    spaces = ["--net"] if os.geteuid() == 0 else ["--user", "--net", "--preserve-credentials"]
    subprocess.run(
        ["nsenter", f"--target={walled.pid}", *spaces, "ip", "link", "set", "lo", "up"],
        check=True,
        timeout=120,
    )


def receive(client: Client, channel: int, until: int) -> bytes:
    """DATA of stream 0 up to a frame of this type."""
    got = b""
    while True:
        frame = client.frame(channel)
        if frame.type == DATA:
            assert struct.unpack_from("<BQ", frame.payload) == (0, len(got))
            got += frame.payload[9:]
        if frame.type == until:
            return got
        assert frame.type in (DATA, CREDIT), frame


SERVER = """
import socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(('127.0.0.1', 7000)); s.listen(8); print('up', flush=True)
while True:
    c, _ = s.accept()
    data = b''
    while piece := c.recv(65536): data += piece
    c.sendall(data[::-1]); c.close()
"""


@pytest.mark.usefixtures("network")
def test_dial(client: Client) -> None:
    server = client.open(1, (1, "server"), *argv("python3", "-c", SERVER))
    client.reply(server)
    assert client.frame(server).payload[9:] == b"up\n"
    for data in (b"hello", b"x" * 50_000 + b"y"):
        channel = client.open(DIAL, (1, 7000))
        client.reply(channel)
        end = client.data(channel, data)
        client.eof(channel, end)
        assert receive(client, channel, EOF) == data[::-1]
        assert client.frame(channel).type == CLOSE
        client.send(CLOSE, channel)
    for fields, error in (
        (((1, 7001),), errno.ECONNREFUSED),
        (((1, 7000), (2, "10.0.0.1")), errno.EACCES),
        (((1, 7000), (2, "0.0.0.0")), errno.EACCES),
        (((1, 7000), (2, "::2")), errno.EACCES),
        (((1, 7000), (2, "localhost")), errno.EACCES),
        (((1, 70000),), errno.EINVAL),
        ((), errno.EINVAL),
    ):
        with pytest.raises(AgentError) as caught:
            client.call(DIAL, *fields)
        assert caught.value.errno == error


@pytest.mark.usefixtures("network")
def test_listen(walled: Wall, client: Client) -> None:
    listener = client.open(LISTEN, (1, 0))
    port = number(dict(parse(client.reply(listener)))[1])
    script = (
        f"import socket\ns = socket.create_connection(('127.0.0.1', {port}))\n"
        "s.sendall(b'ask')\nprint(s.recv(99).decode(), end='')"
    )
    user = client.open(1, (1, "user"), *argv("python3", "-c", script))
    client.reply(user)
    opened = client.frame(2)
    assert opened.type == OPEN
    assert struct.unpack_from("<H", opened.payload) == (ACCEPTED,)
    told = {tag: number(value) for tag, value in parse(opened.payload[2:])}
    assert told[1] == listener
    assert told[2] > 0
    assert told[3] == int(run(client, "id", "id", "-u").out[1])
    client.send(REPLY, 2)
    client.data(2, b"answer")
    assert client.frame(2).payload[9:] == b"ask"
    client.eof(2, 6)
    assert bytes(follow(client, user).out[1]) == b"answer"
    assert receive(client, 2, EOF) == b""
    assert client.frame(2).type == CLOSE
    refused = client.open(1, (1, "refused"), *argv("python3", "-c", script))
    client.reply(refused)
    opened = client.frame(4)
    client.send(ERROR, 4, struct.pack("<I", errno.EACCES) + b"no")
    ended = follow(client, refused)
    assert b"ConnectionReset" in ended.out[2]
    client.send(CLOSE, listener)
    assert client.frame(listener).type == CLOSE
    late = run(client, "late", "python3", "-c", script)
    assert b"ConnectionRefused" in late.out[2]


@pytest.mark.usefixtures("network")
def test_a_lost_link_takes_its_ports_along(walled: Wall, client: Client) -> None:
    other = walled.client()
    channel = other.open(LISTEN, (1, 7100))
    other.reply(channel)
    with pytest.raises(AgentError) as caught:
        client.call(LISTEN, (1, 7100))
    assert caught.value.errno == errno.EADDRINUSE
    other.close()
    while True:
        channel = client.open(LISTEN, (1, 7100))
        frame = client.frame(channel)
        if frame.type == REPLY:
            return
        assert frame.errno == errno.EADDRINUSE


HOSTILE_NAME = "evil\n\x1b]0;" + "A" * 4096
HOSTILE = """
printf 'a\\033b\\tc' > /proc/$$/comm
exec 3<> /dev/tcp/127.0.0.1/PORT
echo $$
read -u 3 x
"""


def who(frame: Frame) -> dict[int, bytes]:
    """What the guest says about a connection."""
    assert frame.type == OPEN, frame
    return dict(parse(frame.payload[2:]))


@pytest.mark.usefixtures("network")
def test_who_connected_is_told_within_bounds(client: Client) -> None:
    listener = client.open(LISTEN, (1, 0))
    port = number(dict(parse(client.reply(listener)))[1])
    plain = f"import os, socket; s = socket.create_connection(('127.0.0.1', {port})); s.recv(1)"
    user = client.open(1, (1, "plain"), *argv("python3", "-c", plain))
    pid = number(dict(parse(client.reply(user)))[1])
    told = who(client.frame(2))
    assert number(told[6]) == pid
    assert told[8] == b"python3"
    assert told[7].startswith(b"python")
    client.send(ERROR, 2, struct.pack("<I", errno.EACCES))
    follow(client, user)
    script = HOSTILE.replace("PORT", str(port))
    start = f"import os; os.execv('/bin/bash', [{HOSTILE_NAME!r}, '-c', {script!r}])"
    user = client.open(1, (1, "hostile"), *argv("python3", "-c", start))
    client.reply(user)
    told = who(client.frame(4))
    assert told[7] == b"a\x1bb\tc"
    assert told[8] == HOSTILE_NAME.encode()[:256]
    client.send(ERROR, 4, struct.pack("<I", errno.EACCES))
    assert int(follow(client, user).out[1].split()[0]) == number(told[6])


@pytest.mark.usefixtures("network")
def test_a_flood_of_connections_is_handed_over_whole(client: Client) -> None:
    """Looking who asked takes a bounded time: in a flood some go unnamed, but none is lost."""
    listener = client.open(LISTEN, (1, 0), (2, 512))
    port = number(dict(parse(client.reply(listener)))[1])
    many = 300
    flood = (
        f"import socket\nheld = [socket.create_connection(('127.0.0.1', {port})) for _ in range({many})]\n"
        "print(sum(len(s.recv(1)) for s in held))"
    )
    user = client.open(1, (1, "flood"), *argv("python3", "-c", flood))
    pid = number(dict(parse(client.reply(user)))[1])
    named = 0
    for channel in range(2, 2 * many + 2, 2):
        told = who(client.frame(channel))
        assert number(told[1]) == listener
        if 6 in told:
            named += 1
            assert number(told[6]) == pid
        client.send(REPLY, channel)
        client.data(channel, b"x")
    assert 1 <= named <= many
    assert follow(client, user).out[1].strip() == b"%d" % many
