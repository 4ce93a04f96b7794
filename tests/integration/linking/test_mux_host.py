"""``ringfence-link`` before a hostile guest, and what it can't do."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ends import Link, link_path, linked, muxing
from muxing import CLOSE, CREDIT, DATA, LOST, OPEN, PAD, READY, RESET, frame, record


class Guest(muxing.Stream):
    """This test as the guest. Where it is stopped for a second it is asked anew, and has to answer that."""

    answering = False
    wrap: Callable[[bytes], bytes] = staticmethod(bytes)

    def ready(self, nonce: bytes, **limits: int) -> None:
        """Answer a RESET; another one that comes before anything else is answered as well."""
        self.answering, self.limits = True, limits
        self.send(self.wrap(record(READY, nonce, **limits)))

    def next(self) -> muxing.Frame:
        while self.answering:
            while len(self.buffer) < 8:
                self.more()
            if self.buffer[2] not in (0, RESET):  # the kind of a frame, or what is filled up before a RESET
                break
            self.send(self.wrap(record(READY, self.find(RESET), **self.limits)))
        self.answering = False
        return super().next()


@contextmanager
def guest(*options: str, fresh: bool = True) -> Iterator[tuple[Link, Guest, bytes]]:
    """A link, this test as the guest, and the nonce of the RESET that was taken."""
    ours, theirs = socket.socketpair()
    with ours, theirs, linked(theirs, *options, *(["fresh=1"] if fresh else [])) as link:
        theirs.close()
        stream = Guest(ours)
        yield link, stream, stream.find(RESET)


BIG = frame(DATA, 1, b"x" * 65_000)
VIOLATIONS: dict[str, bytes] = {
    "too large": frame(DATA, 1, size=65_525),
    "type 0": frame(0, 1),
    "type 8": frame(8, 1),
    "byte that must be zero": frame(DATA, 1, b"x", zero=1),
    "wrong seal": frame(DATA, 1, b"x")[:-1] + b"y",
    "OPEN": frame(OPEN, 3),
    "RESET": record(RESET),
    "never opened": frame(DATA, 99, b"x"),
    "link 0": frame(DATA, 0, b"x"),
    "link 2^32-1": frame(CLOSE, 2**32 - 1),
    "empty DATA": frame(DATA, 1),
    "DATA beyond the window": BIG * 30,
    "short CREDIT": frame(CREDIT, 1, b"x"),
    "CREDIT of 4 GiB": muxing.credit(1, 2**32 - 1),
    "CREDIT again and again": muxing.credit(1, 1 << 24) * 3,
    "CLOSE twice": frame(CLOSE, 1) * 2,
    "CLOSE with a payload": frame(CLOSE, 1, b"x"),
    "LOST": frame(LOST),
    "zeros": PAD,
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_ends_the_links_and_it_begins_anew(what: str) -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        caller = link.dial()
        caller.sendall(b"hello")
        stream.take(OPEN, 1)
        assert stream.take(DATA, 1).payload == b"hello"
        stream.send(VIOLATIONS[what])
        while caller.recv(1 << 17):
            pass
        other = stream.find(RESET)
        assert other != nonce, "a nonce is used once"
        stream.send(record(READY, nonce))
        stream.ready(other)
        again = link.dial()
        again.sendall(b"again")
        number = stream.take(OPEN).link
        assert stream.take(DATA, number).payload == b"again"
        stream.send(frame(DATA, number, b"answer"))
        assert again.recv(100) == b"answer"


def test_nobody_is_accepted_before_the_guest_has_answered() -> None:
    with guest(fresh=False) as (link, stream, nonce):
        caller = link.dial()
        caller.sendall(b"early")
        stream.send(b"left over from before", record(READY, b"x" * 16), frame(DATA, 1, b"old"))
        while select.select([stream.sock], [], [], 0.05)[0]:
            nonce = stream.find(RESET)  # it may ask again, and says nothing else
        stream.ready(nonce)
        number = stream.take(OPEN).link
        assert stream.take(DATA, number).payload == b"early"


def test_it_asks_again_while_nobody_answers() -> None:
    with guest() as (link, stream, nonce):
        second = stream.find(RESET)
        assert second != nonce
        stream.send(record(READY, nonce))  # late: the answer to what no longer counts
        third = stream.find(RESET)
        stream.ready(third)
        link.dial()
        stream.take(OPEN)


def test_it_fills_what_a_killed_one_had_begun() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, linked(theirs):
        stream = muxing.Stream(ours)
        while len(stream.buffer) < 65536 + 52:
            stream.more()
        assert stream.buffer[:65536] == PAD
        assert stream.buffer[65536 : 65536 + 24] == record(RESET)[:24]


def test_another_host_process_takes_over_and_it_ends() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        link.dial()
        stream.take(OPEN)
        stream.send(record(READY, b"other" * 3 + b"!"))
        assert link.process.wait(30) == 0


def test_it_tells_when_it_is_ready() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, linked(theirs, "fresh=1", ready=True) as link:
        stream = Guest(ours)
        nonce = stream.find(RESET)
        assert not select.select([link.told], [], [], 0)[0]
        stream.ready(nonce)
        link.dial()
        stream.take(OPEN)
        assert os.read(link.told, 10) == b"\0"
        assert os.read(link.told, 10) == b""


def test_a_slow_caller_costs_a_window_and_no_more() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        slow = link.dial()
        slow.sendall(b"s")
        one = stream.take(OPEN).link
        stream.take(DATA, one)
        sent = 0
        stream.send(frame(DATA, one, b"x" * 60_000) * 2)
        sent = 120_000
        quick = link.dial()
        quick.sendall(b"q")
        two = stream.take(OPEN).link
        while True:  # credit comes for what the caller's socket has room for, and then no more
            got = stream.next()
            if got.type == CREDIT:
                (more,) = struct.unpack("<I", got.payload)
                stream.send(frame(DATA, one, b"x" * min(more, 60_000)))
                sent += min(more, 60_000)
            elif got.type == DATA and got.link == two:
                break
        stream.send(frame(DATA, two, b"answer"))
        assert quick.recv(100) == b"answer"
        got_bytes = 0
        while got_bytes < sent:
            piece = slow.recv(1 << 18)
            assert piece.strip(b"x") == b""
            got_bytes += len(piece)


def test_many_that_speak_at_once_are_all_heard() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        callers = [link.dial() for _ in range(20)]

        def heard(count: int) -> None:
            while count > 0:
                got = stream.next()
                count -= len(got.payload) if got.type == DATA else 0
            assert count == 0

        for caller in callers:
            caller.sendall(b"x")
        heard(20)
        os.kill(link.process.pid, signal.SIGSTOP)
        for (
            caller
        ) in callers:  # more together than it takes in at once, and less each than what credit is for
            caller.sendall(b"y" * 8192)
        os.kill(link.process.pid, signal.SIGCONT)
        heard(20 * 8192)


def test_credit_is_kept() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce, window=10)
        caller = link.dial()
        caller.sendall(b"0123456789abcdef")
        number = stream.take(OPEN).link
        got = b""
        while len(got) < 10:
            got += stream.take(DATA, number).payload
        assert got == b"0123456789"
        other = link.dial()
        second = stream.take(OPEN).link
        other.close()
        stream.take(CLOSE, second)  # and nothing of the first before it
        stream.send(muxing.credit(number, 3))
        assert stream.take(DATA, number).payload == b"abc"


def test_no_more_links_than_the_guest_allows() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce, links=2)
        held = [link.dial() for _ in range(3)]
        assert stream.take(OPEN).link != stream.take(OPEN).link
        assert held[2].recv(1) == b""


def test_who_dials_while_every_number_is_half_closed_waits_for_one() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        numbers = []
        for _ in range(128):
            with link.dial():
                numbers.append(stream.take(OPEN).link)
            stream.take(CLOSE, numbers[-1])
        caller = link.dial()
        caller.sendall(b"x")
        stream.send(frame(CLOSE, numbers[0]))
        assert stream.take(DATA, stream.take(OPEN).link).payload == b"x"


def test_what_came_before_a_close_is_delivered() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        caller = link.dial()
        number = stream.take(OPEN).link
        stream.send(frame(DATA, number, b"y" * 60_000) * 2, frame(CLOSE, number))
        stream.take(CLOSE, number)
        got = b""
        while piece := caller.recv(1 << 16):
            got += piece
        assert got == b"y" * 120_000


def test_garbage_of_any_kind_is_survived() -> None:
    chance = random.Random(5)
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        stream.sock.settimeout(60)
        for _ in range(12):  # more than are answered at once
            caller = link.dial()
            stream.take(OPEN)
            junk = bytearray(b"".join(chance.choices([*VIOLATIONS.values(), chance.randbytes(999)], k=8)))
            for _ in range(chance.randrange(1, 9)):
                junk[chance.randrange(len(junk))] = chance.randrange(256)
            stream.send(b"\xff", bytes(junk), PAD)
            while caller.recv(1 << 17):
                pass
            stream.ready(stream.find(RESET))
        link.dial()
        assert link.process.poll() is None


def chunk(kind: int, data: bytes) -> bytes:
    """One piece in Docker's attach format."""
    return struct.pack(">BxxxI", kind, len(data)) + data


