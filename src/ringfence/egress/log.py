"""The connection log: one JSON object a line, only ever appended to, rotated by size."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_ROTATE = 64 * 1024 * 1024  # bytes
_KEEP = 8  # older files
_MOST_LINE = 64 * 1024
_PIECE = 256 * 1024


_REFUSALS = (500.0, 20.0)  # of one sandbox that are written down: at once, and a second
_BYTES = (16 * 1024 * 1024.0, 64 * 1024.0)  # of one sandbox's lines about what passed, the same
_MOST_NEW = 256  # destinations of one sandbox whose first line is written whatever there was before


class Share:
    """One sandbox's share of the log: none can push out what others did (or what it did itself) by being
    refused, or by asking for what it may, again and again. What is left out is counted, and the next line
    of the sandbox says how much it was.
    """

    def __init__(self) -> None:
        self._refusals = _Level(*_REFUSALS)
        self._passed = _Level(*_BYTES)
        self._destinations: set[Any] = set()
        self._refused = self._left = self._sent = self._received = 0

    def refusal(self) -> bool:
        """Whether a refusal is one too many."""
        if self._refusals.take(1):
            return False
        self._refused += 1
        return True

    def passed(self, destination: Any, line: dict[str, Any]) -> bool:
        """Whether a line about what passed is one too many."""
        new = destination not in self._destinations and len(self._destinations) < _MOST_NEW
        if new:
            self._destinations.add(destination)
        if self._passed.take(len(str(line))) or new:
            return False
        self._left += 1
        self._sent += int(line.get("sent", 0))
        self._received += int(line.get("received", 0))
        return True

    def left_out(self) -> dict[str, Any]:
        """What was left out since the last line, for the next one."""
        if not self._refused and not self._left:
            return {}
        found: dict[str, Any] = {"left_out": self._refused + self._left}
        if self._left:
            found["left_out_bytes"] = [self._sent, self._received]
        self._refused = self._left = self._sent = self._received = 0
        return found


class _Level:
    def __init__(self, most: float, rate: float) -> None:
        self._most, self._rate = most, rate
        self._level, self._at = most, time.monotonic()

    def take(self, count: float) -> bool:
        now = time.monotonic()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < count:
            return False
        self._level -= count
        return True


class ConnectionLog:
    """Appends whole lines; several processes may write to one file."""

    def __init__(self, path: Path, rotate: int = _ROTATE) -> None:
        self.path = path
        self._rotate = rotate
        self._descriptor = -1
        self._lines = 0
        self._often = (
            64 if rotate >= _ROTATE // 8 else 1
        )  # others write to the file too, so its size is asked for

    def write(self, line: dict[str, Any]) -> None:
        """Append one object. It is with the operating system when this returns: our own end loses nothing."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if len(data) > _MOST_LINE:
            short = {key: value for key, value in line.items() if len(str(value)) < 1024}
            data = json.dumps(short | {"cut": True}, separators=(",", ":")).encode() + b"\n"
        self._lines += 1
        if self._descriptor < 0 or (
            self._lines % self._often == 0 and os.fstat(self._descriptor).st_size > self._rotate
        ):
            self._open()
        os.write(self._descriptor, data)

    def _open(self) -> None:
        import fcntl

        self.close()
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists() and self.path.stat().st_size > self._rotate:
                for number in range(_KEEP, 0, -1):
                    older = self._older(number)
                    if older.exists():
                        os.replace(older, self._older(number + 1)) if number < _KEEP else older.unlink()
                os.replace(self.path, self._older(1))
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def read(self, newest: int | None = None) -> Iterator[dict[str, Any]]:
        """All lines that are kept, or the ``newest`` so many, oldest first. What is not whole is left out."""
        with contextlib.ExitStack() as opened:
            files = self._files(opened)[::-1]
            skip = 0
            if newest is not None:
                skip = max(0, sum(1 for file in files for _ in file) - newest)
                for file in files:
                    file.seek(0)
            for number, raw in enumerate(raw for file in files for raw in file):
                if number >= skip and (line := _parsed(raw)) is not None:
                    yield line

    def newest(self, sandbox: str, limit: int) -> list[dict[str, Any]]:
        """The last lines about one sandbox, oldest first.

        Read from the end, and no other's line is parsed: what a sandbox did is asked for often, and the log
        is long.
        """
        found: deque[dict[str, Any]] = deque()
        mark = json.dumps(sandbox).encode()
        with contextlib.ExitStack() as opened:
            for file in self._files(opened):
                for raw in _backwards(file):
                    if mark not in raw:
                        continue
                    line = _parsed(raw)
                    if line is not None and line.get("sandbox") == sandbox:
                        found.appendleft(line)
                        if len(found) >= limit:
                            return list(found)
        return list(found)

    def _files(self, opened: contextlib.ExitStack) -> list[BinaryIO]:
        """Open ones, the newest first: all at once, so that a rotation meanwhile hides none."""
        found: list[BinaryIO] = []
        numbers: set[int] = set()
        for number in range(_KEEP + 1):
            path = self._older(number) if number else self.path
            with contextlib.suppress(FileNotFoundError):
                file = opened.enter_context(path.open("rb"))
                if (own := os.fstat(file.fileno()).st_ino) not in numbers:
                    numbers.add(own)
                    found.append(file)
        return found

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, the last one first."""
    left, rest = file.seek(0, os.SEEK_END), b""
    while left:
        size = min(_PIECE, left)
        left -= size
        file.seek(left)
        lines = (file.read(size) + rest).split(b"\n")
        rest = lines[0]
        yield from reversed(lines[1:])
    yield rest
