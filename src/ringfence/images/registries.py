"""Which registries images may come from, by which mirrors, and with which credentials.

Two files are read, if they are there: ``/etc/ringfence/registries.yaml`` of the machine, and the user's
``~/.config/ringfence/registries.yaml`` (or what ``RINGFENCE_REGISTRIES`` names)::

    allow:                              # else every registry is; both files must allow one
      - docker.io/library               # a registry, and perhaps the beginning of a path
      - "*.corp.example"
    insecure: ["localhost:5000"]        # by plain HTTP, or with a certificate that nobody vouches for
    mirrors:
      docker.io: ["mirror.corp.example/hub"]    # tried in order, then the registry itself
    dockerConfig: /etc/ringfence/docker.json    # credentials, instead of Docker's and podman's own files
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

MACHINE = "/etc/ringfence/registries.yaml"
VARIABLE = "RINGFENCE_REGISTRIES"
LARGEST = 1 << 20
_KEYS = ("allow", "insecure", "mirrors", "dockerConfig")
_HOST = r"(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_PATH = r"(?:/[a-z0-9]+(?:(?:[._]|__|-+|/)[a-z0-9]+)*)?"
_PLACE = re.compile(_HOST + _PATH, re.ASCII)
_PATTERN = re.compile(r"(?:\*\.)?" + _HOST + _PATH, re.ASCII)


@dataclass(frozen=True, slots=True)
class Registries:
    """The two files, put together. ``allow``: one tuple for each file that has it; an image passes all."""

    allow: tuple[tuple[str, ...], ...] = ()
    insecure: tuple[str, ...] = ()
    mirrors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    docker_config: str = ""
    files: tuple[str, ...] = ()

    def check(self, place: str) -> None:
        """Refuse an image of a registry that is not allowed; ``place``: ``registry/path[:tag][@digest]``.

        Raises:
            InvalidRequest: it is not; the hint names the file and what it allows.
        """
        path = _without_tag(place)
        for allowed, file in zip(self.allow, self.files, strict=False):
            if not any(_fits(path, pattern) for pattern in allowed):
                raise InvalidRequest(
                    f"images of {path} are not allowed on this machine",
                    hint=f"{file} allows {', '.join(allowed) or 'none at all'}",
                    registry=path.partition("/")[0],
                )

    def is_insecure(self, registry: str) -> bool:
        """Whether a registry (with its port) may be spoken to without TLS that proves who it is."""
        return registry in self.insecure

    def mirrors_of(self, place: str) -> tuple[str, ...]:
        """Mirrors for an image, in order; those of the longest fitting beginning."""
        path = _without_tag(place)
        fitting = [prefix for prefix in self.mirrors if _fits(path, prefix)]
        return self.mirrors[max(fitting, key=len)] if fitting else ()


def load() -> Registries:
    """Read both files.

    Raises:
        InvalidRequest: one can't be read, or makes no sense; then nothing is fetched.
    """
    user = os.environ.get(VARIABLE)
    if user is not None and not os.path.exists(user):
        raise InvalidRequest(f"{VARIABLE}: there is no {user}", hint="name a file, or unset it")
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    allow: list[tuple[str, ...]] = []
    files: list[str] = []
    insecure: list[str] = []
    mirrors: dict[str, tuple[str, ...]] = {}
    docker = ""
    for path in (MACHINE, user or f"{config}/ringfence/registries.yaml"):
        found = _read(path)
        if "allow" in found:
            allow.append(_list(found["allow"], path, "allow", _PATTERN))
            files.append(path)
        insecure += _list(found.get("insecure", []), path, "insecure", _PLACE)
        for prefix, listed in _mapping(found.get("mirrors", {}), path).items():
            mirrors.setdefault(prefix, listed)  # the machine's count
        value = found.get("dockerConfig", "")
        if not isinstance(value, str):
            raise _wrong(path, "dockerConfig", "is no path")
        docker = docker or os.path.expanduser(value)
    return Registries(tuple(allow), tuple(insecure), mirrors, docker, tuple(files))


@dataclass(frozen=True, slots=True)
class Given:
    """What skopeo is given for one image: arguments before ``copy`` and after it, and open descriptors."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    descriptors: tuple[int, ...]


