"""Who has which GPU of this host: two sandboxes never get the same one.

A lease is two files. One in the sandbox's own folder names what it has; it goes with the folder, however the
sandbox, its node or the machine ended. One of the host's, by the GPU's name, points at that folder, so that
every node of the host finds it. It counts only while the folder says the same: there is nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from ringfence.model.errors import HostLimit

PLACE = "run/ringfence/gpus"  # of the host, for the superuser alone
FOLDER = "gpu"  # of a sandbox's folder: its lease, and what is made for its GPUs
MARK = "lease"
_MOST = 1 << 16  # bytes of a file


def take(folder: str, units: Mapping[str, str], count: int, *, root: str = "/") -> list[str]:
    """Give ``count`` GPUs to the sandbox whose folder this is, the first that are free.

    Args:
        folder: of the sandbox; what it had before is given back.
        units: every GPU that could be handed over → the unit that only one sandbox at a time can have.
        count: how many.
        root: the host's file system; tests have one of their own.

    Raises:
        HostLimit: fewer are free (the message says who has the others), or no record can be kept.
    """
    try:
        with _locked(root) as place:
            chosen: list[str] = []
            taken: list[str] = []
            for name, unit in units.items():
                owner = _owner(place, unit)
                if owner and owner != folder:
                    taken.append(f"{name} is {os.path.basename(owner)}'s")
                elif len(chosen) < count:
                    chosen.append(name)
            if len(chosen) < count:
                raise HostLimit(
                    f"{count} GPUs are asked for and {len(chosen)} of {len(units)} are free: "
                    + ", ".join(taken),
                    hint="wait until a sandbox that has one ends, or choose another host",
                )
            mine = sorted({units[name] for name in chosen})
            os.makedirs(os.path.join(folder, FOLDER), mode=0o700, exist_ok=True)
            # The sandbox's half first: the other one without it means nothing.
            _write(os.path.join(folder, FOLDER, MARK), json.dumps(mine))
            for unit in mine:
                _write(os.path.join(place, quote(unit, safe="")), folder)
            return chosen
    except OSError as error:
        raise HostLimit(
            f"no record of who has which GPU can be kept: {error.filename}: {error.strerror}",
            hint=f"/{PLACE} must be writable",
        ) from error


def of(folder: str) -> list[str]:
    """The units that a sandbox has by what its own folder says.

    Raises:
        OSError: it can't be read, for another reason than that there is nothing.
    """
    try:
        text = _read(os.path.join(folder, FOLDER, MARK))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = json.loads(text)
    return [str(unit) for unit in found] if isinstance(found, list) else []


@contextlib.contextmanager
def _locked(root: str) -> Iterator[str]:
    place = os.path.join(root, PLACE)
    os.makedirs(place, mode=0o700, exist_ok=True)
    lock = os.open(os.path.join(place, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for as long as some small files take
        yield place
    finally:
        os.close(lock)


def _owner(place: str, unit: str) -> str:
    """The folder of the sandbox that has a unit; empty if nobody has.

    A record that can't be read counts: rather one GPU too few than one in two hands.
    """
    try:
        folder = _read(os.path.join(place, quote(unit, safe="")))
    except FileNotFoundError:
        return ""
    try:
        return folder if unit in of(folder) else ""
    except (OSError, ValueError):
        return folder


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.read(descriptor, _MOST).decode(errors="surrogateescape")
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    """Whole or not at all."""
    new = f"{path}.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, text.encode(errors="surrogateescape"))
    finally:
        os.close(descriptor)
    os.replace(new, path)
