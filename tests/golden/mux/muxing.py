"""Frames of the mux (docs/PROTOCOL.md, "Many links over one stream"), written apart from both ends of it."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

RESET, READY, OPEN, DATA, CREDIT, CLOSE, LOST = range(1, 8)
NAMES = ("", "RESET", "READY", "OPEN", "DATA", "CREDIT", "CLOSE", "LOST")
MAGIC = b"RINGFENCE-MUX-1\n"
SEAL = b"RFmx"
PAD = bytes(65536)
WINDOW, LINKS = 131072, 64
NONCE = bytes(range(16))


def frame(kind: int, link: int = 0, payload: bytes = b"", size: int | None = None, zero: int = 0) -> bytes:
    """Any frame, right or wrong."""
    return struct.pack("<HBBI", len(payload) if size is None else size, kind, zero, link) + payload + SEAL


def record(kind: int, nonce: bytes = NONCE, window: int = WINDOW, links: int = LINKS) -> bytes:
    """A RESET or READY."""
    return frame(kind, 0, MAGIC + nonce + struct.pack("<II", window, links))


def credit(link: int, size: int) -> bytes:
    """A CREDIT."""
    return frame(CREDIT, link, struct.pack("<I", size))


@dataclass
class Frame:
    """One frame as it came; ``data`` is the whole of it."""

    type: int
    link: int
    payload: bytes
    data: bytes


class Stream:
    """One end of the stream, blocking; frames as they come."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(30)
        self.buffer = b""

    def send(self, *data: bytes) -> None:
        """Send bytes."""
        self.sock.sendall(b"".join(data))

    def more(self) -> None:
        """Read. Raises EOFError at the end."""
        got = self.sock.recv(1 << 18)
        if not got:
            raise EOFError
        self.buffer += got

    def next(self) -> Frame:
        """The next frame; asserts that it is a whole and right one."""
        while True:
            if len(self.buffer) >= 8:
                size, kind, zero, link = struct.unpack_from("<HBBI", self.buffer)
                assert zero == 0
                assert size <= 65524
                assert 1 <= kind <= 7, self.buffer[:16]
                whole = 8 + size + 4
                if len(self.buffer) >= whole:
                    data, self.buffer = self.buffer[:whole], self.buffer[whole:]
                    assert data[-4:] == SEAL
                    return Frame(kind, link, data[8:-4], data)
            self.more()

    def take(self, kind: int, link: int | None = None) -> Frame:
        """The next frame, which must be of this kind; CREDIT in between is passed over."""
        while True:
            got = self.next()
            if got.type == CREDIT and kind != CREDIT:
                continue
            assert NAMES[got.type] == NAMES[kind], got
            assert link is None or got.link == link, got
            return got

    def find(self, kind: int, nonce: bytes | None = None) -> bytes:
        """Drop bytes until a whole RESET or READY (with that nonce); returns its nonce."""
        head = struct.pack("<HBBI", 40, kind, 0, 0) + MAGIC + (nonce or b"")
        while True:
            at = self.buffer.find(head)
            if at >= 0 and len(self.buffer) - at >= 52:
                found = self.buffer[at : at + 52]
                self.buffer = self.buffer[at + 52 :]
                assert found[-4:] == SEAL
                return found[24:40]
            self.more()