def test_dockers_format_is_unpacked() -> None:
    with guest("format=docker") as (link, stream, nonce):
        stream.wrap = lambda answer: b"".join(
            (chunk(1, answer[:5]), chunk(2, b"words on stderr"), chunk(1, b""), chunk(1, answer[5:]))
        )
        stream.ready(nonce)
        caller = link.dial()
        number = stream.take(OPEN).link
        data = (
            chunk(1, frame(DATA, number, b"a" * 50_000))
            + chunk(3, b"?")
            + chunk(1, frame(DATA, number, b"b"))
        )
        for at in range(0, len(data), 7919):
            stream.send(data[at : at + 7919])
        got = b""
        while len(got) < 50_001:
            got += caller.recv(1 << 16)
        assert got == b"a" * 50_000 + b"b"


def test_it_ends_with_the_stream_and_nobody_waits_for_it() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        caller = link.dial()
        stream.take(OPEN)
        stream.sock.shutdown(socket.SHUT_RDWR)
        assert link.process.wait(30) == 0
        assert caller.recv(1) == b""


def test_it_has_no_rights() -> None:
    with guest() as (link, stream, nonce):
        stream.ready(nonce)
        link.dial()
        stream.take(OPEN)
        place = Path(f"/proc/{link.process.pid}")
        status = dict(
            line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line
        )
        assert status["NoNewPrivs"] == "1"
        assert int(status["CapEff"], 16) == 0 or os.geteuid() != 0
        if os.geteuid() == 0:
            assert status["Uid"].split() == ["65534"] * 4
            assert status["Gid"].split() == ["65534"] * 4
            assert status["Groups"].split() == []
            open_now = {os.readlink(place / "fd" / name).split(":")[0] for name in os.listdir(place / "fd")}
            assert open_now <= {"socket", "/dev/null"} | {os.readlink(f"/proc/self/fd/{n}") for n in (1, 2)}
        if "RINGFENCE_LINK" not in os.environ:
            assert status["Seccomp"] == "2"
        assert os.getsid(link.process.pid) == link.process.pid


