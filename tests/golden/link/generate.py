"""Write the golden transcripts anew, from the real agent: ``python tests/golden/link/generate.py`` as root.

Only when the protocol changes on purpose: the diff is then what other implementations have to change.
"""

from __future__ import annotations

import errno
import io
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "integration" / "agent")]

from wall import (  # noqa: E402
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
    REPLY,
    Value,
    Wall,
    argv,
    fields,
    wall,
)

import golden  # noqa: E402
from golden import Line  # noqa: E402

NAMES = {
    1: "process.start",
    2: "process.attach",
    3: "process.signal",
    4: "process.list",
    5: "process.resize",
    6: "process.remove",
    16: "file.read",
    17: "file.write",
    18: "file.list",
    19: "file.stat",
    20: "file.move",
    21: "file.remove",
    22: "file.mkdir",
    23: "file.watch",
    24: "tar.in",
    25: "tar.out",
    32: "net.dial",
    33: "net.listen",
    34: "net.accepted",
    35: "net.datagrams",
    48: "bind",
    49: "stats",
    50: "quiesce",
    51: "shutdown",
}
STAT = {5: "any_mtime", 6: "uid", 7: "gid", 9: "any_inode"}
# What differs from run to run, by (frame type, operation or event).
VARIABLE: dict[tuple[int, int], dict[int, str]] = {
    (HELLO, 0): {6: "instance", 7: "any_agent"},
    (REPLY, 1): {1: "any_pid"},
    (REPLY, 2): {1: "any_pid"},
    (REPLY, 16): STAT,
    (REPLY, 19): STAT,
    (REPLY, 49): dict.fromkeys(range(1, 7), "any_stat"),
    (EVENT, 1): {5: "any_user", 6: "any_system", 7: "any_resident"},
    (OPEN, 34): {2: "any_port", 3: "uid", 6: "any_pid"},
}


def masked(payload: bytes, names: dict[int, str], nested: dict[int, dict[int, str]]) -> str:
    """Fields as hex, variable ones as placeholders."""
    out, at = "", 0
    while at < len(payload):
        tag, size = struct.unpack_from("<BI", payload, at)
        value = payload[at + 5 : at + 5 + size]
        out += payload[at : at + 5].hex()
        if tag in nested:
            out += masked(value, nested[tag], {})
        else:
            out += f"{{{names[tag]}:{size}}}" if tag in names and size else value.hex()
        at += 5 + size
    return out


class Recorder:
    """Speaks on one link and writes everything down."""

    def __init__(self, walled: Wall) -> None:
        self.client = walled.client(hello=False)
        self.lines: list[Line] = []
        self.operations: dict[int, int] = {0: 0}
        self.next_id = 1
        self.send(HELLO, 0, fields((1, MAGIC), (2, 1), (3, NONCE), (4, "control")), "HELLO")
        self.take("HELLO")

    def send(self, kind: int, channel: int, payload: bytes, note: str) -> None:
        """A frame of the host."""
        data = HEADER.pack(len(payload), channel, kind, 0, 0) + payload
        self.client.sock.sendall(data)
        self.lines.append(Line("host", data.hex(), note))

    def open(self, operation: int, *items: tuple[int, Value]) -> int:
        """OPEN of the host."""
        channel, self.next_id = self.next_id, self.next_id + 2
        self.operations[channel] = operation
        self.send(
            OPEN,
            channel,
            struct.pack("<H", operation) + fields(*items),
            f"OPEN {NAMES.get(operation, 'unknown')}",
        )
        return channel

    def data(self, channel: int, offset: int, data: bytes) -> None:
        """DATA on stream 0."""
        self.send(DATA, channel, struct.pack("<BQ", 0, offset) + data, "DATA 0")

    def eof(self, channel: int, offset: int) -> None:
        """EOF of stream 0."""
        self.send(EOF, channel, struct.pack("<BQ", 0, offset), "EOF 0")

    def take(self, *kinds: str) -> None:
        """Frames of the guest: exactly these types come."""
        for kind in kinds:
            frame = self.client.receive()
            assert golden.TYPES[frame.type] == kind, (kind, frame)
            operation = self.operations.get(frame.channel, 0)
            head = frame.payload
            if frame.type == EVENT:
                operation = struct.unpack_from("<H", head)[0]
            if frame.type == OPEN:
                operation = self.operations[frame.channel] = struct.unpack_from("<H", head)[0]
            skip = 2 if frame.type in (EVENT, OPEN) else 0
            nested: dict[int, dict[int, str]] = {}
            if (frame.type, operation) == (REPLY, 4):
                nested = {1: {2: "any_pid", 8: "any_time"}}
            if frame.type in (HELLO, OPEN, REPLY, EVENT):
                body = head[:skip].hex() + masked(
                    head[skip:], VARIABLE.get((frame.type, operation), {}), nested
                )
            elif frame.type == DATA and operation == 18:
                body, at = head[:9].hex(), 9
                while at < len(head):
                    (size,) = struct.unpack_from("<I", head, at)
                    body += head[at : at + 4].hex() + masked(head[at + 4 : at + 4 + size], STAT, {})
                    at += 4 + size
            else:
                body = head.hex()
            header = HEADER.pack(len(head), frame.channel, frame.type, 0, 0).hex()
            note = kind + (f" {head[0]}" if frame.type in (DATA, EOF, CREDIT) else "")
            if frame.type == EVENT:
                note += " " + {1: "exit", 2: "change", 3: "overflow"}[operation]
            self.lines.append(Line("guest", header + body, note))

    def take_any(self, *kinds: str) -> None:
        """Frames of several channels, in whatever order they come; written down channel by channel."""
        frames = sorted((self.client.receive() for _ in kinds), key=lambda frame: frame.channel)
        assert sorted(golden.TYPES[frame.type] for frame in frames) == sorted(kinds), frames
        self.client.receive = iter(frames).__next__  # type: ignore[method-assign]
        self.take(*(golden.TYPES[frame.type] for frame in frames))
        del self.client.receive

    def closed(self) -> None:
        """The guest ends the link."""
        try:
            frame = self.client.receive()
        except EOFError:
            self.lines.append(Line("guest", None, "the link ends"))
            return
        raise AssertionError(frame)

    def close(self, channel: int) -> None:
        """CLOSE of the host."""
        self.send(CLOSE, channel, b"", "CLOSE")


