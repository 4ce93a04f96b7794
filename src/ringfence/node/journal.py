"""The journal of one sandbox: what exists, for whoever comes after a ``kill -9``.

``<folder>/journal`` is a list of JSON objects, one a line, only ever appended to; merged in order they
give the present record. ``state`` goes ``intent`` (something may exist) → ``handle`` (the wall does, and
here is its handle) → ``ending`` (it is being taken down); *gone* is the absence of the folder, which is
removed last. Each line is one write(2), so a killed writer leaves whole lines or a last line without its
newline, which is ignored: then the former state holds, and every step is safe to repeat.

No fsync: a wall does not survive the loss of power, so its journal need not. What a killed process wrote
is in the page cache and is there for the next one. After a reboot the boot id tells that nothing lives.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringfence.model.levels import Level
from ringfence.model.policy import (
    Audit,
    Door,
    Filesystem,
    Isolation,
    Limits,
    Mount,
    Policy,
    Process,
    Resources,
    Wall,
    network_of,
)
from ringfence.model.sandbox import Owner, SandboxRequest
from ringfence.node.state import JOURNAL
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import Disk, Handle, RootFs

VERSION = 1
NAME = JOURNAL
LARGEST = 1 << 20  # bytes: a journal is a few kilobytes; more is not one of ours

INTENT, HANDLE, ENDING = "intent", "handle", "ending"

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """Writes one sandbox's journal. Open from :meth:`begin` to :meth:`close`."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder = folder
        self.record = record
        self._file = -1

    @classmethod
    def begin(cls, folder: Path, record: dict[str, Any]) -> Journal:
        """Write the intent. The folder exists and has no journal, or an empty one to use again.

        Raises:
            HostLimit: no space, or no permission.
        """
        made = cls(folder, {})
        made.append({"v": VERSION, "state": INTENT, **record}, create=True)
        return made

    @classmethod
    def load(cls, folder: Path) -> Journal | None:
        """The journal of a sandbox that another process made; None if there is none, or no whole line."""
        record = read(folder)
        return cls(folder, record) if record else None

    def append(self, change: dict[str, Any], *, create: bool = False) -> None:
        """Add a line.

        Raises:
            HostLimit: no space, or no permission.
        """
        line = _encode(change).encode() + b"\n"
        try:
            if self._file < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                # A torn last line of a killed writer must not swallow ours.
                line = line if create else b"\n" + line
                self._file = os.open(f"{self.folder}/{NAME}", flags | (os.O_CREAT if create else 0), 0o600)
                if create and os.lseek(self._file, 0, os.SEEK_END):
                    raise FileExistsError(errno.EEXIST, "there is one already")
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(28, "short write")
        except OSError as error:
            raise host_limit(error, f"write the journal in {self.folder}") from error
        self.record.update(change)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """Of the open file; -1 if it is not open."""
        return self._file

    def close(self) -> None:
        """Close the file; the journal stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(folder: Path) -> dict[str, Any] | None:
    """The merged record, or None if there is no whole line of a known version."""
    try:
        file = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream:
        text = stream.read(LARGEST)
    record: dict[str, Any] = {}
    for line in text.split(b"\n")[:-1]:
        try:
            change = json.loads(line)
        except ValueError:
            continue
        if isinstance(change, dict):
            record.update(change)
    return record if record.get("v") == VERSION else None


def handle_as_json(handle: Handle) -> dict[str, Any]:
    """A handle as the journal keeps it."""
    return {
        "runtime": handle.runtime,
        "version": handle.version,
        "id": handle.id,
        "folder": handle.folder,
        "pid": handle.pid,
        "birth": handle.birth,
        "boot_id": handle.boot_id,
        "data": handle.data,
    }


def handle_from_json(value: dict[str, Any]) -> Handle:
    """The handle again.

    Raises:
        KeyError, TypeError: not one.
    """
    return Handle(**value)


def root_as_json(root: RootFs) -> dict[str, Any]:
    """What the next node has to know of a root file system."""
    return {
        "lowers": root.lowers,
        "writable": root.writable,
        "disk": root.disk.kind,
        "template": root.template,
    }


def root_from_json(value: dict[str, Any], request: SandboxRequest) -> RootFs:
    """The root file system again, as far as anybody needs it of a wall that stands.

    Raises:
        KeyError, TypeError: not one.
    """
    return RootFs(
        lowers=tuple(value["lowers"]),
        binds=(),
        disk=Disk(value.get("disk", "tmpfs"), request.policy.wall.resources.disk, 0),
        writable=tuple(value["writable"]),
        template=value.get("template", "host"),
    )


_last_policy: tuple[Policy | None, dict[str, Any]] = (None, {})


def request_as_json(request: SandboxRequest) -> dict[str, Any]:
    """A request as the journal keeps it (kept sandboxes only). What it returns is not to be changed."""
    global _last_policy
    # Most of it is the policy, and the members of a pool have all the same one.
    if request.policy is not _last_policy[0]:
        _last_policy = request.policy, asdict(request.policy)
    return {
        "policy": _last_policy[1],
        "template": request.template,
        "owner": asdict(request.owner),
        "env": dict(request.env),
        "labels": dict(request.labels),
        "keep": request.keep,
        "id": request.id,
        "secrets": request.secrets,
    }


def request_from_json(value: dict[str, Any]) -> SandboxRequest:
    """The request again.

    Raises:
        KeyError, TypeError, ValueError: not one.
    """
    policy = value["policy"]
    wall, door = policy["wall"], policy["door"]
    isolation, files, network = wall["isolation"], wall["filesystem"], door["network"]
    return SandboxRequest(
        policy=Policy(
            name=policy["name"],
            wall=Wall(
                isolation=Isolation(
                    minimum=Level(isolation["minimum"]),
                    runtime=isolation["runtime"],
                    prefer=tuple(isolation["prefer"]),
                    allow_emulated=isolation["allow_emulated"],
                ),
                filesystem=Filesystem(
                    root=files["root"],
                    read_only=tuple(files["read_only"]),
                    read_write=tuple(files["read_write"]),
                    mounts=tuple(Mount(**mount) for mount in files["mounts"]),
                ),
                process=Process(
                    **wall["process"] | {"host_functions": tuple(wall["process"].get("host_functions", ()))}
                ),
                resources=Resources(**wall["resources"]),
            ),
            door=Door(
                limits=Limits(**door["limits"]),
                network=network_of(network),
                audit=Audit(**door["audit"]),
            ),
            trust=policy["trust"],
        ),
        template=value["template"],
        owner=Owner(**value["owner"]),
        env=value["env"],
        labels=value["labels"],
        keep=value["keep"],
        id=value["id"],
        secrets=value.get("secrets", False),
    )