@contextlib.contextmanager
def given(
    place: str, registries: Registries, *, insecure: bool = False, authfile: str = ""
) -> Iterator[Given]:
    """Credentials and mirrors for one image, as files that are in memory only and gone afterwards.

    Args:
        place: ``registry/path[:tag][@digest]``.
        registries: see :func:`load`.
        insecure: asked for by the user, for this image.
        authfile: credentials that the user named; else Docker's and podman's own files are looked at.

    Raises:
        InvalidRequest: not allowed; or credentials can't be read, or their helper fails.
    """
    from ringfence.images import registries_credentials as credentials

    registries.check(place)
    registry = place.partition("/")[0]
    mirrors = registries.mirrors_of(place)
    auths: dict[str, dict[str, str]] = {}
    for host in dict.fromkeys((registry, *(mirror.partition("/")[0] for mirror in mirrors))):
        auth = credentials.find(host, authfile or registries.docker_config)
        if auth is not None:
            auths[host] = auth
    opened: list[int] = []
    try:
        before = [
            "--registries-conf",
            _memory(_registries_conf(registry, mirrors, registries, insecure), opened),
        ]
        after = []
        if auths:
            text = json.dumps({"auths": auths})
            after += ["--src-authfile", _memory(text, opened)]
        else:
            after += ["--src-no-creds"]
        if insecure:
            after += ["--src-tls-verify=false"]
        yield Given(tuple(before), tuple(after), tuple(opened))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _registries_conf(registry: str, mirrors: tuple[str, ...], registries: Registries, insecure: bool) -> str:
    """In containers-registries.conf(5)'s form. Every value was checked by a pattern, so quoting is JSON's."""
    unsafe = insecure or registries.is_insecure(registry)
    lines = [
        'short-name-mode = "enforcing"',
        "[[registry]]",
        f"prefix = {json.dumps(registry)}",
        f"location = {json.dumps(registry)}",
        f"insecure = {'true' if unsafe else 'false'}",
    ]
    for mirror in mirrors:
        bad = insecure or registries.is_insecure(mirror.partition("/")[0])
        lines += [
            "[[registry.mirror]]",
            f"location = {json.dumps(mirror)}",
            f"insecure = {'true' if bad else 'false'}",
        ]
    return "\n".join(lines) + "\n"


def _memory(text: str, opened: list[int]) -> str:
    """A file that only its holder can open, by a name that holds in a child that inherits it."""
    descriptor = os.memfd_create("ringfence", os.MFD_CLOEXEC)
    opened.append(descriptor)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return f"/proc/self/fd/{descriptor}"


def _fits(path: str, pattern: str) -> bool:
    host, slash, rest = pattern.partition("/")
    registry, _, below = path.partition("/")
    if host.startswith("*."):
        if not registry.endswith(host[1:]) or registry == host[1:]:
            return False
    elif registry != host:
        return False
    return not slash or below == rest or below.startswith(rest + "/")


def _without_tag(place: str) -> str:
    head, slash, name = place.partition("@")[0].rpartition("/")
    return head + slash + name.partition(":")[0]


# -- the file


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidRequest(
            f"{path} can't be read: {error.strerror}", hint="it says which registries are allowed"
        ) from None
    import yaml

    try:
        if len(text) > LARGEST:
            raise ValueError("larger than 1 MiB")
        value = yaml.safe_load(text.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: not a mapping", hint=f"known keys: {', '.join(_KEYS)}")
    for key in value:
        if key not in _KEYS:
            raise InvalidRequest(f"{path}: {key!r} is no key", hint=f"known keys: {', '.join(_KEYS)}")
    return value


def _list(value: Any, path: str, key: str, pattern: re.Pattern[str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _wrong(path, key, "is no list")
    for each in value:
        if not isinstance(each, str) or not pattern.fullmatch(each):
            raise _wrong(path, key, f"{str(each)[:100]!r} is no registry")
    return tuple(value)


def _mapping(value: Any, path: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise _wrong(path, "mirrors", "is no mapping")
    for prefix in value:
        if not isinstance(prefix, str) or not _PLACE.fullmatch(prefix):
            raise _wrong(path, "mirrors", f"{str(prefix)[:100]!r} is no registry")
        if "/" in prefix:
            raise _wrong(path, "mirrors", f"{prefix}: a mirror is of a whole registry")
    return {prefix: _list(listed, path, f"mirrors.{prefix}", _PLACE) for prefix, listed in value.items()}


def _wrong(path: str, key: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {key}: {what}", hint="as in docker.io, ghcr.io/team or localhost:5000")
