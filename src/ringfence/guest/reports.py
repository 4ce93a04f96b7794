"""What the guest says about itself and its commands. Reported, never measured."""

from __future__ import annotations

from typing import NamedTuple

from ringfence.guest.fields import Fields, decode
from ringfence.guest.processes import is_id
from ringfence.model.errors import ProtocolViolation


class ProcessInfo(NamedTuple):
    """One row of the guest's table of commands. ``state`` is running, exited or killed."""

    id: str
    pid: int
    state: str
    code: int | None
    signal: int | None
    stdout: int
    stderr: int
    argv0: str
    started_ns: int


class ProcessList(list[ProcessInfo]):
    """The table; ``truncated`` when the guest had more than fits in an answer."""

    truncated = False


class GuestStats(NamedTuple):
    """What the guest says about itself. Reported, never measured."""

    processes: int
    resident_bytes: int
    load: float
    uptime: float  # seconds
    channels: int
    links: int


def parse_list(reply: Fields) -> ProcessList:
    """The answer to process.list.

    Raises:
        ProtocolViolation: a record that can't be.
    """
    found = ProcessList()
    found.truncated = 2 in reply
    for raw in reply.all(1):
        record = decode(raw)
        number = record.text(1, limit=64)
        if not is_id(number):
            raise ProtocolViolation("a process with an impossible id")
        state = record.number(3, most=2)
        ended = record.number(4, 0, most=255)
        found.append(
            ProcessInfo(
                number,
                record.number(2),
                ("running", "exited", "killed")[state],
                ended if state == 1 else None,
                ended if state == 2 else None,
                record.number(5, 0),
                record.number(6, 0),
                record.text(7, "", limit=256),
                record.number(8, 0),
            )
        )
    return found


def parse_stats(reply: Fields) -> GuestStats:
    """The answer to stats.

    Raises:
        ProtocolViolation: a value that is no number.
    """
    return GuestStats(
        reply.number(1, 0),
        reply.number(2, 0),
        reply.number(3, 0) / 1000,
        reply.number(4, 0) / 1e9,
        reply.number(5, 0),
        reply.number(6, 0),
    )
