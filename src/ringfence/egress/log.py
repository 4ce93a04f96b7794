"""The connection log: one JSON object a line, only ever appended to, rotated by size."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROTATE = 64 * 1024 * 1024  # bytes
_KEEP = 8  # older files
_MOST_LINE = 64 * 1024


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

    def read(self) -> Iterator[dict[str, Any]]:
        """All lines that are kept, oldest first. What is not whole is left out."""
        for number in range(_KEEP, -1, -1):
            path = self._older(number) if number else self.path
            try:
                with open(path, "rb") as file:
                    for raw in file:
                        try:
                            line = json.loads(raw)
                        except ValueError:
                            continue
                        if isinstance(line, dict):
                            yield line
            except FileNotFoundError:
                continue

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