def command(to: Recorder) -> None:
    channel = to.open(1, (1, "hello"), *argv("sh", "-c", "echo hello; exit 3"))
    to.take("REPLY", "DATA", "EOF", "EOF", "EVENT", "CLOSE")
    to.close(channel)


def errors(to: Recorder) -> None:
    to.open(1, (1, "a"), *argv("no-such-program"))
    to.take("ERROR")
    to.open(1, (1, "a/b"), *argv("true"))
    to.take("ERROR")
    to.open(1, (1, "a"), *argv("true"), (4, "/no/such/folder"))
    to.take("ERROR")
    to.open(2, (1, "a"))
    to.take("ERROR")
    to.open(99)
    to.take("ERROR")
    to.open(5, (1, "a"), (2, b"short"))
    to.take("ERROR")


def stdin(to: Recorder) -> None:
    channel = to.open(1, (1, "cat"), *argv("cat"), (5, 2))
    to.take("REPLY")
    to.data(channel, 0, b"one ")
    to.take("DATA")
    to.data(channel, 4, b"two")
    to.take("DATA")
    to.eof(channel, 7)
    to.take("EOF", "EOF", "EVENT", "CLOSE")
    to.close(channel)


def terminal(to: Recorder) -> None:
    channel = to.open(1, (1, "tty"), *argv("sh", "-c", "stty size; read x"), (5, 1), (6, 30), (7, 100))
    to.take("REPLY", "EOF", "DATA")
    to.open(5, (1, "tty"), (2, 40), (3, 120))
    to.take("REPLY")
    to.open(3, (1, "tty"), (2, 9), (3, 1))
    to.take("REPLY", "EOF", "EVENT", "CLOSE")
    to.close(channel)


def attach(to: Recorder) -> None:
    channel = to.open(1, (1, "a"), *argv("sh", "-c", "echo 0123456789; cat"), (5, 2), (8, 4))
    to.take("REPLY", "DATA")
    to.close(channel)
    to.take("CLOSE")
    channel = to.open(2, (1, "a"), (2, 2), (8, 4))
    to.take("REPLY", "DATA")
    to.send(CREDIT, channel, struct.pack("<BI", 1, 100), "CREDIT 1")
    to.take("DATA")
    to.eof(channel, 0)
    to.take("EOF", "EOF", "EVENT", "CLOSE")
    to.close(channel)
    to.open(4)
    to.take("REPLY")
    to.open(6, (1, "a"))
    to.take("REPLY")
    to.open(4)
    to.take("REPLY")


def signals(to: Recorder) -> None:
    channel = to.open(1, (1, "s"), *argv("sleep", "1000"))
    to.take("REPLY")
    to.open(6, (1, "s"))
    to.take("ERROR")
    to.open(3, (1, "s"), (2, 9), (3, 0))
    to.take("REPLY", "EOF", "EOF", "EVENT", "CLOSE")
    to.close(channel)
    to.open(3, (1, "s"), (2, 9))
    to.take("ERROR")


def detached(to: Recorder) -> None:
    to.open(1, (1, "d"), *argv("sleep", "1000"), (5, 32))
    to.take("REPLY")
    to.open(1, (1, "d"), *argv("sleep", "1000"), (5, 32))
    to.take("ERROR")
    channel = to.open(2, (1, "d"), (4, 1))
    to.take("REPLY")
    to.open(3, (2, 15), (3, 2))
    to.take("REPLY", "EVENT", "CLOSE")
    to.close(channel)


