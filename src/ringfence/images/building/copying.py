"""One COPY or WORKDIR: what it brings, where it goes, and as which archive."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Iterator
from typing import Any

from ringfence.images import users
from ringfence.images.building import archives
from ringfence.images.building.archives import Placed
from ringfence.images.building.context import Context, Found
from ringfence.images.building.steps import Step
from ringfence.images.contract import TemplateConfig
from ringfence.images.merged import Merged
from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """What a COPY comes to in one template."""

    found: tuple[Found, ...]
    inline: dict[str, bytes]
    place: Placed

    def content(self) -> dict[str, Any]:
        """What its layer depends on beside the template below. JSON-able."""
        place = self.place
        return {
            "files": [[each.name, each.kind, each.mode, each.digest] for each in self.found],
            "place": [place.path, place.uid, place.gid, place.mode],
        }


def prepare(step: Step, context: Context, below: Merged | None) -> Copy:
    """Find what a COPY takes, and where it goes.

    Raises:
        NotFound, InvalidRequest, HostLimit: see :class:`Context`; or there is no such destination or user.
    """
    inline: dict[str, bytes] = {}
    written = []
    for name, text in step.inline:
        data = text.encode("utf-8", "surrogateescape")
        digest = hashlib.sha256(data).hexdigest()
        inline[digest] = data
        written.append(Found(name, "file", "", 0o644, len(data), digest))
    target = _through_links(below, step.target.rstrip("/") or "/")
    existing = below.find(target) if below is not None else None
    is_folder = target == "/" or (existing is not None and stat.S_ISDIR(existing[1].st_mode))
    into = step.target.endswith("/") or is_folder
    if into and existing is not None and not is_folder:
        raise InvalidRequest(f"{step.target} is a file in the template", hint="copy to another place")
    found = context.find(step.sources, into_folder=into) if step.sources else []
    if not into and len(found) > 1 and not any(each.name == "" and each.kind == "folder" for each in found):
        raise InvalidRequest(f"several files can't be copied to {target}", hint=f"write {target}/")
    uid, gid = _owner(step.owner, below)
    return Copy(
        tuple(sorted((*found, *written), key=lambda each: each.name)),
        inline,
        Placed(target, uid, gid, step.mode),
    )


def archive(copy: Copy, context: Context, below: Merged | None, epoch: int) -> Iterator[bytes]:
    """The layer of a COPY."""
    return archives.of_context(context, list(copy.found), copy.inline, copy.place, below, epoch=epoch)


def folder_to_make(step: Step, below: Merged | None) -> str:
    """Where WORKDIR's folder has to be made; empty if it is there.

    Raises:
        InvalidRequest: a file is there.
    """
    path = _through_links(below, step.target)
    existing = below.find(path) if below is not None else None
    if path == "/" or (existing is not None and stat.S_ISDIR(existing[1].st_mode)):
        return ""
    if existing is not None:
        raise InvalidRequest(f"{step.target} is a file in the template", hint="choose another folder")
    return path


def run_as(config: TemplateConfig, below: Merged) -> int:
    """The user id of RUN.

    Raises:
        InvalidRequest: the template does not know the user.
    """
    resolved = users.resolve(config, below)
    if resolved.uid is None or (config.user and resolved.gid is None):
        raise InvalidRequest(
            f"the template knows no user {config.user!r}",
            hint="make it first (RUN useradd …), or write a number",
        )
    return resolved.uid


def _owner(text: str, below: Merged | None) -> tuple[int, int]:
    if not text:
        return 0, 0
    user, colon, group = text.partition(":")
    looked = below or Merged((os.devnull,))
    if user.isdigit() and not colon:
        text = f"{user}:{user}"
    if below is None and not all(part.isdigit() for part in text.split(":")):
        raise InvalidRequest(f"--chown={text}: there are no users in an empty template", hint="write numbers")
    resolved = users.resolve(TemplateConfig(user=text), looked)
    if resolved.uid is None or resolved.gid is None:
        raise InvalidRequest(
            f"--chown={user}{colon}{group}: the template knows no such user or group",
            hint="make it first (RUN useradd …), or write numbers",
        )
    return resolved.uid, resolved.gid


def _through_links(below: Merged | None, path: str) -> str:
    """The path through no link, its last part included. No part of it is a file."""
    if below is None:
        return posixpath.normpath(path)
    resolved = below.resolve(path)
    parts = resolved.strip("/").split("/")[:-1]
    for count in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:count])
        found = below.find(folder)
        if found is not None and not stat.S_ISDIR(found[1].st_mode):
            raise InvalidRequest(f"{folder} is a file in the template", hint="choose another place")
    return resolved
