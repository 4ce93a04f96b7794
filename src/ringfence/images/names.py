"""Names of templates: ``python:3.12``, ``team/base`` (its tag is then ``latest``), ``sha256:…``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ringfence.model.errors import InvalidRequest, NotFound

LATEST = "latest"
RESERVED = frozenset({"host", "docker", "podman", "oci", "rootfs", "sha256"})  # words that sources begin with
_NAME = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+|/)[a-z0-9]+)*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_SHORT = re.compile(r"sha256:[0-9a-f]{8,64}", re.ASCII)
_LONGEST = 180  # bytes of a name: with its tag it is the name of a file


def full_name(text: str) -> str:
    """``name:tag`` of a name with or without a tag.

    Raises:
        InvalidRequest: not a name; the hint says what one looks like.
    """
    name, colon, tag = text.partition(":")
    tag = tag if colon else LATEST
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or not _TAG.fullmatch(tag):
        raise InvalidRequest(
            f"{text!r} is no name of a template",
            hint="small letters, digits, . _ - and /, then perhaps a tag: python:3.12, team/base",
        )
    if name in RESERVED:
        raise InvalidRequest(
            f"a template can't be called {name!r}: the word has a meaning of its own", hint="choose another"
        )
    return f"{name}:{tag}"


def is_digest(text: str) -> bool:
    """Whether it is a whole ``sha256:…``."""
    return _DIGEST.fullmatch(text) is not None


def is_digest_or_part(text: str) -> bool:
    """Whether it is a ``sha256:…`` of at least eight digits."""
    return _SHORT.fullmatch(text) is not None


def unknown(text: str, known: Iterable[str]) -> NotFound:
    """The error for a name that nobody has, with the nearest ones."""
    from difflib import get_close_matches

    names = sorted(known)
    short = {name.removesuffix(f":{LATEST}"): name for name in names}
    found = get_close_matches(text.removesuffix(f":{LATEST}"), short, n=3, cutoff=0.6)
    close = [short[name] for name in found]
    # A right name with a wrong tag is the usual mistake, and often too far away to be close.
    close += [name for name in names if name.partition(":")[0] == text.partition(":")[0]][:3]
    close = list(dict.fromkeys(close))[:3]
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif names:
        hint = "`ringfence template ls` lists those that are here; `ringfence template add` brings others"
    else:
        hint = "there are none here yet but `host`; add one with `ringfence template add SOURCE`"
    return NotFound(f"no template {text!r}", hint=hint)