def test_hang_ups_and_interrupts_do_not_end_it_and_terminate_does() -> None:
    with guest() as (link, stream, nonce):
        os.kill(link.process.pid, signal.SIGHUP)
        os.kill(link.process.pid, signal.SIGINT)
        stream.ready(nonce)
        link.dial()
        stream.take(OPEN)
        link.process.terminate()
        assert link.process.wait(30) == -signal.SIGTERM


@pytest.mark.parametrize(
    "arguments",
    [[], ["listen=0"], ["stream=0"], ["listen=0", "stream=0", "connect=/x"], ["listen=x", "stream=0"]]
    + [
        ["listen=0", "stream=0", wrong]
        for wrong in ("uid=0", "gid=0", "format=tty", "x=1", "fresh", "ready=-1")
    ]
    + [["listen=0", "stream=0,1,2"], ["listen=99999999", "stream=0"], ["listen=0", "connect=/nobody/here"]],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    done = subprocess.run(
        [link_path(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert done.returncode == 125
    assert done.stderr.startswith(b"ringfence-link: ")


def test_it_dials_a_socket_by_its_path(tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    listener = socket.socket(socket.AF_UNIX)
    with server, listener:
        server.bind(str(tmp_path / "chardev"))
        server.listen(1)
        listener.bind(str(tmp_path / "guest"))
        listener.listen(1)
        fd = listener.fileno()
        process = subprocess.Popen(
            [link_path(), f"listen={fd}", f"connect={tmp_path / 'chardev'}"],
            pass_fds=[fd],
            start_new_session=True,
        )
        try:
            sock, _ = server.accept()
            with sock:
                muxing.Stream(sock).find(RESET)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()


def test_it_lives_through_a_shortage_of_descriptors() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, linked(theirs, "fresh=1", prefix=("prlimit", "--nofile=8:8")) as link:
        stream = Guest(ours)
        stream.ready(stream.find(RESET))
        held = [link.dial() for _ in range(12)]
        opened = [stream.take(OPEN).link]
        for sock in held:
            sock.sendall(b"!")
            sock.close()
        closed = 0
        while closed < 12:  # the others come in as room is made
            got = stream.next()
            if got.type == CLOSE:
                stream.send(frame(CLOSE, got.link))
                closed += 1
        assert link.process.poll() is None
        assert opened
