"""Datagrams of a port of loopback: questions for names, mostly. And what a flood of them does: nothing."""

from __future__ import annotations

import errno
import os
import struct
import subprocess

import pytest
from wall import CLOSE, CREDIT, DATA, AgentError, Client, Wall, argv, follow, number, parse, run

DATAGRAMS = 35
MOST = 4096


@pytest.fixture(autouse=True)
def network(walled: Wall, client: Client) -> None:
    """Loopback of the wall's own network namespace, up."""
    spaces = ["--net"] if os.geteuid() == 0 else ["--user", "--net", "--preserve-credentials"]
    subprocess.run(
        ["nsenter", f"--target={walled.pid}", *spaces, "ip", "link", "set", "lo", "up"],
        check=True,
        timeout=120,
    )


def port_of(client: Client, channel: int) -> int:
    return number(dict(parse(client.reply(channel)))[1])


def record(asker: int, data: bytes) -> bytes:
    """A datagram as it travels on the channel."""
    return struct.pack("<II", len(data), asker) + data


class Records:
    """The guest's records, cut out of DATA frames."""

    def __init__(self, client: Client, channel: int) -> None:
        self.client, self.channel = client, channel
        self.held, self.position = b"", 0

    def next(self) -> tuple[int, bytes]:
        """The next one: number and bytes."""
        while True:
            if len(self.held) >= 8:
                size, asker = struct.unpack_from("<II", self.held)
                if len(self.held) >= 8 + size:
                    data, self.held = self.held[8 : 8 + size], self.held[8 + size :]
                    return asker, data
            frame = self.client.frame(self.channel)
            if frame.type == CREDIT:
                continue
            assert frame.type == DATA, frame
            assert struct.unpack_from("<BQ", frame.payload) == (0, self.position)
            self.held += frame.payload[9:]
            self.position += len(frame.payload) - 9


ASK = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60 if len(sys.argv) > 3 else 1)
for word in sys.argv[2:]:
    for _ in range(60):
        s.sendto(word.encode(), ("127.0.0.1", int(sys.argv[1])))
        try:
            print(s.recv(5000).decode(), flush=True)
            break
        except TimeoutError:
            continue  # it was dropped
"""


def test_questions_and_answers(client: Client) -> None:
    channel = client.open(DATAGRAMS, (1, 0))
    port = port_of(client, channel)
    asker = client.open(1, (1, "asker"), *argv("python3", "-c", ASK, str(port), "one", "two"))
    client.reply(asker)
    records = Records(client, channel)
    number_1, data = records.next()
    assert data == b"one"
    # An answer to a question that nobody asked goes nowhere; a record that comes in parts is put together.
    answers = record(number_1 + 17, b"nobody") + record(number_1, b"answer 1")
    end = client.data(channel, answers[:5])
    end = client.data(channel, answers[5:], end)
    number_2, data = records.next()
    assert (data, number_2) == (b"two", number_1 + 1)
    client.data(channel, record(number_2, b"answer 2"), end)
    assert bytes(follow(client, asker).out[1]) == b"answer 1\nanswer 2\n"
    client.send(CLOSE, channel)
    assert client.frame(channel).type == CLOSE


def test_long_ones_are_dropped_and_odd_ports_refused(client: Client) -> None:
    channel = client.open(DATAGRAMS, (1, 7200))
    assert port_of(client, channel) == 7200
    script = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"for size in ({MOST + 1}, 60000, {MOST}, 0): s.sendto(b'x' * size, ('127.0.0.1', 7200))"
    )
    assert run(client, "long", "python3", "-c", script).code == 0
    records = Records(client, channel)
    assert [len(records.next()[1]) for _ in range(2)] == [MOST, 0]
    for fields, error in (
        (((1, 70000),), errno.EINVAL),
        (((1, b"x"),), errno.EINVAL),
        (((1, 7200),), errno.EADDRINUSE),
    ):
        with pytest.raises(AgentError) as caught:
            client.call(DATAGRAMS, *fields)
        assert caught.value.errno == error


def test_a_flood_is_dropped_and_does_not_fill_the_agent(client: Client, walled: Wall) -> None:
    channel = client.open(DATAGRAMS, (1, 7300))
    port_of(client, channel)
    client.auto_credit = False
    script = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for n in range(20000): s.sendto(b'%06d' % n * 100, ('127.0.0.1', 7300))"
    )
    other = walled.client()
    assert run(other, "flood", "python3", "-c", script).code == 0
    client.ping()  # the answer comes behind what was sent before
    got = sum(len(frame.payload) - 9 for frame in client.pending)
    assert all((frame.channel, frame.type) == (channel, DATA) for frame in client.pending)
    # We gave no credit back: what came is bounded by the window, the kernel keeps a little, the rest is gone.
    assert 20_000 < got <= 262_144, got
    client.credit(channel, 0, got)
    client.auto_credit = True
    asker = other.open(1, (1, "asker"), *argv("python3", "-c", ASK, "7300", "still"))
    other.reply(asker)
    records = Records(client, channel)
    while (found := records.next())[1] != b"still":
        assert len(found[1]) == 600
    client.data(channel, record(found[0], b"yes"))
    assert bytes(follow(other, asker).out[1]) == b"yes\n"


def test_a_record_that_is_too_long_costs_the_link(client: Client, walled: Wall) -> None:
    channel = client.open(DATAGRAMS, (1, 0))
    port_of(client, channel)
    client.data(channel, struct.pack("<II", MOST + 1, 1))
    with pytest.raises(EOFError):
        client.until_closed()
    assert run(walled.client(), "id", "true").code == 0  # and nothing else


def test_old_askers_are_forgotten(client: Client) -> None:
    """More askers than places: the newest are answered, and nobody gets another one's answer."""
    channel = client.open(DATAGRAMS, (1, 7400))
    port_of(client, channel)
    script = """
import socket
socks = []
for n in range(400):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(60)
    s.sendto(b'%d' % n, ('127.0.0.1', 7400)); socks.append(s)
    if n % 20 == 19: input()
got = [s.recv(99) for s in socks[-100:]]
print(got == [b'%d' % n for n in range(300, 400)])
"""
    asker = client.open(1, (1, "asker"), (5, 2), *argv("python3", "-c", script))
    client.reply(asker)
    records, found, typed = Records(client, channel), [], 0
    for _ in range(20):
        found += [records.next() for _ in range(20)]
        typed = client.data(asker, b"\n", typed)
    client.data(channel, b"".join(record(number, data) for number, data in found))
    assert bytes(follow(client, asker).out[1]) == b"True\n"
