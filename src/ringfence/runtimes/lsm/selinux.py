"""The SELinux label of a container: type and categories, so that two sandboxes are strangers to each other.

The type is the distribution's own for containers (``container_t``, of the package container-selinux); the
categories are a pair made from the number of the sandbox's range of user ids, so two living sandboxes of one
host never have the same pair (there are 523,776 pairs).
"""

from __future__ import annotations

import os
import re

TYPE, FILE_TYPE = "container_t", "container_file_t"
CATEGORIES = 1024
_CONTEXTS = "etc/selinux/{policy}/contexts/lxc_contexts"  # where policies name the types for containers
_TYPE = re.compile(r"[a-z][a-z0-9_]{1,62}")


def types(*, root: str = "/") -> tuple[str, str]:
    """(type of processes, type of files) that the host's policy has for containers."""
    policy = _setting(root, "etc/selinux/config", "SELINUXTYPE") or "targeted"
    path = _CONTEXTS.format(policy=policy)
    found = []
    for key, usual in (("process", TYPE), ("file", FILE_TYPE)):
        parts = _setting(root, path, key).strip('"').split(":")
        found.append(parts[2] if len(parts) > 2 and _TYPE.fullmatch(parts[2]) else usual)
    return found[0], found[1]


def categories(number: int) -> str:
    """The pair of categories of the sandbox with this number, as ``c17,c803``; distinct for distinct ones."""
    pairs = CATEGORIES * (CATEGORIES - 1) // 2
    number %= pairs
    low = 0
    while number >= CATEGORIES - 1 - low:
        number -= CATEGORIES - 1 - low
        low += 1
    return f"c{low},c{low + 1 + number}"


def label(number: int, *, root: str = "/") -> str:
    """The whole label of a container's processes."""
    return f"system_u:system_r:{types(root=root)[0]}:s0:{categories(number)}"


def engine_options(number: int, *, root: str = "/") -> list[str]:
    """What an engine on this machine is told; never ``label=disable``."""
    return [f"label=type:{types(root=root)[0]}", f"label=level:s0:{categories(number)}"]


def _setting(root: str, path: str, key: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
            for line in file:
                name, equals, value = line.partition("=")
                if equals and name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""
