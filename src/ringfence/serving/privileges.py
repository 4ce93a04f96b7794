"""Giving privileges up for good, and proving that they are gone."""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

from ringfence.model.errors import HostLimit, InvalidRequest

USER = "ringfence"
UID = 64990  # where there is no user of that name: one that no package gives away
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_MOST_CAPABILITIES = 64


def api_user(name: str | None) -> tuple[int, int]:
    """Uid and gid that the API runs as when we are root.

    Raises:
        InvalidRequest: no such user, or it is root.
    """
    if name is not None and name.isascii() and name.isdigit():
        found = (int(name), int(name))
    else:
        try:
            entry = pwd.getpwnam(name or USER)
            found = (entry.pw_uid, entry.pw_gid)
        except KeyError:
            if name is not None:
                raise InvalidRequest(f"there is no user {name!r}", hint="give a name or a number") from None
            found = (UID, UID)
    if 0 in found:
        raise InvalidRequest("the API never runs as root", hint="give it a user of its own")
    return found


def dies_with_parent(signal: int) -> None:
    """Get this signal when whoever started us dies."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def drop(uid: int, gid: int) -> None:
    """Be this user, with no group, capability or way to get one. Called between fork and exec.

    Raises:
        OSError: some of it can't be done.
    """
    for capability in range(_MOST_CAPABILITIES):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # beyond the last one that this kernel knows
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def verify(uid: int) -> None:
    """This process is that user and can do nothing that it can't.

    Raises:
        HostLimit: it could; the message says what.
    """
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    wrong = [
        name
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
        if int(status.get(name, "0").strip(), 16)
    ]
    if set(map(int, status["Uid"].split())) != {uid} or 0 in map(int, status["Gid"].split()):
        wrong.append("user or group")
    if status.get("Groups", "").split():
        wrong.append("groups")
    if status.get("NoNewPrivs", "0").strip() != "1":
        wrong.append("no_new_privs")
    if wrong:
        raise HostLimit(
            f"the API's process kept privileges: {', '.join(wrong)}",
            hint="start `ringfence serve` as root without file capabilities on Python, or as a normal user",
        )


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
