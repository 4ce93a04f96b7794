"""The same attacks by root of the sandbox (``process.user: 0``), whose capabilities hold only in there.

What is not named here must come out as for a normal workload.
"""

from __future__ import annotations

from security.attacks import Attack

# Left out: what the filter denies whoever asks, and what namespaces hide from everybody alike.
_LEFT_OUT = (
    *("call-", "host-", "filter-", "keyring-"),
    *("memory-", "disk-", "inode-", "fd-", "output-", "fork-"),
)
OUTCOMES = {
    "become-another": "succeeded",  # its own ids, none of which is anybody's on the host
    "capabilities": "succeeded",  # over its own user namespace, and none over those of mounts or network
    "set-user-id-made-inside": "unchanged",
    # Root of the sandbox may do to the agent what it likes: that harms its own sandbox only.
    "agent-fd": "no-effect",
    "agent-oom": "no-effect",
    "agent-kill": "no-effect",
    "agent-term": "no-effect",
    "agent-pidfd_signal": "no-effect",
}


def by_root(attack: Attack) -> bool:
    """Is it tried as root of the sandbox, too?"""
    return not attack.name.startswith(_LEFT_OUT) and not attack.mounts


def outcome(attack: Attack, wall: str) -> str:
    """What must come of it."""
    return OUTCOMES.get(attack.name, attack.expect[wall])
