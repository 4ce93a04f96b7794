"""Reading, matching and writing transcripts of the link protocol (docs/PROTOCOL.md, "Golden transcripts")."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TYPES = ("", "HELLO", "OPEN", "REPLY", "ERROR", "DATA", "CREDIT", "EOF", "CLOSE", "EVENT", "PING", "PONG")
_PART = re.compile(r"\{([a-z_]+):(\d+)\}|((?:[0-9a-f]{2})+)")


@dataclass(frozen=True)
class Line:
    """One line: a frame of one side, or the end of the link. ``frame`` is hex with placeholders."""

    side: str
    frame: str | None
    note: str

    def parts(self) -> Iterator[tuple[str, int, bytes]]:
        """(name, size, b"") of a placeholder, or ("", size, bytes)."""
        assert self.frame is not None
        at = 0
        while at < len(self.frame):
            found = _PART.match(self.frame, at)
            assert found is not None, f"neither hex nor a placeholder: {self.frame[at : at + 20]}"
            at = found.end()
            if found[1]:
                yield found[1], int(found[2]), b""
            else:
                yield "", len(found[3]) // 2, bytes.fromhex(found[3])

    def example(self) -> bytes:
        """The frame with ones for every placeholder."""
        return b"".join(data if not name else b"\1" * size for name, size, data in self.parts())

    def fill(self, known: dict[str, bytes]) -> bytes:
        """The frame with what the other side has told before."""
        return b"".join(data if not name else known[name] for name, size, data in self.parts())

    def match(self, got: bytes, known: dict[str, bytes]) -> dict[str, bytes] | None:
        """None, or what the placeholders stand for. A name stands for the same bytes in a whole transcript,
        unless it begins with ``any``.
        """
        told, at = {}, 0
        for name, size, data in self.parts():
            piece = got[at : at + size]
            at += size
            if len(piece) != size or (not name and piece != data):
                return None
            if name and not name.startswith("any"):
                if known.get(name, told.get(name, piece)) != piece:
                    return None
                told[name] = piece
        return told if at == len(got) else None


def transcripts() -> list[Path]:
    """All transcripts."""
    return sorted(FOLDER.glob("*.jsonl"))


def load(path: Path) -> list[Line]:
    """The lines of one transcript."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    return [Line(item["from"], item.get("frame"), item["note"]) for item in found]


def save(path: Path, lines: list[Line]) -> None:
    """Write one."""
    out = []
    for line in lines:
        item = {"from": line.side, "note": line.note} | (
            {"frame": line.frame} if line.frame is not None else {}
        )
        out.append(json.dumps(item))
    path.write_text("\n".join(out) + "\n")


def split(data: bytes) -> tuple[int, int, bytes]:
    """Type, channel and payload of a whole frame."""
    size, channel, kind, flags, reserved = struct.unpack_from("<IIBBH", data)
    assert flags == reserved == 0
    assert size == len(data) - 12
    return kind, channel, data[12:]


def key(data: bytes) -> tuple[int, int]:
    """Frames with the same key keep their order; others may pass each other: (channel, stream)."""
    kind, channel, payload = split(data)
    return channel, payload[0] if TYPES[kind] in ("DATA", "EOF", "CREDIT") else -1
