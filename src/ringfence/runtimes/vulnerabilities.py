"""Known holes of the programs that runtimes use, by version. Sources: the projects' security advisories.

Versions are the projects' own numbers: a distribution may have repaired an old number, which the number does
not say.
"""

from __future__ import annotations

import re

# (vulnerability, first good version of each release line): a version is bad if it is below the first good
# one of its own line, or of no line newer than the last.
_FIXES: dict[str, tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]] = {
    "runc": (
        ("CVE-2022-29162", ((1, 1, 2),)),
        ("CVE-2023-25809", ((1, 1, 5),)),
        ("CVE-2023-27561", ((1, 1, 5),)),
        ("CVE-2023-28642", ((1, 1, 5),)),
        ("CVE-2024-21626", ((1, 1, 12),)),
        ("CVE-2024-45310", ((1, 1, 14),)),
        ("CVE-2025-31133", ((1, 2, 8), (1, 3, 3), (1, 4, 0))),
        ("CVE-2025-52565", ((1, 2, 8), (1, 3, 3), (1, 4, 0))),
        ("CVE-2025-52881", ((1, 2, 8), (1, 3, 3), (1, 4, 0))),
        ("CVE-2026-41579", ((1, 3, 6), (1, 4, 3))),
    ),
    "crun": (
        ("CVE-2019-18837", ((0, 10, 5),)),
        ("CVE-2022-27650", ((1, 4, 4),)),
        ("CVE-2025-24965", ((1, 20, 0),)),
    ),
    "firecracker": (("CVE-2026-5747", ((1, 14, 4), (1, 15, 1))),),
    "jailer": (("CVE-2026-1386", ((1, 13, 2), (1, 14, 1))),),
}
# Below these a version is older than the hole.
_SINCE: dict[str, tuple[int, ...]] = {"CVE-2026-5747": (1, 13, 0)}


def numbers_of(version: str) -> tuple[int, ...]:
    """The three first numbers of a version; empty if it has none."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return (*found, 0, 0)[:3] if found else ()


def vulnerabilities(program: str, version: str) -> tuple[str, ...]:
    """Known holes of a version of a program; empty if none, or if nothing is known of it."""
    numbers = numbers_of(version)
    if not numbers:
        return ()
    before = re.search(r"\d[-.~+]?(rc|alpha|beta|dev)", version) is not None  # 1.4.0-rc.1 is not yet 1.4.0
    found = []
    for name, fixes in _FIXES.get(program, ()):
        since = _SINCE.get(name)
        if since is not None and numbers < since:
            continue
        own = [good for good in fixes if good[:2] == numbers[:2]]
        bad = numbers < own[0] if own else numbers < fixes[0] or (numbers < fixes[-1] and len(fixes) > 1)
        bad = bad or (before and numbers in own)
        if bad:
            found.append(name)
    return tuple(found)
