"""Secrets: stored encrypted, put into requests by the proxy, never given back.

A sandbox sees *placeholders*: words that are worth nothing. Each is made from the sandbox's id and the
secret's name with a key of ours, so nothing has to be kept to know one again, and nobody can make one up.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringfence.egress.keys import MasterKey, SecretsUnavailable, derive, give, seal, unseal
from ringfence.model.errors import InvalidRequest, NotFound, QuotaExceeded
from ringfence.model.values import dataclass

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
PLACEHOLDER = re.compile(r"rfsecret0[a-z2-7]{32}", re.ASCII | re.IGNORECASE)
PLACEHOLDER_SIZE = 41
MOST_VALUE = 32 * 1024  # bytes
MOST_SECRETS, MOST_SEALED = 1000, 1024 * 1024  # of one project: every proxy reads all projects' file


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """What may be known about a secret. ``version`` grows with each rotation; ``changed``: epoch seconds."""

    name: str
    project: str
    version: int
    changed: float


class SecretStore:
    """The secrets of all projects, in one file. Any number of processes may write to it."""

    def __init__(self, folder: Path, key: MasterKey) -> None:
        self._path = folder / "secrets.json"
        self._key = key
        self._read: tuple[tuple[int, int, int], dict[str, Any]] | None = None

    def _entries(self) -> dict[str, Any]:
        """By ``project/name``. A file that another process has changed is read anew."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if self._read is None or self._read[0] != stamp:
                self._read = (stamp, json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise SecretsUnavailable(f"the secrets can't be read: {error}") from None
        return self._read[1]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_path = self._path.with_suffix(".lock")
        with open(lock_path, "ab") as lock:
            give(lock_path)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read = None
            entries = dict(self._entries())
            yield entries
            draft = self._path.with_suffix(".new")
            with open(draft, "w") as file:
                json.dump(entries, file)
                file.flush()
                os.fsync(file.fileno())
            give(draft)
            os.replace(draft, self._path)

    async def put(self, project: str, name: str, value: str) -> SecretInfo:
        """Store a secret, or rotate it: the next request uses the new value.

        Raises:
            InvalidRequest: the name or value can't be one. QuotaExceeded: the project has too many.
            SecretsUnavailable: there is no key, or the file can't be written.
        """
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:70]!r} is no name of a secret", hint="letters, digits, '.', '_', '-'"
            )
        data = value.encode()
        if not data or len(data) > MOST_VALUE or any(byte < 32 or byte == 127 for byte in data):
            raise InvalidRequest(
                "a secret is 1 to 32,768 bytes without line breaks or control characters",
                hint="a trailing newline is not part of it",
            )
        key = derive(await self._key.get(), "secrets")
        with self._changing() as entries:
            about = f"{project}/{name}"
            version = int(entries.get(about, {}).get("version", 0)) + 1
            now = time.time()
            sealed = base64.b64encode(seal(key, data, f"{about}#{version}")).decode()
            own = [one for key, one in entries.items() if key.rpartition("/")[0] == project and key != about]
            if len(own) >= MOST_SECRETS or sum(len(one["sealed"]) for one in own) > MOST_SEALED:
                raise QuotaExceeded(
                    f"the project has {len(own)} secrets, as many as it may or as long as they may be",
                    hint="remove those that are not used any more",
                )
            entries[about] = {"version": version, "changed": now, "sealed": sealed}
        return SecretInfo(name, project, version, now)

    def list(self, project: str | None = None) -> list[SecretInfo]:
        """What there is, without values."""
        found = []
        for about, entry in sorted(self._entries().items()):
            owner, _, name = about.rpartition("/")
            if project is None or owner == project:
                found.append(SecretInfo(name, owner, entry["version"], entry["changed"]))
        return found

    def remove(self, project: str, name: str) -> None:
        """Forget a secret.

        Raises:
            NotFound: there is none of that name.
        """
        with self._changing() as entries:
            if entries.pop(f"{project}/{name}", None) is None:
                raise NotFound(
                    f"there is no secret {name[:70]!r}", hint="`ringfence egress secret ls` lists them"
                )

    async def value(self, project: str, name: str) -> str:
        """For the proxy alone.

        Raises:
            SecretsUnavailable: there is none, or it can't be decrypted. The request fails.
        """
        key = derive(await self._key.get(), "secrets")
        about = f"{project}/{name}"
        entry = self._entries().get(about)
        if entry is None:
            raise SecretsUnavailable(
                f"there is no secret {name}", hint=f"`ringfence egress secret set {name}`"
            )
        try:
            data = base64.b64decode(entry["sealed"])
        except (ValueError, KeyError):
            raise SecretsUnavailable(f"the secret {name} is damaged") from None
        return unseal(key, data, f"{about}#{entry['version']}").decode()

    # -- placeholders

    async def placeholder(self, sandbox: str, name: str) -> str:
        """What a sandbox sees in place of a secret."""
        return _placeholder(derive(await self._key.get(), "placeholders"), sandbox, name)

    async def bound(self, sandboxes: Iterable[str], names: Iterable[str]) -> dict[str, str]:
        """Placeholder → name of secret, for a sandbox and those it was forked from."""
        key = derive(await self._key.get(), "placeholders")
        names = list(names)
        return {_placeholder(key, sandbox, name): name for sandbox in sandboxes for name in names}


def _placeholder(key: bytes, sandbox: str, name: str) -> str:
    mark = hmac.new(key, f"{sandbox}/{name}".encode(), hashlib.sha256).digest()[:20]
    return "rfsecret0" + base64.b32encode(mark).decode().lower()
