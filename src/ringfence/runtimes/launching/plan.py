"""A plan: what the launcher does to start one program, as data.

The table is the twin of ``native/launcher/ops.def``; a test compares them.
"""

from __future__ import annotations

import struct
from functools import lru_cache

Argument = int | str | bytes

# name: (number, signature): u = u64, f = index of a descriptor, s = text, b = bytes.
OPS: dict[str, tuple[int, str]] = {
    "CLONE": (1, "u"),
    "KEEP": (2, ""),
    "EXIT_FILE": (3, "s"),
    "USERNS": (4, "b"),
    "MAPS": (5, "ub"),
    "INTO_CGROUP": (6, "f"),
    "READY": (7, "u"),
    "CGROUP_JOIN": (10, "f"),
    "UNSHARE": (11, "u"),
    "HOSTNAME": (12, "s"),
    "LOOPBACK": (13, ""),
    "MOUNT": (14, "sssus"),
    "BIND": (15, "ssu"),
    "LOOP": (16, "sssu"),
    "PIVOT": (17, "s"),
    "DETACH": (18, ""),
    "MKDIR": (19, "suuu"),
    "SYMLINK": (20, "ss"),
    "MKNOD": (21, "suuu"),
    "ENTER": (48, "s"),
    "LEAVE": (49, ""),
    "WRITE": (22, "ss"),
    "MASK": (23, "s"),
    "READONLY": (24, "s"),
    "REMOUNT": (25, "su"),
    "UMOUNT": (26, "s"),
    "OWNER": (27, "uu"),
    "PRELUDE": (28, ""),
    "AWAIT": (29, "f"),
    "USERNS_ENTER": (30, ""),
    "RLIMIT": (31, "uuu"),
    "NO_NEW_PRIVS": (32, ""),
    "LANDLOCK": (33, "uu"),
    "LANDLOCK_PATH": (34, "su"),
    "LANDLOCK_APPLY": (35, ""),
    "BECOME": (36, "uuuu"),
    "DEATH_SIGNAL": (37, "u"),
    "SECCOMP": (38, "f"),
    "UMASK": (39, "u"),
    "CHDIR": (40, "s"),
    "SETSID": (41, ""),
    "FD": (42, "fu"),
    "ARG": (43, "s"),
    "ENV": (44, "s"),
    "EXEC": (45, "s"),
    "EXEC_FD": (46, "f"),
    "DETACH_BEGIN": (47, ""),
    "NETNS": (50, "f"),
    "GUARD": (51, "uub"),
    "DONE": (52, ""),
}

MAX_BYTES = 65536
NOBODY = 2**32 - 1  # "leave the owner as it is" in MKDIR and OWNER

CLONE_NEWTIME = 0x80
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC, MS_SLAVE, MS_PRIVATE = 16384, 1 << 19, 1 << 18
ATTR_RDONLY = 1

BIND_READONLY, BIND_IDMAP, BIND_DEVICES, BIND_NOEXEC = 1, 2, 4, 8
BIND_OPTIONAL, BIND_MAKE, BIND_INSIDE, BIND_FLAT, BIND_MOVE = 16, 32, 64, 128, 256

MAPS_HELPER, MAPS_DENY_SETGROUPS = 1, 2

_HEAD = struct.Struct("<HHI")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_MAP = struct.Struct("<IIII")


class Plan:
    """Steps in order, and the descriptors they name. Not reusable after the descriptors are closed."""

    __slots__ = ("_parts", "fds", "names")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.names: list[str] = []  # what each step is called in an error
        self.fds: list[int] = []

    def add(self, name: str, *arguments: Argument) -> None:
        """Append a step. Descriptor arguments are the index that :meth:`fd` gave."""
        step, label = _encode(name, arguments)
        self._parts.append(step)
        self.names.append(label)

    def extend(self, other: Plan) -> None:
        """Append the steps of a plan without descriptors (one built ahead, for speed)."""
        assert not other.fds
        self._parts.extend(other._parts)
        self.names.extend(other.names)

    def fd(self, descriptor: int) -> int:
        """The index under which steps name this descriptor; it must stay open until the spawn returns."""
        if descriptor not in self.fds:
            self.fds.append(descriptor)
        return self.fds.index(descriptor)

    def encode(self) -> bytes:
        """The steps as the launcher reads them."""
        return b"".join(self._parts)


# Most steps are the same in every plan.
@lru_cache(maxsize=2048)
def _encode(name: str, arguments: tuple[Argument, ...]) -> tuple[bytes, str]:
    """The bytes of a step, and what it is called in an error."""
    number, signature = OPS[name]
    body = b""
    for letter, argument in zip(signature, arguments, strict=True):
        if isinstance(argument, int):
            body += _U64.pack(argument)
        elif letter == "s":
            text = argument.encode("utf-8", "surrogateescape") if isinstance(argument, str) else argument
            body += _U32.pack(len(text) + 1) + text + b"\0"
        else:
            assert isinstance(argument, bytes)
            body += _U32.pack(len(argument)) + argument
    words = [argument for argument in arguments if isinstance(argument, str)]
    return _HEAD.pack(number, 0, len(body)) + body, " ".join([name.lower(), *words[:2]])


def id_maps(users: list[tuple[int, int, int]], groups: list[tuple[int, int, int]]) -> bytes:
    """The bytes of USERNS and MAPS; each tuple is inside, outside, count."""
    return b"".join(
        [_MAP.pack(0, *line) for line in users] + [_MAP.pack(1, *line) for line in groups],
    )
