"""The native programs: built from ``native/`` into this folder and shipped in the wheel.

Belongs here: where they are. Does not belong here: running them (``ringfence.runtimes.launching``).
"""

from __future__ import annotations

import os

from ringfence.model.errors import HostLimit

FOLDER = os.path.dirname(os.path.abspath(__file__))


def path(name: str) -> str:
    """The path of ``ringfence-<name>``; ``name`` is ``launcher``, ``agent`` or ``link``.

    ``RINGFENCE_NATIVE`` names another folder to look in (sanitizer builds, distribution packages).

    Raises:
        HostLimit: it has not been built.
    """
    found = os.path.join(os.environ.get("RINGFENCE_NATIVE") or FOLDER, f"ringfence-{name}")
    if not os.access(found, os.X_OK):
        raise HostLimit(
            f"the native program ringfence-{name} is missing: {found}",
            hint="build it with `make -C native` (needs gcc; musl-tools makes it smaller)",
            path=found,
        )
    return found


def launcher() -> str:
    """The path of the launcher."""
    return path("launcher")


def agent() -> str:
    """The path of the guest agent."""
    return path("agent")
