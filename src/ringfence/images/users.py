"""Who an image says it runs as, by its own files."""

from __future__ import annotations

from dataclasses import replace

from ringfence.images.contract import TemplateConfig
from ringfence.images.merged import Merged

_LAST = 65535


def resolve(config: TemplateConfig, root: Merged) -> TemplateConfig:
    """The configuration with ``uid`` and ``gid`` for its ``user``; ``None`` where the image does not say."""
    user, _, group = config.user.partition(":")
    if not user:
        return replace(config, uid=0, gid=0)
    users = table(root, "/etc/passwd")
    entry = next((fields for fields in users if fields[0] == user), None)
    if user.isascii() and user.isdigit():
        uid = _number(user)
        entry = next((fields for fields in users if fields[2] == user), None)
    else:
        uid = _number(entry[2]) if entry else None
    if group:
        gid = _number(group)
        if gid is None:
            groups = table(root, "/etc/group")
            gid = next((_number(fields[2]) for fields in groups if fields[0] == group), None)
    else:
        gid = _number(entry[3]) if entry and len(entry) > 3 else 0
    return replace(config, uid=uid, gid=gid)


def table(root: Merged, path: str) -> list[list[str]]:
    """The lines of ``/etc/passwd`` or ``/etc/group``, split at the colons; three fields or more."""
    text = (root.read(path) or b"").decode("utf-8", "replace")
    found = [line.split(":") for line in text.splitlines() if not line.startswith("#")]
    return [fields for fields in found if len(fields) >= 3]


def _number(text: str) -> int | None:
    return (
        int(text) if text.isascii() and text.isdigit() and int(text[:9]) <= _LAST and len(text) < 9 else None
    )