def files(to: Recorder) -> None:
    to.open(22, (1, "d/e"), (3, 1))
    to.take("REPLY")
    channel = to.open(17, (1, "d/f"), (2, 0o640))
    to.data(channel, 0, b"content")
    to.eof(channel, 7)
    to.take("REPLY", "CLOSE")
    to.close(channel)
    to.open(19, (1, "d/f"))
    to.take("REPLY")
    channel = to.open(16, (1, "d/f"), (2, 3), (3, 2))
    to.take("REPLY", "DATA", "EOF", "CLOSE")
    to.close(channel)
    to.open(20, (1, "d/f"), (2, "g"))
    to.take("REPLY")
    to.open(21, (1, "d"), (2, 1))
    to.take("REPLY")
    channel = to.open(18, (1, "."))
    to.take("REPLY", "DATA", "EOF", "CLOSE")
    to.close(channel)
    to.open(16, (1, "d/f"))
    to.take("ERROR")


def watch(to: Recorder) -> None:
    channel = to.open(23, (1, "."), (2, 1))
    to.take("REPLY")
    to.open(22, (1, "made"))
    to.take_any("REPLY", "EVENT")
    to.close(channel)
    to.take("CLOSE")


def archive(to: Recorder) -> None:
    for name, kind in (("file", tarfile.REGTYPE), ("../evil", tarfile.REGTYPE), ("device", tarfile.CHRTYPE)):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as made:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, 7 if kind == tarfile.REGTYPE else 0
            made.addfile(info, io.BytesIO(b"content"))
        data = out.getvalue()[:2048]
        channel = to.open(24, (1, "in"))
        to.data(channel, 0, data)
        to.eof(channel, len(data))
        if name == "file":
            to.take("REPLY", "CLOSE")
            to.close(channel)
        else:
            to.take("ERROR")


def ports(to: Recorder) -> None:
    to.open(32, (1, 7070))
    to.take("ERROR")
    to.open(32, (1, 7070), (2, "10.0.0.1"))
    to.take("ERROR")
    listener = to.open(33, (1, 7070))
    to.take("REPLY")
    user = to.open(
        1, (1, "user"), *argv("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7070; echo ask >&3; cat <&3")
    )
    to.take_any("REPLY", "OPEN")
    to.send(REPLY, 2, b"", "REPLY net.accepted")
    to.take("DATA")
    to.data(2, 0, b"answer")
    to.take("DATA")
    to.eof(2, 6)
    to.take_any("EOF", "EOF", "EVENT", "CLOSE", "EOF", "CLOSE")
    to.close(2)
    to.close(user)
    user = to.open(
        1, (1, "again"), *argv("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7070; cat <&3 2>/dev/null")
    )
    to.take_any("REPLY", "OPEN")
    to.send(ERROR, 4, struct.pack("<I", errno.EACCES) + b"no", "ERROR net.accepted")
    to.take("EOF", "EOF", "EVENT", "CLOSE")
    to.close(user)
    to.close(listener)
    to.take("CLOSE")


def names(to: Recorder) -> None:
    asked = to.open(35, (1, 7053))
    to.take("REPLY")
    script = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'question', ('127.0.0.1', 7053)); print(s.recv(99).decode())"
    )
    user = to.open(1, (1, "user"), *argv("python3", "-c", script))
    to.take_any("REPLY", "DATA")
    to.data(asked, 0, struct.pack("<II", 6, 1) + b"answer")
    to.take("DATA", "EOF", "EOF", "EVENT", "CLOSE")
    to.close(user)
    to.open(35, (1, 70000))
    to.take("ERROR")
    to.close(asked)
    to.take("CLOSE")


def bind(to: Recorder) -> None:
    to.open(48, (1, "TOKEN=abc"), (3, "named"))
    to.take("REPLY")
    channel = to.open(1, (1, "e"), *argv("sh", "-c", "echo $TOKEN"))
    to.take("REPLY", "DATA", "EOF", "EOF", "EVENT", "CLOSE")
    to.close(channel)
    to.open(48, (5, 1))
    to.take("ERROR")
    to.open(49)
    to.take("REPLY")


def sleep(to: Recorder) -> None:
    to.open(50, (1, 5000))
    to.take("REPLY")
    to.closed()


def shutdown(to: Recorder) -> None:
    to.open(51, (1, 0))
    to.take("REPLY")
    to.closed()


def ping(to: Recorder) -> None:
    to.send(PING, 0, b"are you there", "PING")
    to.take("PONG")


def violation(to: Recorder) -> None:
    to.send(DATA, 9, struct.pack("<BQ", 0, 0) + b"x", "DATA on a channel never opened")
    to.closed()


SCENES: tuple[Callable[[Recorder], None], ...] = (
    command,
    errors,
    stdin,
    terminal,
    attach,
    signals,
    detached,
    files,
    watch,
    archive,
    ports,
    names,
    bind,
    sleep,
    shutdown,
    ping,
    violation,
)


def loopback_up(walled: Wall) -> None:
    """Transcripts speak of a sandbox whose loopback is up. Call when the agent has answered."""
    subprocess.run(
        ["nsenter", f"--target={walled.pid}", "--net", "ip", "link", "set", "lo", "up"], check=True
    )


if __name__ == "__main__":
    for scene in SCENES:
        with wall() as walled:
            recorder = Recorder(walled)
            loopback_up(walled)
            scene(recorder)
        golden.save(golden.FOLDER / f"{scene.__name__}.jsonl", recorder.lines)
