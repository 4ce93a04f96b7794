"""Many links over one stream, with both real ends: nothing is lost, nobody waits for a neighbour, and a host
process that is killed in the middle of a frame costs the open links and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import socket
import threading
from pathlib import Path

import pytest
from ends import MuxedAgent, eventually, linked, muxed_agent, muxing
from wall import DATA, EOF, Client, argv, follow, numbers, parse, run


def write_file(client: Client, path: str, content: bytes) -> None:
    """Upload by file.write, under the credit that comes."""
    channel = client.open(17, (1, path))
    sent, credit = 0, 65536
    while sent < len(content):
        while credit == 0:
            frame = client.receive()
            if frame.channel == channel and frame.type == 6:
                credit += int.from_bytes(frame.payload[1:5], "little")
        piece = content[sent : sent + min(credit, 30_000)]
        client.send(DATA, channel, bytes([0]) + sent.to_bytes(8, "little") + piece)
        sent += len(piece)
        credit -= len(piece)
    client.send(EOF, channel, bytes([0]) + sent.to_bytes(8, "little"))
    while (frame := client.frame(channel)).type == 6:
        pass  # credit for what was sent meanwhile
    assert frame.type == 3
    assert numbers(frame.payload)[1] == len(content)


def read_file(client: Client, path: str) -> bytes:
    """Download by file.read."""
    channel = client.open(16, (1, path))
    client.reply(channel)
    return follow(client, channel).out[1]


def test_one_link_does_all_that_a_link_does() -> None:
    with muxed_agent() as agent, linked(agent.host) as link:
        client = link.client()
        client.ping()
        assert run(client, "a", "echo", "hello").out[1] == b"hello\n"


def test_many_links_carry_large_files_at_once() -> None:
    contents = {f"f{i}": random.Random(i).randbytes(700_000 + i) for i in range(8)}
    with muxed_agent() as agent, linked(agent.host) as link:
        found: dict[str, bytes] = {}

        def both_ways(name: str) -> None:
            client = link.client()
            write_file(client, name, contents[name])
            found[name] = read_file(client, name)

        threads = [threading.Thread(target=both_ways, args=(name,)) for name in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {name: hashlib.sha256(data).digest() for name, data in found.items()} == {
            name: hashlib.sha256(data).digest() for name, data in contents.items()
        }


def test_64_links_and_the_65th_is_closed() -> None:
    with muxed_agent() as agent, linked(agent.host) as link:
        links = [link.client() for _ in range(64)]
        with pytest.raises((EOFError, ConnectionError)):
            link.client()
        for each in links:
            each.ping()
        links.pop().sock.close()

        def another() -> bool:
            try:
                link.client().ping()
            except (EOFError, ConnectionError):
                return False
            return True

        eventually(another, "no link after one was closed")


def test_numbers_and_memory_come_back() -> None:
    with muxed_agent() as agent, linked(agent.host) as link:
        held = link.client()
        for _ in range(300):
            link.client().sock.close()
        held.ping()
        eventually(lambda: numbers(held.call(49))[6] == 1, "links stay in the agent")


def test_one_that_does_not_read_keeps_nobody_waiting() -> None:
    with muxed_agent() as agent, linked(agent.host) as link:
        slow = link.client()
        slow.open(1, (1, "flood"), *argv("cat", "/dev/zero"), (8, 1 << 24))
        select.select([slow.sock], [], [], 30)
        other = link.client()
        for _ in range(50):
            other.ping()
        assert run(other, "b", "echo", "quick").out[1] == b"quick\n"
        stats = Path(f"/proc/{link.process.pid}/status").read_text()
        (resident,) = (int(line.split()[1]) for line in stats.splitlines() if line.startswith("VmRSS"))
        assert resident < 16_000, "kilobytes: what a slow reader costs is bounded"
        other.call(3, (1, "flood"), (2, 9))


def test_a_host_that_does_not_read_at_all_is_waited_for() -> None:
    """The stream itself stalls: nothing is dropped."""
    with muxed_agent() as agent, linked(agent.host) as link:
        client = link.client()
        (agent.work / "big").write_bytes(content := random.Random(1).randbytes(3_000_000))
        os.kill(link.process.pid, signal.SIGSTOP)
        channel = client.open(16, (1, "big"))
        os.kill(link.process.pid, signal.SIGCONT)
        client.reply(channel)
        assert follow(client, channel).out[1] == content


def cut(frame: bytes) -> list[int]:
    """Places to stop in the middle of a frame: in every part of it."""
    return [
        1,
        2,
        3,
        4,
        7,
        8,
        9,
        len(frame) // 2,
        len(frame) - 5,
        len(frame) - 4,
        len(frame) - 3,
        len(frame) - 1,
    ]


@pytest.mark.parametrize("place", range(12))
def test_a_host_that_dies_in_the_middle_of_a_frame_costs_the_open_links_and_nothing_else(place: int) -> None:
    with muxed_agent() as agent:
        with linked(agent.host) as first:
            client = first.client()
            channel = client.open(1, (1, "keep"), *argv("cat"), (5, 2))
            client.reply(channel)
            client.data(channel, b"before\n")
            eventually(lambda: b"before\n" in client.frame(channel).payload, "no echo")
            first.kill()
        # What the killed process had begun to write: stdin of the command, cut off.
        inner = (9 + 4000).to_bytes(4, "little") + channel.to_bytes(4, "little") + bytes([DATA, 0, 0, 0])
        inner += bytes([0]) + (7).to_bytes(8, "little") + b"X" * 4000
        whole = muxing.frame(muxing.DATA, 1, inner)
        agent.host.setblocking(True)
        agent.host.sendall(whole[: cut(whole)[place]])
        with linked(agent.host) as second:
            client = second.client()
            assert numbers(client.call(49))[6] == 1, "the links of before are gone"
            channel = client.open(2, (1, "keep"), (2, 0))
            assert numbers(client.reply(channel))[4] == 7, "stdin has taken what was whole, no more"
            client.data(channel, b"after\n", offset=7)
            client.send(EOF, channel, bytes([0]) + (13).to_bytes(8, "little"))
            assert follow(client, channel).out[1] == b"before\nafter\n"


def test_killed_again_and_again_under_load() -> None:
    random_bytes = random.Random(7)
    with muxed_agent() as agent:
        (agent.work / "big").write_bytes(random_bytes.randbytes(2_000_000))
        with linked(agent.host) as link:
            client = link.client()
            client.reply(client.open(1, (1, "alive"), *argv("sleep", "1000")))
            link.kill()
        for _ in range(12):
            with linked(agent.host) as link:
                clients = [link.client() for _ in range(4)]
                for client in clients:
                    client.auto_credit = False
                    client.open(16, (1, "big"), (8, 1 << 22))
                    client.open(17, (1, "upload"))
                    client.send(DATA, 3, bytes(9) + random_bytes.randbytes(60_000))
                for _ in range(random_bytes.randrange(12)):
                    clients[0].sock.recv(random_bytes.randrange(1, 100_000))
                link.kill()
        with linked(agent.host) as link:
            client = link.client()
            assert parse(client.call(4)), "the command is known still"
            assert run(client, "after", "echo", "fine").out[1] == b"fine\n"
            eventually(lambda: numbers(client.call(49))[6] == 1, "links of killed hosts stay")
            assert not (agent.work / "upload").exists(), "half an upload was taken for a whole one"


def test_a_sleep_ends_the_links_and_the_next_epoch_is_found() -> None:
    with muxed_agent() as agent, linked(agent.host) as link:
        client, other = link.client(), link.client()
        client.reply(client.open(1, (1, "kept"), *argv("sleep", "1000")))
        assert numbers(client.call(50, (1, 25_000)))[1] == 1
        for each in (client, other):
            with pytest.raises(EOFError):
                each.until_closed()
        waiting = link.dial()
        os.kill(agent.pid, signal.SIGUSR1)
        awake = Client(waiting)
        assert int.from_bytes(awake.hello[5], "little") == 2
        assert run(awake, "after", "echo", "fine").out[1] == b"fine\n"


def test_shutdown_says_its_last_word() -> None:
    agent = MuxedAgent()
    try:
        with linked(agent.host) as link:
            link.client().call(51, (1, 0))
            assert agent.process.wait(30) == 0
            agent.host.close()
            assert link.process.wait(30) == 0, "the link ends when the stream does"
    finally:
        agent.close()


def test_commands_inherit_nothing_of_the_stream() -> None:
    with muxed_agent() as agent, linked(agent.host) as link:
        said = run(link.client(), "fds", "ls", "-l", "/proc/self/fd").out[1].decode()
        assert "socket:" not in said, said


def test_the_agent_finds_a_character_device_by_its_path(tmp_path: Path) -> None:
    """A serial port: nobody may be at its far end, and then somebody else."""
    import pty
    import tty

    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    tty.setraw(ours)
    agent = MuxedAgent(where=f"mux={os.ttyname(theirs)}")
    try:
        for name in ("first", "second"):
            with Pump(ours) as near, linked(near) as link:
                assert run(link.client(), name, "echo", "port").out[1] == b"port\n"
        assert agent.alive()
    finally:
        agent.close()
        os.close(ours)
        os.close(theirs)


class Pump:
    """Copies between a pty and a socket, as a VMM does between a port and its back end."""

    def __init__(self, fd: int) -> None:
        self.near, self.far = socket.socketpair()
        self.fd = fd
        self.thread = threading.Thread(target=self._pump, daemon=True)

    def __enter__(self) -> socket.socket:
        self.thread.start()
        return self.near

    def __exit__(self, *error: object) -> None:
        self.near.close()
        self.far.shutdown(socket.SHUT_RDWR)
        self.thread.join(30)
        self.far.close()

    def _pump(self) -> None:
        while True:
            ready, _, _ = select.select([self.far, self.fd], [], [])
            if self.far in ready:
                data = self.far.recv(1024)
                if not data:
                    return
                while data:
                    data = data[os.write(self.fd, data) :]
            if self.fd in ready:
                try:
                    self.far.sendall(os.read(self.fd, 4096))
                except OSError:
                    return
