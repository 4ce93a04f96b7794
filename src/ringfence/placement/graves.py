"""The ends of sandboxes that nobody has destroyed yet: a small file each, written before they are removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import InvalidRequest, RingfenceError
from ringfence.model.ids import SANDBOX_ID
from ringfence.model.levels import Cause
from ringfence.model.sandbox import End
from ringfence.node import supervising
from ringfence.node.groups import of_record
from ringfence.node.journal import HANDLE
from ringfence.node.troubles import host_limit
from ringfence.placement.contract import Placed
from ringfence.placement.values import placed_as_json

if TYPE_CHECKING:
    from ringfence.node.service import Node

FOLDER = "services"
SERVICE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
LARGEST = 1 << 20


def service_folder(state: Path, service: str) -> Path:
    """Where a service's node keeps what is its own; made if missing.

    Raises:
        InvalidRequest: an impossible name. HostLimit: it can't be made.
    """
    if not SERVICE.fullmatch(service):
        raise InvalidRequest(
            f"{service!r} is no name of a service", hint="lower-case letters, digits and -, up to 63"
        )
    folder = state / FOLDER / service
    try:
        # Who may connect passes through to the socket; nobody else's business is listed.
        for path, mode in ((state / FOLDER, 0o711), (folder, 0o711), (folder / "ended", 0o700)):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode)
                path.chmod(mode)
    except OSError as error:
        raise host_limit(error, f"make {folder}") from error
    return folder


def as_known(end: End) -> dict[str, Any]:
    """An end as the contract has it."""
    return {
        "cause": end.cause.value,
        "exit_code": end.exit_code,
        "detail": end.detail,
        "reported": end.reported,
    }


def noted_cause(record: Mapping[str, Any]) -> tuple[Cause, str] | None:
    """Why a node was about to end a sandbox, by its journal."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        cause, detail = record["cause"]
        return Cause(cause), str(detail)
    return None


def bury(node: Node, graves: Graves, record: Mapping[str, Any]) -> None:
    """Note the end of a sandbox of ours that died while no node held it, from its journal and its cgroup."""
    if record.get("state") != HANDLE or str(record.get("service", "")) != node.service:
        return  # half made, or told to end: whoever asked for it asks again
    name = str(record.get("id", ""))
    group = of_record(node.cgroups, record)
    if record.get("boot") != node.boot:
        end = End(Cause.NODE_LOST, 125, "the machine was started anew", reported=False)
    elif (told := noted_cause(record)) is not None:
        end = supervising.end_of(*told)
    elif group.oom_kills():
        end = End(Cause.OUT_OF_MEMORY, 137, "the whole sandbox ran out of memory", reported=False)
    else:
        end = End(Cause.RUNTIME_CRASH, 125, "it ended while no node was there to see why", reported=False)
    started = float(record.get("started", 0.0))
    timeout = 0.0
    with contextlib.suppress(KeyError, TypeError, ValueError):
        timeout = float(record["request"]["policy"]["door"]["limits"]["timeout"])
    root = record.get("root")
    placed = Placed(
        id=name,
        state="ended",
        runtime=str(record.get("runtime", "")),
        node=os.uname().nodename,
        started_at=started,
        deadline=float(record.get("deadline_at") or started + timeout),
        template=str(root.get("template", "host")) if isinstance(root, dict) else "host",
        end=as_known(end),
    )
    usage = {
        "cpu_seconds": group.cpu_seconds(),
        "memory_peak": group.memory_peak(),
        "output_bytes": int(record.get("output", 0)),
        "wall_seconds": max(0.0, time.time() - started),
    }
    with contextlib.suppress(RingfenceError):
        graves.dig(name, placed_as_json(placed), usage)


class Graves:
    """What is known of ended sandboxes: ``{"placed", "usage", "end"}`` by id."""

    def __init__(self, folder: Path, known: dict[str, dict[str, Any]]) -> None:
        self._folder = folder
        self._known = known

    @classmethod
    def open(cls, state: Path, service: str) -> Graves:
        """Read all."""
        folder = service_folder(state, service) / "ended"
        known = {}
        for name in os.listdir(folder):
            if name.endswith(".json") and SANDBOX_ID.fullmatch(name[:-5]):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    text = (folder / name).read_bytes()[:LARGEST]
                    value = json.loads(text)
                    known[name[:-5]] = {key: dict(value[key]) for key in ("placed", "usage", "end")}
            else:
                with contextlib.suppress(OSError):  # half written
                    (folder / name).unlink()
        return cls(folder, known)

    def get(self, name: str) -> dict[str, Any] | None:
        """What is known of one."""
        return self._known.get(name)

    def all(self) -> dict[str, dict[str, Any]]:
        """All of them."""
        return self._known

    def dig(self, name: str, placed: dict[str, Any], usage: dict[str, Any]) -> None:
        """Write an end down. The first one stands.

        Raises:
            HostLimit: no room; it is known as long as this process lives.
        """
        if name in self._known:
            return
        value = {"placed": placed, "usage": usage, "end": placed["end"]}
        self._known[name] = value
        path = self._folder / f"{name}.json"
        work = self._folder / f"{name}.part"
        try:
            work.write_bytes(json.dumps(value).encode())
            os.rename(work, path)
        except OSError as error:
            raise host_limit(error, f"write {path}") from error

    def fill(self, name: str) -> None:
        """Forget one. Idempotent."""
        if self._known.pop(name, None) is not None:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / f"{name}.json").unlink()
